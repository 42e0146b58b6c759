# SPDX-License-Identifier: Apache-2.0
"""The user's own runs in one text, and the setting or the release that makes their difference.

A user writes a heading over each run's output (`# the same without X`), or a run and its outcome in one sentence
(`X=False: trains`). A run that goes well without X shows that X takes part in the fault, and a way around it. That is
told as the user's evidence: it proves no fault of X.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from skill_tools import knowledge
from skill_tools.diagnosis.evidence import Conclusion, Evidence, of_finding
from skill_tools.diagnosis.log import Log
from skill_tools.diagnosis.newer import trainer
from skill_tools.diagnosis.series import numbers
from skill_tools.rules.knowledge import load_rules
from skill_tools.rules.versions import Standing, canonical_name, is_version, standing

_ON, _OFF = "on", "off"
_COUNTED = r"(?i:gpu|group|rank|node)"
_OFFS = r"false|none|null|off|0|0\.0"
_MOST, _LONGEST, _SHOWN = (
    1 << 18,
    400,
    3,
)  # characters of a text and of a line that are read; differences told
_NAME = (
    r"[\"'`]*(?P<name>--\w[\w-]+|[A-Za-z][\w.]*_\w+"
    r"|(?:(?:cpu|nvme|activation|optimizer|parameter|model|layer|group) )?off-?load\w*)\b(?![./:]\w)[\"'`]*"
)
# The value of a setting: in a word about it, or behind it, or before it; then a release.
_SETTINGS = (
    (_ON, rf"(?<!\w)(?:with|w/|using|(?:enabl|turn|switch)\w*(?: on)?) {_NAME}"),
    (_OFF, rf"\b(?:without|w/o|no|(?:disabl|remov)\w+|(?:turn|switch)\w* off) (?:the )?{_NAME}"),
    (_OFF, rf"{_NAME} (?:is |was )?(?:(?:taken |left |turned |switched )?(?:out|off)|removed|disabled)\b"),
    (
        "",
        rf"{_NAME}(?: ?= ?|: | )(?:{{\"device\": )?[\"'`]?"
        rf"(?P<value>true|{_OFFS}|on|cpu|nvme|\d[\d.e]*|[A-Z]\w*_\w+)(?!\.?\w)",
    ),
    ("", rf"\b(?P<value>one|two|[1-8]) (?:\w+ )?(?P<name>{_COUNTED})s?\b"),
    ("", r"(?<![\w./-])(?P<name>[a-z][\w-]*)(?:==| (?:to |version )?v?)(?P<value>\d+\.\d[\w.]*\w)"),
)
_HEADED = re.compile(r"(?:#+|-{2,}|={2,}|\*\*) ?(?P<words>\S.*?)[-=* ]*$")
_BARE = re.compile(
    r"(?i)(?:w(?:ith(?:out)?|/o?) [^:]{2,80}:|[a-z][\w-]* v?\d+\.\d+[\w.]*(?: \([^()]*\))?:?)$"
)
_FIGURES = re.compile(r":\s+(?![{\[\"'])")  # between a heading and figures in its line
_GOOD = re.compile(
    r"(?i)\b(?:trains|works?|worked|fine|ok|saved|passes|(?:re)?solve[sd]?|fixe[sd]|went well|flat|correct"
    r"|no error\w*|gone|disappear\w*|at every step|(?:no longer|never|n.t|not) (?:happen|fail|crash|hang|grow)\w*)\b"
)
_BAD = re.compile(
    r"(?i)\b(?:fail(?:s|ed)|crash\w*|hangs?|oom|out of memory|errors?|climbs|grows|leaks|stuck|nan"
    r"|same (?:error|problem)|(?:n.t|not) (?:work|help|train|converge)|no (?:change|difference))\b"
)
_OTHERS = re.compile(  # advice, and lines of programs
    r"(?i)\b(?:you|your|please|consider|should|must|may|might|could|recommended|warning|info|to (?:fix|avoid))\b"
    r"|^\s*(?:File |[\[(])|^\W*\w*Error\b|https?:"
)
_OWN = re.compile(
    r"(?i)\b(?:i|we|my|our|when|if|after|works?|worked|trains|(?:downgrad|revert|disabl|remov|sett|turn|switch)\w*)\b|->"
)
_SENTENCES = re.compile(r";|(?<=\D)\. |, (?:but|and|while|whereas) |\bbut\b")
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_TIME = re.compile(r"\d+:\d\d(?::\d\d)?")
_LABEL = re.compile(r"([A-Za-z][\w/()%-]*(?: [A-Za-z][\w/()%-]*)?)[\"' :=|(]*$")
_FAILED = re.compile(r"(?m)^(?:\S{1,40} )?[\w.]*(?:Error|Exception):? ")
_NO_RESULT = re.compile(r"(?i)(?:\b|_)(?:lr|rate|time|ms|epoch|step|iteration|samples)\b")
_MEMORY = re.compile(r"(?i)mem|peak|alloc|reserved|[GM]i?B\b")
_RUNS, _LINES, _SUSPECTS = 12, 100, 2  # runs, and lines of each, that are compared
_UNLIKE, _UNLIKE_BY_SEED = 0.05, 0.005  # of two figures, with another and with the same seed
_NORM_UNLIKE = 1.5
_SMALL = "; a norm that is too small says that gradients are lost: replaced by the next micro-batch's, or never copied"
_LARGE = "; a norm that is too large says that gradients are added twice, read before they are there, or old"
_SNAPSHOTS = (
    "a memory snapshot of each of the two (torch.cuda.memory._dump_snapshot), given to diagnose together"
)


class Trial(NamedTuple):
    """One run: its words, line and settings, the output below them, and whether it went well, if it says."""

    words: str
    line: int
    settings: Mapping[str, str]
    output: str
    is_good: bool | None = None


class _Differ(NamedTuple):
    """The figures of two runs, in words and as a pair, and the ones of the gradient's norm, if it differs."""

    words: str
    figures: tuple[float, float]
    is_memory: bool = False
    less_is_better: bool = False
    norms: tuple[float, float] | None = None


class _Made(NamedTuple):
    """A setting or a distribution with its better and its worse value, and what showed it."""

    name: str
    good: str
    bad: str
    shown: str
    is_memory: bool = False
    frees_nothing: bool = False

    @property
    def change(self) -> str:
        """The change that the user's own run shows."""
        if self.good == _OFF:
            return f"without {self.name}"
        counted = re.fullmatch(_COUNTED, self.name)
        return f"{self.good} {self.name}(s)" if counted else f"{self.name} {self.good}"


def trials(log: Log) -> tuple[Trial, ...]:
    """Return the user's runs in `log`; the first has no words, if its output stands above all headings."""
    runs: list[Trial] = []
    words, number, output = "", 1, ""
    for at, line in enumerate([*log.text[:_MOST].splitlines(), "#-"], 1):
        headed = _HEADED.match(line) if len(line) <= _LONGEST else None
        told = [] if len(line) > _LONGEST else list(_in_words(line, at))
        runs += told
        if not headed and not (_BARE.match(line) and settings(line)):
            output += f"{line}\n"
            continue
        if output.strip():
            runs.append(Trial(words, number, settings(words), output))
        words, number, output = headed["words"] if headed else line.rstrip(":"), at, ""
        if (split := _FIGURES.search(words)) and not told:
            words, output = words[: split.start()], f"{words[split.end() :]}\n"
    return tuple(runs)


def settings(words: str) -> dict[str, str]:
    """Return the settings that a user's words name, each with its value."""
    found: dict[str, str] = {}
    known = knowledge.index()["releases"]["known"]
    for value, pattern in _SETTINGS:
        for match in re.finditer(f"(?i){pattern}", words):
            name, said = match["name"], value or match["value"].lower()
            if is_version(said) and "." in said and canonical_name(name) in known:
                name = canonical_name(name)
            elif pattern is _SETTINGS[-1][1]:
                continue
            found[name] = _ON if said == "true" else _OFF if re.fullmatch(_OFFS, said) else said
    return found


def _in_words(line: str, at: int) -> Iterator[Trial]:
    """Yield the runs that a line tells together with their outcome."""
    headed = _HEADED.match(line)
    if _OTHERS.search(line) or not (headed or _OWN.search(line)):
        return
    for part in _SENTENCES.split(headed["words"] if headed else line):
        named = settings(part)
        outcome = re.sub("|".join(map(re.escape, named)), "", part)
        good, bad = _GOOD.search(outcome), _BAD.search(outcome)
        if named and (good or bad):
            yield Trial(part.strip(), at, named, "", bad is None)


def told(conclusion: Conclusion | None, log: Log, evidence: Evidence) -> Conclusion | None:
    """Return `conclusion` with the difference that the user's own runs make, if they make one."""
    runs = trials(log)
    made = tuple(_made(runs, evidence))[:_SHOWN]
    if not made:
        return conclusion
    inert = evidence.inert
    if (
        conclusion
        and inert
        and inert.text in conclusion.cause
        and any(each.line == inert.line for each in runs)
    ):
        conclusion = None  # these are the user's words, no program's
    names = " and ".join(dict.fromkeys(each.name for each in made))
    shown = "; ".join(dict.fromkeys(each.shown for each in made))
    if made[0].frees_nothing:
        cause = (
            f"by your own runs {names} frees nothing: {shown}; it is not carried out, or others fill the peak"
        )
        if conclusion is None or not conclusion.is_known:
            return Conclusion(f"most likely: {cause}", "", (_SNAPSHOTS,))
        return conclusion._replace(cause=f"{conclusion.cause}; {cause}")
    make = "make the difference together" if " and " in names else "makes the difference"
    cause = f"by your own runs {names} {make}: {shown}"
    between = _mended_between(made, evidence)
    if between is not None and (conclusion is None or conclusion.rule != between.rule):
        conclusion = between
    changes = {f"{each.change}, as in your own run": each.name for each in made}
    if conclusion is not None and conclusion.is_known:
        own = [
            change
            for change, name in changes.items()
            if not re.search(
                rf"without {name}\b|{name}\W{{1,4}}(?i:{_OFFS})(?![.\w])", "\n".join(conclusion.change)
            )
        ]
        return conclusion._replace(cause=f"{conclusion.cause}; {cause}", change=(*conclusion.change, *own))
    library = trainer(evidence)
    rest = "" if conclusion is None else f"; {conclusion.cause.removeprefix('not known. ')}"
    more = [f"or a newer {library}"] if library and not is_version(made[0].good) else []
    if suspects := _suspects(made[0], evidence):
        rest = f"; suspects of it: {'; or '.join(map(_suspected, suspects))}{rest}"
        more = [*next((each.fault.change for each in suspects if not each.depends_on), ()), *more]
    return Conclusion(f"most likely: {cause}{rest}", "", (*changes, *more))


def _suspects(made: _Made, evidence: Evidence) -> list[numbers.Found]:
    """Return possible silent faults of the setting, or else of the run, first the ones that ask for most of it."""
    if evidence.failure is not None or made.is_memory:
        return []
    found = numbers.suspects(evidence.offloads, evidence.texts, evidence.releases)
    about = [each for each in found if any(made.name.strip("-") in shown for shown in each.shown_by)]
    of_it = sorted(about, key=lambda each: -len(each.fault.needs))
    return (of_it or [each for each in found if not each.depends_on])[:_SUSPECTS]


def _suspected(found: numbers.Found) -> str:
    if_ = f"if this is {' and '.join(found.depends_on)}, " if found.depends_on else ""
    return f"{if_}{found.fault.cause} (to be sure: {found.fault.tell})"


def _mended_between(made: Sequence[_Made], evidence: Evidence) -> Conclusion | None:
    """Return the configuration's finding about a fault of the worse release that the better one does not have."""
    versions = {rule.id: rule.versions for rule in load_rules()} if evidence.findings else {}
    for each in made:
        for finding in evidence.findings if is_version(each.good) and each.bad else ():
            good, bad = (
                standing(versions.get(finding.rule, {}), {each.name: at})[0] for at in (each.good, each.bad)
            )
            if good is Standing.ABSENT is not bad and each.is_memory is (finding.effect == "out-of-memory"):
                return of_finding(finding)
    return None


def _made(runs: Sequence[Trial], evidence: Evidence) -> Iterator[_Made]:
    """Yield the settings with which the outcomes of two runs differ, or that free nothing."""
    failed = [item for trial in runs if trial.is_good is False for item in trial.settings.items()]
    for trial in runs:
        for name, value in trial.settings.items() if trial.is_good else ():
            if (name, value) not in failed and not _is_of_the_run(name, value, evidence):
                yield _Made(name, value, "", f"{trial.words} (line {trial.line})")
    headed = [each for each in runs if each.is_good is None and (each.settings or not each.words)]
    for earlier, later in combinations(headed[:_RUNS], 2):
        apart = _apart(earlier.settings, later.settings)
        differ = _difference(earlier, later) if len(apart) == 1 else None
        if differ is None:
            continue
        ((name, values),) = apart.items()
        better = _better(name, values, differ, evidence)
        good, bad = differ.figures[better], differ.figures[1 - better]
        switched = _OFF in values or _ON in values
        # An option that frees memory is no fault, and neither is an amount that does.
        if differ.is_memory and not is_version(values[0]) and (not switched or bad < good * (1 - _UNLIKE)):
            continue
        shown = f"{differ.words} (line {later.line}: {later.words}){_of_norms(differ, better)}"
        frees_nothing = switched and differ.is_memory and bad <= good * (1 + _UNLIKE)
        yield _Made(name, values[better], values[1 - better], shown, differ.is_memory, frees_nothing)


def _is_of_the_run(name: str, value: str, evidence: Evidence) -> bool:
    """Return whether the run that is complained about has that value."""
    written = {_ON: "(?:true|on|cpu|nvme|auto)", _OFF: f"(?:{_OFFS})"}.get(value, re.escape(value))
    device = r"(?:\{\s*[\"']device[\"']\s*:\s*)?"
    line = rf"(?im)^(?!\s*#).*?{re.escape(name)}[\"']?[\s:=]+{device}[\"']?{written}(?!\.?\w)"
    stated = re.compile(line)  # in no comment
    flag = name if value == _ON and name.startswith("--") else "\0"
    texts = [text for _, text in evidence.texts]
    return evidence.releases.get(name) == value or any(stated.search(text) or flag in text for text in texts)


def _better(name: str, values: tuple[str, str], differ: _Differ, evidence: Evidence) -> int:
    """Return which run is better: without an option, unlike the files, with the smaller figure, or the later one."""
    if isinstance(differ.figures[0], bool):  # whether they fail
        return int(differ.figures[0])
    if values[0] == _OFF or values[1] == _ON:
        return 0
    if _OFF in values or _ON in values:
        return 1
    of_the_run = [_is_of_the_run(name, value, evidence) for value in values]
    if of_the_run[0] != of_the_run[1]:
        return int(of_the_run[0])
    return int(not differ.less_is_better or differ.figures[1] < differ.figures[0])


def _apart(earlier: Mapping[str, str], later: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return the settings in which two runs differ; what one of them does not name counts if nothing else does."""
    pairs = {name: (earlier.get(name, ""), later.get(name, "")) for name in {**earlier, **later}}
    apart = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    return {name: pair for name, pair in apart.items() if all(pair)} or apart


def _of_norms(differ: _Differ, better: int) -> str:
    """Return what a gradient's norm says that is far from the one of the better run."""
    if differ.norms is None:
        return ""
    good, bad = differ.norms[better], differ.norms[1 - better]
    return _SMALL if bad * _NORM_UNLIKE < good else _LARGE if bad > good * _NORM_UNLIKE else ""


def _difference(earlier: Trial, later: Trial) -> _Differ | None:
    """Return the first figures in which two runs' outputs differ, in lines of one form; or a failure of one of them."""
    failed = [_FAILED.search(each.output) is not None for each in (earlier, later)]
    if any(failed):
        words = "one run fails and the other does not"
        return None if all(failed) else _Differ(words, (failed[0], failed[1]), less_is_better=True)
    unlike = _UNLIKE_BY_SEED if "seed" in later.words else _UNLIKE
    same = None
    for line, other in _alike(earlier.output, later.output):
        found, norms = [], None
        for match, before in zip(_NUMBER.finditer(line), _NUMBER.findall(other), strict=False):
            named = _LABEL.search(line[: match.start()])
            label, pair = named[1] if named else "", (float(before), float(match[0]))
            unit = line[match.end() : match.end() + 4]
            if _NO_RESULT.search(label) or unit in ("s/it", "it/s"):
                continue
            memory = _MEMORY.search(label + unit) is not None
            if abs(pair[0] - pair[1]) > unlike * max(map(abs, pair)):
                words = f"{label} {before} against {match[0]}".strip()
                found.append(_Differ(words, pair, memory, memory or "loss" in label))
                norms = pair if "norm" in label.lower() else norms
            elif pair[0] and memory:
                same = same or _Differ(f"{label} {before} and {match[0]}", pair, memory, True)
        if found:
            return found[0]._replace(words=", ".join(each.words for each in found[:_SHOWN]), norms=norms)
    return same


def _alike(earlier: str, later: str) -> Iterator[tuple[str, str]]:
    """Yield each line of `later` with the one of `earlier` of the same form that shares most of its numbers."""
    before, behind = (
        [_TIME.sub("", each).strip() for each in text.splitlines()[:_LINES]] for text in (earlier, later)
    )
    forms = [(_NUMBER.sub("#", each), _NUMBER.findall(each), each) for each in before]
    for line in behind:
        form, figures = _NUMBER.sub("#", line), _NUMBER.findall(line)
        like = [each for each in forms if figures and each[0].startswith(form)]
        if like:
            yield line, max(like, key=lambda each: sum(map(str.__eq__, each[1], figures)))[2]
