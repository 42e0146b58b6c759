# SPDX-License-Identifier: Apache-2.0
"""Unsloth's two calls, alone in a script and beside a Trainer's arguments."""

from types import SimpleNamespace

import pytest

from skill_tools.configs.config import Config
from skill_tools.configs.source import Source
from skill_tools.diagnosis.code import offloads, set_off
from skill_tools.dialects import registry
from skill_tools.dialects.layout import LocalParameters
from skill_tools.dialects.read import read_text, readings
from skill_tools.dialects.run import Mode
from skill_tools.planning.accounts import Kind, Line
from skill_tools.planning.cost import machine
from skill_tools.planning.cost.step_time import _states_over_the_link
from skill_tools.planning.model import states
from skill_tools.planning.model.shape_sources import shape_of
from skill_tools.rules.lint import lint

TRAINER = "from trl import SFTConfig\nargs = SFTConfig(output_dir='o'{})\n"


def script(load: str = "", peft: str = "", trainer: str = "") -> str:
    return (
        f"from unsloth import FastLanguageModel\n{trainer}"
        f"m, t = FastLanguageModel.from_pretrained('a/b'{load})\nm = FastLanguageModel.get_peft_model(m{peft})\n"
    )


def read(text: str) -> Config:
    return read_text(text, "train.py")


def found(text: str) -> set[str]:
    return {each.rule for each in lint(read(text)).findings if each.severity != "info"}


def test_a_trainers_script_is_the_trainers_and_one_without_is_unsloths() -> None:
    (alone,) = readings([Source("train.py", script())])
    (beside,) = readings([Source("train.py", script(trainer=TRAINER.format("")))])
    assert (alone.dialect.name, beside.dialect.name) == ("unsloth", "transformers")
    assert (
        read(script(peft=", offload_layers=8", trainer=TRAINER.format(""))).value(
            "unsloth.peft.offload_layers"
        )
        == 8
    )


def test_true_is_no_number_of_layers_and_false_is_none() -> None:
    assert found(script(load=", offload_layers=True")) == {"us-layers-value"}
    assert found(script(load=", offload_layers=0.5")) == {"us-layers-value"}
    assert found(script(load=", offload_layers=False")) == set()
    assert (
        read(script(load=", offload_layers=None, block_swap_layers=4")).value("unsloth.load.offload_layers")
        == 4
    )


def test_8_bits_are_loaded_by_the_class_that_does_not_refuse_them() -> None:
    """FastLlamaModel refuses them beside swapped layers, but FastLanguageModel hands them on to FastModel."""
    assert found(script(load=", offload_layers=8, load_in_8bit=True")) == set()


def test_a_trainer_that_shards_takes_no_swapped_layers() -> None:
    sharded = TRAINER.format(", deepspeed='zero2.json'")
    assert "us-layers-sharded" in found(script(peft=", offload_layers=8", trainer=sharded))
    assert "us-layers-sharded" not in found(script(trainer=sharded))


def test_a_call_that_is_made_twice_says_nothing() -> None:
    text = script(load=", offload_layers=8, fast_inference=True")
    again = text + "m, t = FastLanguageModel.from_pretrained('c/d')\n"
    assert found(text) == {"us-load-layers-refused"}
    assert found(again) == set()


def test_a_plan_says_which_layers_it_counts_on_the_gpu() -> None:
    config = read(script(peft=", offload_layers=8", trainer=TRAINER.format("")))
    (said,) = registry.named("transformers").remarks(config, None)  # type: ignore[arg-type]
    assert "8 decoder layers" in said


SWITCH = "UNSLOTH_OFFLOAD_OPTIMIZER_STATE"
WHOLE = ", full_finetuning=True, load_in_4bit=False"


def whole(*lines: str, trainer: str = "") -> str:
    """A script that trains a whole model."""
    loaded = f"m, t = FastLanguageModel.from_pretrained('Qwen/Qwen3-8B'{WHOLE})\n"
    head = f"import os\nfrom unsloth import FastLanguageModel\n{loaded}"
    return head + "\n".join(lines) + "\n" + TRAINER.format(f", max_length=2048{trainer}")


def planned(text: str) -> tuple[Mode, list[dict[str, object]]]:
    """Return the mode of a script as it stands, and the settings of the candidates that offload states."""
    config, dialect = read(text), registry.named("transformers")
    run = dialect.run(config, shape_of(config, model=None, config_json=None)[0], gpus=1)
    advice = SimpleNamespace(lacks=lambda key: False)
    found = dialect.candidates(config, run, advice)  # type: ignore[arg-type]
    return dialect.current(config, run), [dict(each.settings) for each in found if each.mode.state_offload]


@pytest.mark.parametrize(
    ("line", "value"),
    [
        (f"os.environ['{SWITCH}'] = '1'", "1"),
        (f"os.environ.setdefault('{SWITCH}', 'on')", "on"),
        (f"if t:\n    os.environ['{SWITCH}'] = '1'", None),
        (f"os.environ['{SWITCH}'] = t", None),
    ],
)
def test_a_script_sets_variables_of_unsloth(line: str, value: str | None) -> None:
    config = read(whole(line))
    assert config.value(f"env.{SWITCH}") == value
    assert (f"env.{SWITCH}" in config.unresolved) is (value is None)


@pytest.mark.parametrize(
    ("lines", "chunk"),
    [
        ([f"os.environ['{SWITCH}'] = 'True'"], 1 << 30),
        ([f"os.environ['{SWITCH}'] = '1'", f"os.environ['{SWITCH}_CHUNK_MB'] = '256'"], 256 << 20),
        ([f"os.environ['{SWITCH}'] = '1'", f"os.environ['{SWITCH}_CHUNK_MB'] = 'much'"], 1 << 30),
        ([f"os.environ['{SWITCH}'] = '1'", f"os.environ['{SWITCH}_CHUNK_MB'] = '0'"], 1 << 62),
        ([f"os.environ['{SWITCH}'] = '1'", f"os.environ['{SWITCH}_CHUNK_MB'] = 'nan'"], 1 << 62),
        ([f"os.environ['{SWITCH}'] = '1'", f"os.environ['{SWITCH}_CHUNK_MB'] = 'inf'"], 1 << 62),
        ([f"os.environ['{SWITCH}'] = '2'"], 0),
        ([], 0),
    ],
)
def test_states_visit_the_gpu_in_chunks(lines: list[str], chunk: int) -> None:
    mode, _ = planned(whole(*lines))
    assert (mode.state_offload, mode.state_chunk_bytes) == (chunk > 0, chunk)


def test_a_plan_proposes_to_offload_states_of_a_model_that_is_trained_whole() -> None:
    _, settings = planned(whole())
    assert settings
    assert all(each[f"env.{SWITCH}"] == "1" for each in settings)
    assert planned(script(trainer=TRAINER.format("")).replace("a/b", "Qwen/Qwen3-8B"))[1] == []
    for left_alone in (", optim='paged_adamw_8bit'", ", deepspeed='zero2.json'"):
        mode, settings = planned(whole(f"os.environ['{SWITCH}'] = '1'", trainer=left_alone))
        assert (mode.state_offload, settings) == (False, [])


def test_all_states_are_pinned_tensor_by_tensor_and_a_chunk_is_on_the_gpu() -> None:
    config, dialect = read(whole(f"os.environ['{SWITCH}'] = '1'")), registry.named("transformers")
    run = dialect.run(config, shape_of(config, model=None, config_json=None)[0], gpus=1)
    local = LocalParameters(run.parameters, 0, run.parameters, 0)
    gpu, host = states.lines(run, dialect.current(config, run), local)
    kept, _ = states.lines(run, Mode(), local)
    moments = next(line.bytes for line in kept if line.name == "moments")
    assert [line.bytes for line in gpu if line.name == "restored states"] == [1 << 30]
    # A matrix of 12,288 x 4,096 in bf16 is 96 MiB, and its pinned block 128.
    assert moments * 1.25 < sum(line.bytes for line in host) < moments * 1.34


def test_states_come_before_their_update_and_leave_after_it() -> None:
    rates = machine.known("h100")._replace(h2d_copy=50e9, d2h_copy=25e9, duplex_copy=80e9)
    memory = SimpleNamespace(host=[Line(Kind.MOMENTS, "moments", 10**9, "")])
    cost = _states_over_the_link(Mode(state_offload=True, state_chunk_bytes=1), memory, rates)  # type: ignore[arg-type]
    assert cost.exposed_s == pytest.approx(1 / 50 + 1 / 25)


def test_states_that_unsloth_leaves_alone_or_widens_are_told() -> None:
    on = f"os.environ['{SWITCH}'] = '1'"

    def told(trainer: str, line: str = on) -> set[str]:
        targets = {"unsloth": "2026.10.9"}
        found = lint(read(whole(line, trainer=trainer)), versions=targets).findings
        return {each.rule for each in found if each.rule.startswith("us-states")}

    assert told(", optim='paged_adamw_8bit'") == {"us-states-paged"}
    assert told(", deepspeed='zero2.json'") == {"us-states-deepspeed"}
    assert told(", optim='adamw_torch_8bit'") == {"us-states-quantized"}
    assert told(", optim='adamw_8bit'") == told(", optim='paged_adamw_8bit'", "") == set()


def test_a_variable_that_a_script_sets_is_changed_there() -> None:
    config, dialect = read(whole(f"os.environ['{SWITCH}'] = '1'")), registry.named("transformers")
    assert dialect.patch({f"env.{SWITCH}": "0"}, config).environment == f"in os.environ: {SWITCH}=0"
    assert dialect.patch({f"env.{SWITCH}": "1"}, read(whole())).environment == f"export {SWITCH}=1"


def test_diagnoses_know_the_variable_as_an_offload() -> None:
    on, off = (read(whole(f"os.environ['{SWITCH}'] = '{value}'")) for value in "10")
    assert [each.written for each in offloads(on)] == [each.written for each in set_off(off)] == [SWITCH]
    assert offloads(off) == ()


def test_a_command_gives_the_variable() -> None:
    options = "--output_dir o --model_name_or_path a/b --learning_rate 1e-5 --max_steps 9"
    text = f"export {SWITCH}=1\npython train.py {options}\n"
    assert read_text(text, "run.sh").value(f"env.{SWITCH}") == "1"


@pytest.mark.parametrize("command", ["python train.py", "torchrun --nproc_per_node 2 train.py --my-own 3"])
def test_a_command_gives_variables_to_the_script_beside_it(command: str) -> None:
    run = Source("run.sh", f"export {SWITCH}=1\n{command}\n")
    (reading,) = readings([run, Source("train.py", whole())])
    config = reading.compose()
    assert (config.value(f"env.{SWITCH}"), config.unknown) == ("1", ())
    assert config.value("env.WORLD_SIZE") == ("2" if "torchrun" in command else None)
