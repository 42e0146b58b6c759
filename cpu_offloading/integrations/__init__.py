# SPDX-License-Identifier: Apache-2.0
"""Offloading in a trainer by one line: a module for each trainer, which is imported only when it is used."""

from reference_impl.integrations import Offloading, OffloadReport, Wanted

__all__ = ["OffloadReport", "Offloading", "Wanted"]
