# SPDX-License-Identifier: Apache-2.0
"""Why a plan keeps attention, runs in tiles or in groups of heads: the same plan without, in memory and time.

Apart because `sensitivity` changes the run, and this the plan. All are for long sequences, and none is better in
everything: kept attention takes host memory in place of time, tiles and groups of heads take time in place of GPU
memory. Explained in docs/long-sequences.md.
"""

from collections.abc import Callable, Iterator

from skill_tools.dialects.candidates import Candidate
from skill_tools.planning.search.options import Option
from skill_tools.units import gib, seconds

Evaluate = Callable[[Candidate], Option]


def of_sequences(best: Option, evaluate: Evaluate) -> Iterator[str]:
    """Yield a sentence for each of the three that `best` has."""
    mode = best.candidate.mode
    if mode.attention_layers:
        other = evaluate(best.candidate._replace(mode=mode._replace(attention_layers=0)))
        more = best.memory.host_bytes_per_node - other.memory.host_bytes_per_node
        less = seconds(other.time.total_s - best.time.total_s)
        yield (
            f"attention kept: {less} a step less than computing it again, for {gib(more)} more of the host"
        )
    divided = [
        (f"tiles of {mode.tile_tokens} tokens", mode._replace(tile_tokens=0, head_groups=0)),
        (f"{mode.head_groups} groups of heads", mode._replace(head_groups=0)),
    ]
    for label, without in divided[: bool(mode.tile_tokens) + bool(mode.head_groups)]:
        other = evaluate(best.candidate._replace(mode=without))
        freed = other.memory.device_bytes - best.memory.device_bytes
        yield (
            f"{label}: {gib(freed)} less of a GPU, for {seconds(best.time.total_s - other.time.total_s)} a step more"
            + (f"; without them it does not fit: {other.limit}" if other.limit else "")
        )
