# SPDX-License-Identifier: Apache-2.0
"""Why a process aborted outside of Python: its last words, and the stack that its fault handler printed.

An abort (SIGABRT, SIGSEGV) has no exception and no words. A library that ends its process by one prints its reason on
the lines before, and Python's fault handler prints the thread's frames behind, innermost first.
"""

import re
from collections.abc import Sequence

from skill_tools.diagnosis.failures import Failure, Frame, frame_in, writer
from skill_tools.diagnosis.log import Log

_ABORTS = re.compile(
    r"terminate called|Fatal Python error|Segfault encountered|Aborted|Segmentation fault|Bus error|: Assertion [`']"
)
_SAYS = re.compile(
    r"(?i)\b(?:\w*error|err|fail(?:ed|ure|s)?|fatal|out of memory|invalid|unable|can(?:not|'t)|could not|refused"
    r"|assert\w*)\b|what\(\):"
)
_BESIDE = re.compile(r"(?i)may not be an issue|\bretry|\bINFO\b|\bDEBUG\b")  # lines that deny being a reason
_BEFORE, _MOST_LINES = 3000, 12  # characters and lines before an abort in which its reason may stand
_BEHIND = 12_000  # characters behind it in which its stack may stand
_LONGEST_STACK = 50_000  # characters of a stack, other ranks' lines between its own included
_STACK = re.compile(r"(?:Current thread|Thread) 0x\w+[^\n]{0,80}\(most recent call first\):")


def completed(log: Log, found: Sequence[Failure]) -> tuple[Failure, ...]:
    """Return `found`, each abort from its process's earlier reason on, with its stack."""
    return tuple(_complete(log, each) if is_bare(each) else each for each in found)


def is_bare(failure: Failure) -> bool:
    """Return whether `failure` is an abort of which no frame is known."""
    return not failure.frames and _ABORTS.search(failure.text) is not None


def _complete(log: Log, failure: Failure) -> Failure:
    at, reason = _reason(log.text, failure)
    frames = _stack(log.text, failure)
    text = f"{failure.text}, behind: {reason}" if reason and reason not in failure.text else failure.text
    return failure._replace(start=min(at, failure.start), text=text, frames=frames)


def _reason(text: str, failure: Failure) -> tuple[int, str]:
    """Return the start and the words of the reason of `failure`; its own place and "" without any."""
    end = text.rfind("\n", 0, failure.raised_at) + 1
    start, words, lines = failure.start, "", 0
    while end > 0 and lines < _MOST_LINES and failure.raised_at - end < _BEFORE:
        begin = text.rfind("\n", 0, end - 1) + 1
        name, body = writer(text, begin, end)
        if name == failure.rank:
            lines += 1
            if _SAYS.search(body) and not _BESIDE.search(body):
                start, words = begin, words or body.strip()[:300]
            elif words:
                break
        end = begin
    return start, words


def _stack(text: str, failure: Failure) -> tuple[Frame, ...]:
    """Return the failed thread's frames from Python's fault handler, outermost first."""
    if "Segfault encountered" in failure.text:  # its frames follow without a head
        return _frames(text, failure, text.find("\n", failure.raised_at) + 1)
    heads = list(_STACK.finditer(text, failure.raised_at, failure.raised_at + _BEHIND))
    head = next((each for each in heads if each[0].startswith("Current")), heads[0] if heads else None)
    if head is None:
        return ()
    return _frames(text, failure, text.find("\n", head.end()) + 1)


def _frames(text: str, failure: Failure, begin: int) -> tuple[Frame, ...]:
    """Return the frames from `begin` on, which stand innermost first, outermost first."""
    frames: list[Frame] = []
    last = min(len(text), begin + _LONGEST_STACK)
    while 0 < begin < last:
        end = text.find("\n", begin)
        end = len(text) if end < 0 else end
        name, body = writer(text, begin, end)
        if name == failure.rank:
            frame = frame_in(body)
            if frame is None:
                break
            if "sigaction" not in frame.path:  # the handler itself
                frames.append(frame)
        begin = end + 1
    return tuple(reversed(frames))
