# SPDX-License-Identifier: Apache-2.0
"""The exceptions of a log by rank, and the one that ended the run.

Each rank, actor or task writes its own traceback, often between the lines of others; the writer's name stands in
front of the line. A rank's last exception counts, because earlier ones were caught; of several ranks the first to
fail, because the others fail of it. An exception after which training went on ended nothing.
"""

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import NamedTuple

from skill_tools.diagnosis.log import Log

# The prefix of a line: a timestamp or the name of the container, a rank of torchrun, a Ray actor and the
# engine in it, a task of Slurm or MPI, and the head of a logger that prints each line of a traceback.
_PROCESS = (
    r"[(\[]\w[^()\[\]\n]{0,80}?(?:\[[^()\[\]\n]{1,30}\])?[^()\[\]\n]{0,20}?pid=\d+[^()\[\]\n]{0,60}[)\]]"
)
_PREFIX = re.compile(
    r"(?:\d{4}-\d\d-\d\dT[\d:.]+Z (?:std(?:err|out) F )?)?"
    rf"(?P<rank>(?:\[(?:rank|default)\d+\]:|{_PROCESS}(?: \[repeated [^\]\n]{{1,90}}\])?(?: {_PROCESS})?"
    r"|\[\d+,\d+\]<std(?:err|out)>:|[\w.-]{1,40} {1,8}\| |[\w.-]{1,40}: (?=\[rank\d+\]:|  File|Traceback)"
    r"|\d+: (?=\[rank|  ?File|Traceback|\w+Error))?)"
    r"(?: ?\[rank\d+\]:)? ?"
    r"(?:(?:ERROR|CRITICAL) \d\d-\d\d [\d:]{8} (?:\[[\w./-]{1,60}:\d+\] ?)?)?"
)
# Python's own form, IPython's, Colab's and rich's; rich draws a bar in front.
_FRAME = re.compile(r"""\s*(?:File "(?P<path>[^"\n]+)", line (?P<line>\d+)(?:,? in (?P<function>[^\s\n]+))?"""
                    r"""|File (?P<cell>[^\s",]+):(?P<cell_line>\d+), in (?P<cell_function>[\w.<>]+)"""
                    r"""|(?:│ )?(?P<bare>(?:/|[A-Za-z]:\\)[^\s:,"]+\.py)(?::(?P<bare_line>\d+))? in\b"""
                    r"""(?: (?P<bare_function>[\w.<>]+))?)""")  # fmt: skip
_ARROW = re.compile(r"\n-{2,}> ?(?P<line>\d{1,6}) ")  # Colab's, at the line below a frame
_RAISED = re.compile(
    r"(?:E {3,})?(?P<error>(?:[A-Za-z_][\w.]*\.)?[A-Za-z_]\w*)(?:\([\w.]+\))?(?::(?: (?P<words>.*))?)?$"
)
_REFUSED = re.compile(
    r"(?P<program>\S+?): error: \S"
)  # an argument parser's last line, below `usage: PROGRAM`
_ERROR = re.compile(
    r"(?:Error|Exception|Interrupt|Exit|Failure|Timeout|Abort|Fault|Killed|Empty|Pool|error\.Again)$"
)
# A trainer's logger that catches torch's error writes its words without the exception's name.
_LOGGED = re.compile(
    r"\b(?:ERROR|[Ee]rror)\b.{0,80}?: (?P<words>Expected all tensors to be on the same device\b.*)"
)
_TORCHS = "RuntimeError"
_TRACEBACK = "Traceback (most recent call last)"
_CHAINED = re.compile(r"During handling of the above exception|The above exception was the direct cause")
_IGNORED = "Exception ignored in"
_NATIVE = re.compile(
    r"(?P<native>Segmentation fault|Bus error|Aborted|Floating point exception|Illegal instruction"
    r"|Speicherzugriffsfehler|Erreur de segmentation|Violación de segmento|段错误)"  # a shell in another locale
    r"(?: +\([^()\n]{1,40}\))?(?: +\S*python[\d.]*\b.{0,200})?$"
    r"|terminate called after throwing an instance of|Fatal Python error: |!{4,} Segfault encountered"
    r"|: Assertion [`'].{1,400}' failed\.$"
)
_INTERESTING = re.compile(
    r"(?:File |Traceback|Pool: |Error|Exception|Interrupt|Failure|Timeout|Exit|Killed|Empty|Fault|fault|Aborted|Fatal "
    r"|: error: |above exception|Assertion|Segfault encountered|terminate called|Bus error|Illegal instruction"
    r"|Speicherzugriffsfehler|Erreur de segmentation|Violación de segmento|段错误|\.exc(?:eptions?)?\.[A-Z]"
    r"|error\.Again|\.py(?::\d+)? in\b|Expected all tensors to be on)"
)
_PROGRESS = re.compile(
    r"(?:iteration +\d+/|'loss': |step(?:(?<=[ \[|)\n]step)|(?<=^step))(?::\d+ - \w|[ :=]+\d+\D.{0,40}loss"
    # A loop's own line about memory, not a numbered step of its preparations.
    r"|[ =]+(?!0*[01]\b)\d+[ ,|](?!.{0,60}load).{0,40}\d ?Gi?B\b)"
    r"|elapsed time per iteration|[ ,]\d+(?:\.\d+)?(?:s/it|it/s)\b"
    # prime-rl, NeMo-RL (at each step's begin), AReaL, ROLL
    r"|Step \d+ \|.{0,40}Loss|=={9} Step (?!1/)\d+/\d+ ==|Train step \d+/\d+ done|pipeline step \d+ finished)",
    re.MULTILINE,
)
_OF_TORCH = re.compile(r"-packages/torch/")
_HEADING = re.compile(r"^(?:#+|-{3,}) ?\w", re.MULTILINE)
# Bars that count no steps of a training.
_OTHER_BARS = re.compile(
    r"Loading|Fetching|Downloading|Map\b|Filter|Tokeniz|Generating|Saving|Evaluat|Prediction|Packing|Dropping|[Mm]erging"
    r"|[Cc]aching|Quantiz|Processed prompts|Capturing"
)
_BAR = 400  # characters that a bar takes, in front of its time
_GAP = 6000  # characters between two frames of one traceback, others' lines among them
_LONGEST = 4000  # characters of a line that are looked at
_STEPS_OF_OTHERS = 3  # of others after an exception, as long as they need not wait for the failing rank
_TAIL = 1200  # characters after an exception's first line that may belong to its text
_LISTED = re.compile(r"\d+ validation errors? for \S+$")  # pydantic's, whose reason stands in the next lines
_OF_A_LIST = 2  # lines of it that are read
# The exceptions of the other ranks, the launcher and the garbage collector once a run has failed.
_AFTERMATH = re.compile(
    r"ChildFailedError|ActorDiedError|RayActorError|SignalException|KeyboardInterrupt|SystemExit|BrokenPipeError|ConnectionResetError"
    r"|died with <Signals\.|terminated with signal SIG"
    r"|Engine core initialization failed|Engine process failed to start"
    r"|communicator was aborted|Connection closed by peer|Socket Timeout|TCPStore|returned non-zero exit status"
    r"|DataLoader worker .{1,60} exited unexpectedly|RendezvousConnectionError|has no attribute 'ds_opt_adam'"
    r"|instance of 'c10::DistBackendError"
)


class Frame(NamedTuple):
    """One line of a traceback: file, line number and function; empty or 0 where it does not say."""

    path: str
    line: int
    function: str


class Failure(NamedTuple):
    """One exception, or a chain of them of which the last is named.

    `start` and `end` are positions in the log's text, `raised_at` that of the exception's own line; `rank` is the
    writer's prefix. `text` is the exception's first line. `is_aftermath` says that it follows from another failure.
    """

    rank: str
    start: int
    raised_at: int
    end: int
    error: str
    text: str
    frames: tuple[Frame, ...]
    is_aftermath: bool

    def meets(self, start: int, end: int) -> bool:
        """Return whether a piece of the log is in the traceback or the exception's text, or reaches into it."""
        return start < self.end and end > self.start


class _Open:
    """A traceback that has begun and not ended."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.seen = start
        self.frames: list[Frame] = []
        self.headed = False
        self.ignored = False


def failures(log: Log) -> tuple[Failure, ...]:
    """Return the exceptions in `log`, in the order in which they were raised; a chain is one."""
    found: list[Failure] = []
    open_: dict[str, _Open] = {}
    last: dict[str, int] = {}  # where each rank's last failure stands in `found`
    chained: set[str] = set()
    for start, rank, line in _lines(log.text):
        body, current = _with_name(line), open_.get(rank)
        if current is not None and start - current.seen > _GAP:
            del open_[rank]
            current = None
        if _CHAINED.search(body):
            chained.add(rank)
        elif _IGNORED in body:
            current = open_[rank] = _Open(start)
            current.ignored = True
        elif _TRACEBACK in body:
            ignored = current is not None and current.ignored and not current.frames
            current = open_[rank] = _Open(start)
            current.headed, current.ignored = True, ignored
        elif frame := _FRAME.match(body):
            current = open_.setdefault(rank, _Open(start))
            current.seen = start
            current.frames.append(_with_line(_frame(frame), log.text, start))
        elif (error := _raised(body, current) or _refused(body, log.text)) is not None:
            open_.pop(rank, None)
            failure = _failure(log, rank, start, error, body, current)
            if rank in chained and rank in last:
                chained.discard(rank)
                before = found[last[rank]]
                frames = failure.frames or before.frames
                failure = failure._replace(start=min(before.start, failure.start), frames=frames)
                found[last[rank]] = failure
            else:
                last[rank] = len(found)
                found.append(failure)
    return tuple(_apart(sorted(found, key=lambda each: each.raised_at)))


def _apart(found: Sequence[Failure]) -> Iterator[Failure]:
    """Yield the failures; each ends at another rank's exception."""
    for failure, following in zip_longest(found, found[1:]):
        ends_there = (
            following is not None and following.rank != failure.rank and following.raised_at < failure.end
        )
        yield failure._replace(end=following.raised_at) if following is not None and ends_there else failure


def source_line(log: Log, failure: Failure) -> str:
    """Return the line of source above the exception's own line; "" if the traceback has none."""
    before = log.text[max(failure.start, failure.raised_at - _TAIL) : failure.raised_at]
    for line in reversed(before.splitlines()):
        prefix = _PREFIX.match(line)
        body = line[prefix.end() if prefix else 0 :].strip()
        if body.strip("^~ "):  # a mark below a part of the line above
            return "" if _FRAME.match(body) else body
    return ""


def lines(log: Log, failure: Failure) -> tuple[tuple[Frame, str], ...]:
    """Return the frames in none of torch's files that have a line of source below them, with it."""
    text = log.text[failure.start : failure.raised_at]
    found = []
    for frame in failure.frames:
        if _OF_TORCH.search(frame.path.replace("\\", "/")):
            continue
        at = text.rfind(f'"{frame.path}", line {frame.line}, in {frame.function}')
        below = text[at:].split("\n", 2)[1:2] if at >= 0 else []
        prefix = _PREFIX.match(below[0]) if below else None
        line = below[0][prefix.end() :].strip() if prefix else ""
        if line and not _FRAME.match(line):
            found.append((frame, line))
    return tuple(found)


def ended_by(log: Log, found: Sequence[Failure]) -> Failure | None:
    """Return the failure that ended the run; None if training went on after each, or nothing failed."""
    steps = _steps(log.text) if found else []
    last_of = dict(steps)  # a rank's last step
    # Another rank may report its running step; one with later reports has had the rank's gradients.
    others_went_on = steps[-_STEPS_OF_OTHERS][1] if len(steps) >= _STEPS_OF_OTHERS else -1
    ending = [each for each in found if each.raised_at > max(last_of.get(each.rank, -1), others_went_on)]
    final: dict[str, Failure] = {}
    for each in ending:
        before = final.get(each.rank)
        # A line below a heading of the user's own is of what was tried afterwards.
        if not each.is_aftermath and not (
            before
            and before.frames
            and not each.frames
            and _HEADING.search(log.text, before.raised_at, each.raised_at)
        ):
            final[each.rank] = each
    if final:
        return min(final.values(), key=lambda each: each.raised_at)
    return next((each for each in ending if "Died" not in each.error), None)


def went_on_until(log: Log) -> int:
    """Return the position in front of which nothing ended the run, because training went on after it; -1 if none."""
    steps = _progress(log.text)
    return steps[-_STEPS_OF_OTHERS] if len(steps) >= _STEPS_OF_OTHERS else -1


def trains_after(log: Log, position: int) -> bool:
    """Return whether a training step was reported behind `position`."""
    steps = _progress(log.text)
    return bool(steps) and steps[-1] > position


@lru_cache(maxsize=2)
def _progress(text: str) -> tuple[int, ...]:
    """Return the places of reported training steps; cached, because a log may have a hundred thousand."""
    return tuple(
        match.start()
        for match in _PROGRESS.finditer(text)
        if not (match[0].endswith(("s/it", "it/s")) and is_of_another_bar(text, match.start()))
    )


def is_of_another_bar(text: str, at: int) -> bool:
    """Return whether the time at `at` is a bar's that counts shards, samples or files, which it names."""
    before = text[max(0, at - _BAR) : at]
    return _OTHER_BARS.search(before, max(before.rfind("\n"), before.rfind("\r")) + 1) is not None


def _steps(text: str) -> list[tuple[str, int]]:
    """Return the reporter (looked up once a line) and place of each training step, in the log's order."""
    steps: list[tuple[str, int]] = []
    line, name, last = -1, "", 0
    for position in _progress(text):
        start = text.rfind("\n", last, position) + 1 or max(line, 0)
        if start != line:
            line, name = start, writer(text, start, position)[0]
        last = position
        steps.append((name, position))
    return steps


def writer(text: str, line: int, end: int) -> tuple[str, str]:
    """Return the rank in front of the line at `line`, and the rest of it up to `end`."""
    prefix = _PREFIX.match(text, line)
    return (_named(prefix["rank"]), text[prefix.end() : end].rstrip()) if prefix else ("", text[line:end])


def frame_in(body: str) -> Frame | None:
    """Return the frame in a line of a traceback or of a fault handler's stack; None without one."""
    match = _FRAME.match(body)
    return _frame(match) if match else None


def _named(rank: str) -> str:
    return rank.partition(" [repeated")[0].strip("[]():")


def trained_until(log: Log, position: int) -> bool:
    """Return whether a training step was reported before `position`."""
    steps = _progress(log.text)
    return bool(steps) and steps[0] < position


def _lines(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield possible lines of an exception: position, writer, and the rest."""
    end = -1
    for match in _INTERESTING.finditer(text):
        if match.start() < end:
            continue
        start = text.rfind("\n", 0, match.start()) + 1
        end = text.find("\n", match.end())
        end = len(text) if end < 0 else end
        line = text[start : min(end, start + _LONGEST)]
        skipped = line.rfind("\r", 0, len(line) - 1) + 1  # behind a progress bar
        prefix = _PREFIX.match(line, skipped)
        assert prefix is not None
        yield (
            start + skipped,
            _named(prefix["rank"]),
            line[prefix.end() :].rstrip(),
        )


def _with_name(line: str) -> str:
    """Return the line of an exception; one of a logger with torch's words gets their exception's name."""
    logged = _LOGGED.search(line)
    return f"{_TORCHS}: {logged['words']}" if logged else line


def _frame(match: re.Match[str]) -> Frame:
    path = match["path"] or match["cell"] or match["bare"]
    function = match["function"] or match["cell_function"] or match["bare_function"] or ""
    return Frame(
        path,
        int((match["line"] or match["cell_line"] or match["bare_line"] or "0")[:9]),
        function.partition("(")[0].rpartition("::")[2],  # of C++ the name alone
    )


def _with_line(frame: Frame, text: str, start: int) -> Frame:
    """Return a frame at `start`; without a line of its own it gets the line of the arrow below it."""
    arrow = None if frame.line else _ARROW.search(text, start, start + _TAIL)
    return frame._replace(line=int(arrow["line"])) if arrow else frame


def _raised(body: str, current: _Open | None) -> str | None:
    """Return the name of the exception that a line raises, or None."""
    if native := _NATIVE.search(body):
        return native["native"] or "abort"
    match = _RAISED.match(body)
    if match is None:
        return None
    if _ERROR.search(match["error"]):
        return match["error"]
    # An exception of an own name ends a traceback, whatever it is called.
    ends = current is not None and current.headed and current.frames and "." in match["error"]
    return match["error"] if ends else None


def _refused(body: str, text: str) -> str | None:
    """Return the name of an argument parser's refusal; a compiler's error has no usage."""
    match = _REFUSED.match(body)
    return "SystemExit" if match and f"usage: {match['program']}" in text else None


def _failure(log: Log, rank: str, at: int, error: str, body: str, current: _Open | None) -> Failure:
    frames = tuple(current.frames) if current else ()
    following = [log.text.find(each, at, at + _TAIL) for each in (_TRACEBACK, _IGNORED)]
    end = min([each for each in following if each >= 0], default=min(at + _TAIL, len(log.text)))
    ignored = current is not None and current.ignored
    return Failure(
        rank=rank,
        start=current.start if current else at,
        raised_at=at,
        end=max(end, at + len(body)),
        error=error,
        text=_first_words(log.text, at, body),
        frames=frames,
        is_aftermath=ignored or _AFTERMATH.search(body) is not None,
    )


def _first_words(text: str, at: int, body: str) -> str:
    """Return the first line of the exception at `at`; of a list of errors the first one too."""
    if not _LISTED.search(body):
        return body.strip()
    said, end = [body.strip()], text.find("\n", at)
    for _ in range(_OF_A_LIST):
        start, end = end + 1, text.find("\n", end + 1)
        if start <= 0 or end < 0:
            break
        said.append(writer(text, start, end)[1].strip())
    return ": ".join(said)
