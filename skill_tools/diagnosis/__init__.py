# SPDX-License-Identifier: Apache-2.0
"""From a run's log to the event, the rule behind it, and the next command. Explained in docs/faq.md.

Glossary:
    log: the text of a training log or traceback, with line numbers.
    known error: a message in the log that some rule's `raises` matches.
    confirmed: of a known error's rules, those that the run's configuration breaks.
    out of memory: of the GPU (CUDA's allocator) or of the host (a failed allocation, a killed process).
    pattern: step times that suggest a cause, such as a slow first step or rising times.
"""
