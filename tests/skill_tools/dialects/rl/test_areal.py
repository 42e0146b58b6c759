# SPDX-License-Identifier: Apache-2.0
"""AReaL's YAML: closed and typed dataclasses, Hydra's overrides over the file alone, and who leaves the GPU."""

from pathlib import Path

import pytest

from skill_tools.__main__ import main
from skill_tools.configs.config import Config
from skill_tools.configs.source import load
from skill_tools.dialects.read import read_sources, read_text
from skill_tools.errors import Unrecognised
from skill_tools.rules.lint import lint

TOP = "experiment_name: a\ntrial_name: b\nsaver: {}\nrecover: {}\n"
RL = f"{TOP}rollout: {{backend: 'sglang:d4'}}\n"


def areal(text: str, *overrides: str, start: str = RL) -> Config:
    return read_text(f"{start}{text}\n", "config.yaml", overrides=overrides)


def actor(fields: str, more: str = "", *overrides: str, start: str = RL) -> Config:
    return areal(f"actor: {{backend: 'fsdp:d4', {fields}}}\n{more}", *overrides, start=start)


def found(config: Config, release: str = "1.0.4") -> set[str]:
    findings = lint(config, versions={"areal": release}).findings
    return {finding.rule for finding in findings if finding.severity != "info"}


def test_an_experiment_with_an_actor_proves_it_and_less_does_not() -> None:
    assert areal("actor: {backend: 'fsdp:d4'}").framework == "areal"
    with pytest.raises(Unrecognised):
        read_text("experiment_name: a\ntrial_name: b\nactor: {}\nmodel: {}\n", "config.yaml")


def test_names_below_a_section_are_its_class_and_those_at_the_top_may_be_somebodys_own() -> None:
    assert found(actor("fsdp: {param_offload: true}")) == {"areal-unknown-key"}
    assert found(actor("fsdp: {}", "my_workflow: {x: 1}")) == set()
    assert found(actor("fsdp: {}", "offload_everything: true")) == {"areal-unknown-key"}


def test_values_are_converted_as_omegaconf_does() -> None:
    for text, value in (("on", True), ("'yes'", True), ("1", True), ("false", False)):
        assert actor(f"fsdp: {{offload_params: {text}}}").value("areal.actor.fsdp.offload_params") is value, (
            text
        )
    for text in ("null", "maybe", "[]", "2.5"):
        assert found(actor(f"fsdp: {{offload_params: {text}}}")) == {"areal-wrong-type"}, text


def test_interpolations_are_followed_to_the_backend() -> None:
    config = actor("path: x", "ref: {backend: '${actor.backend}', archon: {offload_params: true}}")
    assert config.value("areal.ref.engine") == "fsdp"
    assert found(config) == {"areal-other-engine"}


def test_an_override_changes_what_stands_in_the_file() -> None:
    assert found(actor("offload: false", "enable_offload: true", "actor.offload=true")) == set()
    refused = {"areal-override-refused"}
    assert found(actor("path: x", "", "actor.fsdp.offload_params=true")) == refused
    assert found(actor("path: x", "", "+actor.fsdp.offload_params=true")) == set()
    assert found(actor("path: x", "", "+actor.path=y")) == refused


def test_a_script_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"{RL}actor: {{backend: 'fsdp:d4', offload: true}}\n")
    script = tmp_path / "run.sh"
    script.write_text("python3 train.py --config run.yaml scheduler.type=ray\n")
    config = read_sources([load(script)])
    assert (config.framework, config.value("areal.actor.offload")) == ("areal", True)
    assert found(config) == {"areal-offload-not-enabled", "areal-override-refused"}


def test_who_leaves_needs_torch_memory_saver() -> None:
    expected = {
        ("offload: true", ""): {"areal-offload-not-enabled"},
        ("offload: true", "enable_offload: true"): set(),
        ("path: x", "enable_offload: true"): {"areal-enable-alone"},
        ("path: x", "ref: {backend: 'fsdp:d4', offload: true}"): {"areal-offload-not-enabled"},
        ("scheduling_strategy: {type: colocation, target: rollout}", "enable_offload: true"): {
            "areal-colocated-disk"
        },
    }
    wrong = [given for given, rules in expected.items() if found(actor(*given)) != rules]
    assert wrong == []


def test_other_trainers_read_less() -> None:
    assert found(actor("offload: true", start=TOP)) == {"areal-offload-unread"}
    reference = "ref: {backend: 'fsdp:d4', offload: true}"
    assert found(actor("path: x", reference, start=TOP)) == {"areal-dpo-not-enabled"}


def test_up_to_1_0_2_one_string_has_the_backends() -> None:
    config = areal("allocation_mode: sglang:d4+megatron:d4\nactor: {fsdp: {offload_params: true}}")
    assert config.value("areal.actor.engine") == "megatron"
    assert found(config, "1.0.2") == {"areal-other-engine"}
    assert (
        found(areal("allocation_mode: sglang:d4+d4\nactor: {fsdp: {offload_params: true}}"), "1.0.2") == set()
    )


def test_states_stream_through_the_gpu_with_adam_alone() -> None:
    assert found(actor("fsdp: {per_layer_optim_step: true}, optimizer: {type: adam}")) == set()
    assert found(actor("fsdp: {per_layer_optim_step: true}, optimizer: {type: sgd}")) == {
        "areal-per-layer-adam"
    }


def test_a_plan_says_why_there_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"{RL}actor: {{backend: 'fsdp:d4'}}\n")
    assert main(["plan", str(file), "--gpu", "h200"]) == 2
    assert "AReaL packs rollouts" in capsys.readouterr().err
