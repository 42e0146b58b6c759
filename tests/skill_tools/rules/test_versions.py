# SPDX-License-Identifier: Apache-2.0
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from skill_tools.configs.keys import keys_from_data
from skill_tools.errors import UnusableInput
from skill_tools.knowledge import index
from skill_tools.rules.knowledge import compiled, load_rules
from skill_tools.rules.versions import (
    Standing,
    admits,
    conditional,
    displaced,
    in_range,
    parse_target,
    read_versions_text,
    resolve,
    standing,
)

PIP_LIST = """\
Package                   Version      Editable project location
------------------------- ------------ -------------------------
megatron_core             0.16.1
transformer_engine_cu12   2.12.0
torch                     2.9.0+cu129
megatron-bridge           0.3.1        /opt/Megatron-Bridge
"""
PIP_FREEZE = (
    "megatron-core==0.16.1\ntorch==2.9.0+cu129 ; python_version > '3'\n-e git+https://x/y#egg=z\n# note\n"
)


def test_pip_list_and_pip_freeze_are_read() -> None:
    assert read_versions_text(PIP_LIST) == {
        "megatron-core": "0.16.1",
        "transformer-engine": "2.12.0",
        "torch": "2.9.0+cu129",
        "megatron-bridge": "0.3.1",
    }
    assert read_versions_text(PIP_FREEZE) == {"megatron-core": "0.16.1", "torch": "2.9.0+cu129"}


@given(st.text())
def test_any_text_is_read_without_an_exception(text: str) -> None:
    assert all(isinstance(version, str) for version in read_versions_text(text).values())


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("megatron-core==0.16.1", ("megatron-core", "0.16.1")),
        ("Megatron_Core == 0.16.1", ("megatron-core", "0.16.1")),
        ("megatron-core==main", ("megatron-core", "0.20.0.dev0")),
        ("transformer_engine==2.12", ("transformer-engine", "2.12")),
    ],
)
def test_a_target_is_read(text: str, target: tuple[str, str]) -> None:
    assert parse_target(text) == target


@pytest.mark.parametrize(
    "text", ["megatron-core", "==1", "megatron-core==", "megatron-core==new", "a>=1", "a==" + "1" * 5000]
)
def test_a_target_that_names_no_release_is_refused(text: str) -> None:
    with pytest.raises(UnusableInput, match="expected"):
        parse_target(text)


@pytest.mark.parametrize(
    ("bridge", "core"),
    [("0.2.0", "0.15"), ("0.3.1", "0.16"), ("0.4.0", "0.17"), ("0.5.1", "0.18"), ("0.6.0", "0.19")],
)
def test_a_bridge_release_implies_a_core(bridge: str, core: str) -> None:
    assert resolve({"megatron-bridge": bridge})["megatron-core"] == core


def test_a_stated_core_wins_over_the_implied_one_and_a_later_statement_over_an_earlier() -> None:
    resolved = resolve({"megatron-bridge": "0.3.1", "megatron_core": "0.15.0"}, {"megatron-core": "0.17.1"})
    assert resolved["megatron-core"] == "0.17.1"


def test_the_main_branch_counts_as_the_release_it_leads_to() -> None:
    assert admits(">=0.20", "0.20.0.dev0")
    assert admits(">=0.20.0.dev0", "0.20.0.dev0")
    assert not admits("<0.20", "0.20.0.dev0")
    assert admits(">=2.10", "2.10.0a0")
    assert admits(">=2.9", "2.9.0+cu129")


def test_a_range_is_met_missed_or_open() -> None:
    wanted = {"megatron-core": ">=0.16", "transformer-engine": ">=2.10"}
    assert standing(wanted, {"megatron-core": "0.16.1", "transformer-engine": "2.12"}) == (
        Standing.APPLIES,
        (),
    )
    assert standing(wanted, {"megatron-core": "0.15.3"}) == (Standing.ABSENT, ())
    assert standing(wanted, {"megatron-core": "0.16.1"}) == (Standing.OPEN, ("transformer-engine>=2.10",))


@pytest.mark.parametrize(
    ("stated", "specifier", "standing"),
    [
        ("0.8.0+checkout", "<0.8.1", Standing.OPEN),  # main after 0.8.0 says 0.8.0 too
        ("0.8.0+checkout", ">=0.8", Standing.APPLIES),
        ("0.6.0+checkout", ">=0.8", Standing.ABSENT),
        ("0.1.0+checkout", ">=0.4", Standing.ABSENT),
        ("0.8.0.dev+checkout", ">=0.8", Standing.OPEN),
        ("0.8.0", "<0.8.1", Standing.APPLIES),
    ],
)
def test_a_checkout_may_be_past_the_release_that_it_states(
    stated: str, specifier: str, standing: Standing
) -> None:
    assert in_range("prime-rl", specifier, {"prime-rl": stated}) is standing


def test_the_development_build_is_absent_where_a_release_is_stated() -> None:
    assert in_range("megatron-core-dev", ">=0", {"megatron-core": "0.16.1"}) is Standing.ABSENT
    assert in_range("megatron-core-dev", ">=0", {}) is Standing.OPEN


def test_a_release_that_nobody_states_is_one_that_the_framework_runs_with() -> None:
    assert in_range("transformers", ">=5.10", {}, "llama-factory") is Standing.ABSENT
    assert in_range("transformers", "<5.10", {}, "llama-factory") is Standing.APPLIES
    assert in_range("transformers", ">=5.0", {}, "llama-factory") is Standing.OPEN
    assert in_range("transformers", ">=5.10", {"transformers": "5.12.0"}, "llama-factory") is Standing.APPLIES


def test_a_rule_about_every_release_is_not_about_the_development_branch() -> None:
    every_release = {"megatron-core": ">=0.10"}
    assert displaced(every_release, {"megatron-core-dev": "2026.8.21"})
    assert not displaced(every_release, {"megatron-core": "0.19.0"})
    assert not displaced(every_release, {})
    assert not displaced({}, {"megatron-core-dev": "2026.8.21"})


def test_a_range_that_every_known_release_satisfies_is_no_condition() -> None:
    wanted = {"megatron-core": ">=0.10", "transformer-engine": ">=2.10", "something-else": ">=0"}
    assert conditional(wanted) == {"transformer-engine": ">=2.10", "something-else": ">=0"}


def test_a_range_that_every_release_with_the_key_satisfies_is_no_condition() -> None:
    wanted = {"axolotl": ">=0.16"}
    assert conditional(wanted) == wanted
    assert conditional(wanted, lives=[{"axolotl": ">=0.16"}]) == {}
    assert conditional(wanted, lives=[{"megatron-core": ">=0.16"}, {"axolotl": ">=0.18"}]) == {}
    assert conditional(wanted, lives=[{"axolotl": ">=0.14"}]) == wanted
    assert conditional(wanted, lives=[{"axolotl": ">=99"}]) == wanted  # no known release says anything


def test_a_key_of_newer_releases_shows_that_one_of_them_runs() -> None:
    life = {"mechanism": "input", "type": "bool", "exists": {"axolotl": ">=0.16"}}
    entries = [
        {"key": "switch", "default": {"axolotl": False}, **life},
        {"key": "on", "default": {"axolotl": True}, **life},
    ]
    keys = {key.name: key for key in keys_from_data(entries)}
    versions = {"axolotl": ">=0.16"}
    assert (
        compiled({"when": "switch and other", "dialects": [], "versions": versions}, keys=keys)["conditional"]
        == {}
    )
    for nobody_set_it in ("on and other", "not switch", "switch or other", "switch is None"):
        entry = {"when": nobody_set_it, "dialects": [], "versions": versions}
        assert compiled(entry, keys=keys)["conditional"] == versions


def test_ranges_are_read_as_packaging_reads_them() -> None:
    ranges = {specifier for rule in load_rules() for specifier in rule.versions.values()}
    ranges |= {"==0.16", "==0.16.*", ">0.15", "<=0.16.1", "~=0.16", "!=0.17.*,>=0.16"}
    releases = {each for known in index()["releases"]["known"].values() for each in known}
    for specifier in ranges:
        for release in releases | {"0.16.0rc1", "0.16.1+local", "2.10.0.dev0"}:
            expected = SpecifierSet(specifier).contains(Version(release).base_version, prereleases=True)
            assert admits(specifier, release) is expected, (specifier, release)
