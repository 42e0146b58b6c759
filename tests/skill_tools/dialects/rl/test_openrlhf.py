# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF's commands: the program, the pinned DeepSpeed, and offloads without effect."""

import pytest

from skill_tools.configs.config import Config
from skill_tools.dialects.read import read_text
from skill_tools.errors import Unrecognised
from skill_tools.rules.lint import lint
from skill_tools.rules.versions import resolve

COLOCATED = (
    "--actor.num_gpus_per_node 8 --vllm.num_engines 4 --vllm.tensor_parallel_size 2 --train.colocate_all"
)


def ppo(options: str) -> Config:
    return read_text(f"python3 -m openrlhf.cli.train_ppo_ray {options}\n", "run.sh")


def found(config: Config, **versions: str) -> set[str]:
    return {finding.rule for finding in lint(config, versions=versions).findings}


@pytest.mark.parametrize(
    ("launcher", "program"),
    [
        ("ray job submit --address=http://127.0.0.1:8265 -- python3 -m openrlhf.cli.train_ppo_ray", "train_ppo_ray"),
        ("deepspeed --module openrlhf.cli.train_sft", "train_sft"),
        ("torchrun --nproc_per_node 8 -m openrlhf.cli.train_dpo", "train_dpo"),
        ("deepspeed ../openrlhf/cli/train_rm.py", "train_rm"),
    ],
)  # fmt: skip
def test_each_launcher_leads_to_the_program(launcher: str, program: str) -> None:
    config = read_text(f"{launcher} --ds.zero_stage 3\n", "run.sh")
    assert (config.framework, config.value("openrlhf.program")) == ("openrlhf", program)
    assert config.value("openrlhf.zero_stage") == 3


def test_a_script_among_the_values_is_no_program() -> None:
    config = ppo("--vllm.enable_sleep --reward.remote_url examples/reward_func.py --ds.zero_stage 3")
    assert config.value("openrlhf.program") == "train_ppo_ray"
    assert found(config) == {"orlhf-sleep-apart"}


def test_a_comment_and_another_program_prove_nothing() -> None:
    for text in (
        "# openrlhf.cli.train_sft\npython x.py --a 1\n",
        "python -m openrlhf.cli.serve_rm --port 1\n",
    ):
        with pytest.raises(Unrecognised):
            read_text(text, "run.sh", framework=None)


def test_an_asynchronous_run_that_is_not_colocated_only_loses_its_sleep() -> None:
    options = "--vllm.num_engines 4 --train.async_enable --vllm.enable_sleep"
    assert found(ppo(options)) == {"orlhf-sleep-apart"}
    assert found(ppo(f"{options} --train.colocate_all")) == {"orlhf-async-sleep"}


def test_the_hybrid_engine_of_its_examples_is_clean_and_awake_it_is_not() -> None:
    asleep = f"{COLOCATED} --vllm.enable_sleep --ds.enable_sleep --ds.zero_stage 3 --ref.offload"
    assert found(ppo(asleep)) == set()
    assert found(ppo(COLOCATED)) == {"orlhf-awake"}
    assert found(ppo(f"{asleep} --ds.adam_offload")) == {"orlhf-sleep-offloaded"}


def test_each_release_pins_its_own_deepspeed() -> None:
    assert resolve({"openrlhf": "0.10.4"})["deepspeed"] == "0.19.1"
    assert resolve({"openrlhf": "0.10.4"}, {"deepspeed": "0.19.8"})["deepspeed"] == "0.19.8"
    muon = read_text("deepspeed --module openrlhf.cli.train_sft --optim muon --ds.adam_offload\n", "run.sh")
    assert found(muon, openrlhf="0.10.4") == {"orlhf-muon-silent"}
    assert found(muon, openrlhf="0.11.2") == {"orlhf-muon-offload"}
    assert found(muon, openrlhf="0.11.2", deepspeed="0.19.8") == set()


def test_a_name_without_its_dot_is_answered_with_the_one_that_has_it() -> None:
    (unknown,) = ppo("--adam_offload").unknown
    assert "--ds.adam_offload" in unknown.nearest


def test_an_option_of_another_program_ends_the_run() -> None:
    config = read_text(
        "deepspeed --module openrlhf.cli.train_sft --ds.zero_stage 3 --ref.offload\n", "run.sh"
    )
    assert [each.written for each in config.unknown] == ["--ref.offload"]
    assert found(config) == {"orlhf-unknown-option"}
