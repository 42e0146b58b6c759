"""Why a plan keeps attention or runs in tiles: the same plan without that, in memory and time.

Apart because `sensitivity` changes the run, and this the plan. Both are for long sequences, where neither is better in
everything: attention that is kept takes host memory in place of time, tiles take time in place of GPU memory. Explained
in docs/long-sequences.md.
"""

from collections.abc import Callable, Iterator

from skill_tools.dialects.candidates import Candidate
from skill_tools.planning.search.options import Option
from skill_tools.units import gib, seconds

Evaluate = Callable[[Candidate], Option]


def of_sequences(best: Option, evaluate: Evaluate) -> Iterator[str]:
    """Yield a sentence for each of the two that `best` has."""
    mode = best.candidate.mode
    if mode.keep_attention:
        other = evaluate(best.candidate._replace(mode=mode._replace(keep_attention=False)))
        more = best.memory.host_bytes_per_node - other.memory.host_bytes_per_node
        yield (
            f"attention kept: {seconds(other.time.total_s - best.time.total_s)} a step less than computing it again, "
            f"for {gib(more)} more of the host"
        )
    if mode.tile_tokens:
        other = evaluate(best.candidate._replace(mode=mode._replace(tile_tokens=0)))
        less = other.memory.device_bytes - best.memory.device_bytes
        yield (
            f"tiles of {mode.tile_tokens} tokens: {gib(less)} less of a GPU, for "
            f"{seconds(best.time.total_s - other.time.total_s)} a step more"
            + (f"; without them it does not fit: {other.limit}" if other.limit else "")
        )
