# SPDX-License-Identifier: Apache-2.0
"""Reads an exception by itself: its words, calls that do not fit, and a process's last words before it aborted."""
