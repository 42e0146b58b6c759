# SPDX-License-Identifier: Apache-2.0
from for_each import for_each

from skill_tools.__main__ import COMMANDS
from skill_tools.configs.keys import load_keys
from skill_tools.nearest import did_you_mean, nearest
from skill_tools.rules.knowledge import load_rules

# A slip, the known words, and the intended one.
SLIPS = [
    ("lnt", COMMANDS, "lint"),
    ("Diagnos", COMMANDS, "diagnose"),
    ("la-ppp", [rule.id for rule in load_rules()], "la-pp"),
    ("LA-PP", [rule.id for rule in load_rules()], "la-pp"),
    ("optimizer_offload_fracton", load_keys(), "optimizer_offload_fraction"),
    ("cpu_offloding", load_keys(), "cpu_offloading"),
]


@for_each(SLIPS, lambda slip: slip[0])
def test_a_slip_finds_what_was_meant(slip: tuple[str, list[str], str]) -> None:
    word, known, meant = slip
    assert nearest(word, known)[0] == meant


def test_what_is_like_nothing_finds_nothing() -> None:
    assert nearest("xyzzy", COMMANDS) == []
    assert nearest("", COMMANDS) == []
    assert did_you_mean("nope", [rule.id for rule in load_rules()], otherwise="--list") == "--list"
    assert did_you_mean("lnt", COMMANDS, otherwise="--help") == "lint"
    assert did_you_mean("xyzzy", COMMANDS, otherwise="--help") == "--help"


def test_a_word_that_begins_a_part_of_a_name_means_that_name() -> None:
    """`pin` is as like `plugins` by its letters, and nobody who types it means those."""
    names = {"plugins", "fsdp_config.cpu_offload_pin_memory", "pin_memory", "ds-auto-pin", "spinning"}
    assert (
        did_you_mean("pin", names, otherwise="")
        == "pin_memory or ds-auto-pin or fsdp_config.cpu_offload_pin_memory"
    )
    assert did_you_mean("pi", names, otherwise="none") == "none"


def test_a_word_of_any_length_is_compared() -> None:
    assert nearest("x" * 10**6, COMMANDS) == []


def test_names_keep_their_case() -> None:
    assert nearest("grpoconfig", ["GRPOConfig", "DPOConfig"], count=1) == ["GRPOConfig"]
