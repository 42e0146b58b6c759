# SPDX-License-Identifier: Apache-2.0
"""Ways to fit where no offload alone does: the framework's levers, each searched again, and the three cheapest of them.

A lever's settings are laid over the configuration, the dialect reads the run again, and its candidates are searched
as for any plan; the rules' verdicts on the candidates are taken from the plan. Of each kind the smallest change that
fits is kept. If fewer than three kinds fit on their own, they are tried together with levers that do not change the
training and are not enough alone. A change that newly breaks a rule is dropped.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import groupby

from skill_tools.configs.config import Config
from skill_tools.dialects import registry
from skill_tools.dialects.levers import Kind, Lever
from skill_tools.dialects.run import TrainingRun
from skill_tools.errors import UnusableInput
from skill_tools.planning.cost import compute
from skill_tools.planning.model import memory
from skill_tools.planning.search.candidates import Search
from skill_tools.planning.search.legality import Judge, RuledOut, with_settings
from skill_tools.planning.search.options import Prepared, Way
from skill_tools.planning.search.restriction import Restriction

_SHOWN = 3
_NEUTRAL = (Kind.MICRO_BATCH, Kind.FUSED_LOSS)
# The cheapest come first: nothing but time, then hardware, then another optimizer, then another training.
_COST = {
    Kind.MICRO_BATCH: 0,
    Kind.FUSED_LOSS: 0,
    Kind.SPREAD: 1,
    Kind.OFFLOAD: 1,
    Kind.HOST: 2,
    Kind.GPUS: 3,
    Kind.QUANTIZED: 4,
    Kind.STATES: 4,
    Kind.SHARDS: 4,
    Kind.SEQUENCE: 5,
    Kind.STREAMED: 6,
    Kind.ADAPTERS: 7,
}


Prepare = Callable[[Config, int | None], Prepared]


class Finder:
    """Tries the levers of one configuration."""

    def __init__(
        self,
        config: Config,
        prepare: Prepare,
        versions: Mapping[str, str],
        judge: Judge,
        restriction: Restriction,
    ) -> None:
        self._config, self._prepare, self._versions = config, prepare, versions
        self._judge, self._restriction = judge, restriction
        self._errors_before = {each.rule for each in self._errors({})}

    def three_cheapest(self, run: TrainingRun) -> tuple[Way, ...]:
        """Return the ways that fit, the cheapest first; none if the framework has none that suffices."""
        levers = list(registry.named(run.dialect).levers(self._config, run))
        ways = [*self._by_host_memory(run), *self._by(levers, ())]
        if len(ways) < _SHOWN:
            alone = {kind for way in ways for kind in way.kinds}
            neutral = tuple(_strongest(levers, kind) for kind in _NEUTRAL if kind not in alone)
            base = tuple(lever for lever in neutral if lever is not None)
            others = [lever for lever in levers if lever.kind not in {each.kind for each in base}]
            together = self._way(base) if len(base) > 1 else None
            ways += [together] if together else []
            for under in [(each,) for each in base] if together else [base] if base else []:
                ways += self._by(others, under)
        kept: dict[frozenset[Kind], Way] = {}
        for way in sorted(ways, key=_cost):
            if not any(_labels(less) < _labels(way) for less in ways):
                kept.setdefault(frozenset(way.kinds), way)
        return tuple(kept.values())[:_SHOWN]

    def _by(self, levers: Iterable[Lever], base: tuple[Lever, ...]) -> list[Way]:
        """Return for each kind of lever, on top of `base`, the smallest that fits."""
        found = []
        for _, each in groupby(levers, key=lambda lever: lever.kind):
            way = next(filter(None, (self._way((*base, lever)) for lever in each)), None)
            if way is not None:
                found.append(way)
        return found

    def _by_host_memory(self, run: TrainingRun) -> list[Way]:
        """Return the run as it is with more host memory, if only that is missing."""
        prepared = self._prepare(self._config, None)
        if prepared.budget.host_bytes is None:
            return []
        lever = Lever(Kind.HOST, "more host memory")
        way = self._searched((lever,), prepared, self._config, host_bytes=None)
        if way is None:
            return []
        needs = round(way.option.memory.host_bytes_per_node / (1 - prepared.budget.headroom))
        return [way._replace(needs_host_bytes=needs)]

    def _way(self, levers: tuple[Lever, ...]) -> Way | None:
        """Return the fastest way to run with `levers`, or None where it does not fit, or is not legal."""
        settings = {key: value for lever in levers for key, value in lever.settings.items()}
        laid = with_settings(self._config, settings)
        gpus = next((lever.gpus for lever in levers if lever.gpus), None)
        try:
            prepared = self._prepare(laid, gpus)
        except UnusableInput:
            return None  # sizes that do not divide; another step of the lever may
        return self._searched(levers, prepared, laid, host_bytes=prepared.budget.host_bytes)

    def _searched(
        self, levers: tuple[Lever, ...], prepared: Prepared, laid: Config, *, host_bytes: int | None
    ) -> Way | None:
        run, machine, budget = prepared
        dialect = registry.named(run.dialect)
        speed = compute.pace(run, machine, memory.estimate(run).parameters.shard)
        search = Search(
            laid,
            dialect,
            run,
            machine,
            speed,
            versions=self._versions,
            restriction=self._restriction,
            judge=self._judge,
        )
        for option in search.fitting(budget._replace(host_bytes=host_bytes)):
            settings = {key: value for lever in levers for key, value in lever.settings.items()}
            wanted = {**settings, **option.candidate.settings}
            left = self._errors(wanted)
            if {each.rule for each in left} <= self._errors_before:
                patch = dialect.patch(wanted, self._config, dead=self._judge.dead_keys())
                return Way(levers, run, option, patch, left=left)
        return None

    def _errors(self, settings: Mapping[str, object]) -> tuple[RuledOut, ...]:
        has_files = registry.named(self._config.framework).has_files
        return self._judge.left_by(settings) if has_files else ()


def _strongest(levers: Iterable[Lever], kind: Kind) -> Lever | None:
    """Return the last lever of a kind, which changes most."""
    return next((lever for lever in reversed(list(levers)) if lever.kind is kind), None)


def _labels(way: Way) -> set[str]:
    return {lever.label for lever in way.levers}


def _cost(way: Way) -> tuple[int, float]:
    return max(_COST[kind] for kind in way.kinds), way.gpu_seconds_a_token
