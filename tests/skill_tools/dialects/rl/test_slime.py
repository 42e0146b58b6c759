# SPDX-License-Identifier: Apache-2.0
"""slime's commands: Megatron-LM's flags under its canonical names, its own options, and its own decisions."""

from pathlib import Path

import pytest

from skill_tools.__main__ import main
from skill_tools.configs.config import Config
from skill_tools.dialects import registry
from skill_tools.dialects.read import read_text
from skill_tools.rules.lint import lint

START = "python3 train.py --hf-checkpoint a --actor-num-nodes 1 --rollout-batch-size 32"
MODEL = (
    "--num-layers 36 --hidden-size 2560 --num-attention-heads 32 --ffn-hidden-size 9728 --vocab-size 151936 "
    "--group-query-attention --num-query-groups 8 --kv-channels 128 --swiglu --untie-embeddings-and-output-weights"
)


def slime(options: str, before: str = "") -> Config:
    return read_text(f"{before}{START} {options}\n", "run.sh")


def found(config: Config) -> set[str]:
    return {finding.rule for finding in lint(config).findings if finding.severity != "info"}


def test_two_of_its_options_prove_it_and_its_fork_is_another() -> None:
    assert slime("--colocate").framework == "slime"
    for text in ("cd /root/miles\n", "# miles\n"):
        assert slime("--colocate", text).framework == "miles"
    assert slime("--colocate --offload-train-target disk").framework == "miles"


def test_megatrons_flags_are_its_own_and_two_of_them_are_forced() -> None:
    config = slime("--optimizer-cpu-offload --optimizer-offload-fraction 0.5 --tensor-model-parallel-size 2")
    assert config.value("optimizer_offload_fraction") == 0.5
    assert config.value("tensor_model_parallel_size") == 2
    assert (config.value("use_distributed_optimizer"), config.value("bf16")) == (True, True)
    assert slime("--fp16").value("bf16") is None


def test_rules_about_megatrons_code_apply_to_it() -> None:
    assert {"oc-fraction-zero-cli", "oc-needs-precision-aware"} <= found(
        slime("--optimizer-cpu-offload --optimizer-offload-fraction 0.0")
    )


def test_rays_environment_may_hold_any_variable() -> None:
    megatron = "--tensor-model-parallel-size 2"
    assert "mlm-cdmc-tp" in found(slime(megatron))
    assert "mlm-cdmc-tp" not in found(slime(megatron, "# ray job submit --runtime-env-json=$X\n"))


def test_a_slip_is_said_and_an_option_of_a_patched_megatron_is_not() -> None:
    config = slime("--optimizer-cpu-offloads --use-gated-attention --sglang-anything 1")
    assert [each.written for each in config.unknown] == ["--optimizer-cpu-offloads"]
    assert found(config) == {"sl-dropped-option"}


def test_a_negative_is_an_answer_and_silence_follows_colocate() -> None:
    assert found(slime("--colocate")) == set()
    assert found(slime("--colocate --no-offload-rollout")) == {"sl-rollout-stays"}
    assert found(slime("--offload-train")) == {"sl-offload-apart"}
    assert found(slime("--offload-train --advantage-estimator ppo")) == set()


def test_a_plan_has_the_trainers_gpus_and_says_what_the_engines_leave(
    tmp_path: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "run.sh"  # type: ignore[operator]
    script.write_text(f"{START} --actor-num-gpus-per-node 4 --colocate --max-tokens-per-gpu 8192 {MODEL}\n")
    assert main(["plan", str(script), "--gpu", "h200", "--details"]) == 0
    said = capsys.readouterr().out
    assert "on 4 x h200" in said
    assert "8192 tokens" in said
    assert "SGLang's weights and KV cache leave these GPUs" in said


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ("--colocate --no-offload-rollout --sglang-mem-fraction-static 0.7", 0.7),
        ("--colocate --sglang-mem-fraction-static 0.7", 0.0),
        ("--no-offload-rollout --sglang-mem-fraction-static 0.7", 0.0),
        ("--colocate --no-offload-rollout", 0.0),
    ],
)
def test_engines_keep_their_share_where_they_do_not_leave_the_trainers_gpus(
    options: str, kept: float
) -> None:
    assert registry.named("slime").kept_by_engines(slime(options)) == kept


def test_a_plan_leaves_the_engines_their_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    engines = "--colocate --no-offload-rollout --sglang-mem-fraction-static 0.75"
    Path("run.sh").write_text(
        f"{START} {MODEL} --micro-batch-size 1 --seq-length 4096 {engines}\n", encoding="utf-8"
    )
    main(["plan", "run.sh", "--gpu", "h100"])
    assert (
        "rollout engines keep 75% of each GPU, which leaves the trainer 19.8 GiB" in capsys.readouterr().out
    )
