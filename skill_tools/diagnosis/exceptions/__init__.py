"""Reads an exception by itself: its words, calls that do not fit, and what a process wrote before it aborted."""
