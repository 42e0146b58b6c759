# SPDX-License-Identifier: Apache-2.0
"""A model is known by published names; each means its own shape or none."""

import json
import re
from pathlib import Path

import pytest

from skill_tools import knowledge
from skill_tools.__main__ import main
from skill_tools.configs.config import Config
from skill_tools.dialects import parameters
from skill_tools.errors import UnusableInput
from skill_tools.planning.model import known_models, local_models, shape_sources
from tests.support.for_each import for_each

_PUBLISHED = Path(__file__).with_name("model_names.txt")
_SIZE = re.compile(r"(?<![\da-z.])(\d+(?:\.\d+)?)(b|m)(?![a-z\d])")
_ACTIVE = ("llama-4-scout", "llama-4-maverick")  # named by the parameters of one token's path


def published() -> list[tuple[str, str | None]]:
    """Return the published names with the known model of each, None where its sizes are not known here."""
    found: list[tuple[str, str | None]] = []
    model = None
    for line in _PUBLISHED.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        if not line.startswith(" "):
            model = None if line == "none:" else line.removesuffix(":")
            continue
        found += [(name, model) for name in line.split()]
    return found


@for_each(published())
def test_a_published_name_means_its_own_shape_or_none(entry: tuple[str, str | None]) -> None:
    name, model = entry
    assert known_models.find(name) == model


@for_each([entry for entry in published() if entry[1] and entry[1] not in _ACTIVE])
def test_no_name_says_another_size_than_its_shape_has(entry: tuple[str, str]) -> None:
    name, model = entry
    known = known_models.entries()[model]
    billions = (known["parameters"] + known.get("tower", 0)) / 1e9
    said = [float(number) / (1 if unit == "b" else 1e3) for number, unit in _SIZE.findall(name.lower())]
    said = [size for size in said if size >= 0.05]  # `1M` is a context
    assert not said or any(abs(size - billions) <= billions / 3 for size in said)


@for_each(known_models.entries())
def test_each_known_model_is_found_by_its_names_and_its_source(name: str) -> None:
    entry = known_models.entries()[name]
    source = knowledge.load_yaml("models.yaml")["models"][name]["source"]
    for alias in (name, *entry["names"], source):
        assert known_models.find(alias) == name, alias


@pytest.mark.parametrize(
    ("written", "model"),
    [
        ("/models/Qwen3-8B/checkpoint-500", "qwen3-8b"),
        ("outputs/llama-3-8b-lora/final", "llama-3-8b"),
        ("/models/Qwen3-8B/my-merge-13b", None),
        ("qwen3_30b_a3b_8gpus_mock.yaml", "qwen3-30b-a3b"),
    ],
)
def test_of_a_path_the_last_part_that_says_anything_is_the_name(written: str, model: str | None) -> None:
    assert known_models.find(written) == model


def test_what_a_name_adds_to_a_known_one_is_asked_for() -> None:
    with pytest.raises(
        UnusableInput, match=r"only contains llama-3-8b.*--model llama-3-8b if it has"
    ) as raised:
        known_models.require("NousResearch/Hermes-3-Llama-3.1-8B")
    assert "Hermes-3" in str(raised.value)


def test_a_model_of_other_layers_is_to_be_traced() -> None:
    with pytest.raises(UnusableInput, match=r"linear-attention layers.*offload trace"):
        known_models.require("Qwen/Qwen3.5-27B")


SMALL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "vocab_size": 1000,
}


def folder(path: Path, entries: dict[str, object] = SMALL) -> Path:
    """Write a model's folder and return it."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(entries), encoding="utf-8")
    return path


def test_a_cached_model_is_read_by_its_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.delenv("HUGGINGFACE_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    model = tmp_path / "hub" / "models--acme--new-model"
    folder(model / "snapshots" / "aaa", {**SMALL, "num_hidden_layers": 2})
    folder(model / "snapshots" / "bbb")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("bbb", encoding="utf-8")
    shape, source = shape_sources.shape_of(None, model="acme/new-model", config_json=None)
    assert shape.num_layers == 4
    assert "snapshots/bbb" in source
    assert local_models.cached("acme/other") is None
    assert local_models.cached("../acme/new-model") is None


def test_a_folder_goes_before_what_its_name_says(tmp_path: Path) -> None:
    named = folder(tmp_path / "Qwen3-8B")
    shape, source = shape_sources.shape_of(None, model=str(named), config_json=None)
    assert shape.num_layers == 4
    assert source.startswith(str(named))


def test_a_folder_beside_the_configuration_is_found(tmp_path: Path) -> None:
    folder(tmp_path / "my-model")
    config = Config(
        "axolotl", {}, complete=True, model_name="./my-model", sources={str(tmp_path / "run.yaml"): ""}
    )
    assert shape_sources.shape_of(config, model=None, config_json=None)[0].num_layers == 4


def test_a_name_that_is_not_known_is_not_replaced_by_another_in_the_text() -> None:
    config = Config(
        "axolotl",
        {},
        complete=True,
        model_name="acme/new-model",
        sources={"run.yaml": "hub_model_id: Qwen/Qwen3-8B"},
    )
    with pytest.raises(UnusableInput, match="acme/new-model"):
        shape_sources.shape_of(config, model=None, config_json=None)


def test_an_encoder_beside_an_unknown_model_is_not_planned() -> None:
    options = (
        "--model_paths Robbyant/lingbot-video-moe-30b:transformer --processor_path Qwen/Qwen3-VL-4B-Instruct:"
    )
    config = Config(
        "accelerate", {}, complete=True, sources={"run.sh": f"accelerate launch train.py {options}"}
    )
    with pytest.raises(UnusableInput, match="names no model"):
        shape_sources.shape_of(config, model=None, config_json=None)


@pytest.mark.parametrize(("name", "alike"), [("zai-org/GLM-4.6", "glm-4.5"), ("FLUX.1-dev", None)])
def test_a_name_like_no_known_one_is_told_none(name: str, alike: str | None) -> None:
    attempt = known_models.unknown(name).attempt
    assert attempt.endswith(f"--model {alike} if that is meant" if alike else "as a second file")


def test_plan_takes_a_models_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(folder(tmp_path / "model")), "--gpu", "4090"]) == 0
    assert "(3.1e6 parameters)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "has no config.json"),
        (
            {"adapter_config.json": '{"base_model_name_or_path": "Qwen/Qwen3-8B"}'},
            "is an adapter of Qwen/Qwen3-8B",
        ),
        ({"adapter_config.json": "{"}, "is an adapter of a model that it does not name"),
        ({"config.json": "{"}, "config.json"),
    ],
)
def test_a_folder_without_a_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], files: dict[str, str], said: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert main(["plan", str(tmp_path), "--gpu", "4090"]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("entries", "total"),
    [
        # transformers 5.23's model of the same entries on meta.
        ({"model_type": "olmo2", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 11008,
          "num_attention_heads": 32, "vocab_size": 100352}, 7298617344),
        ({"model_type": "glm4", "num_hidden_layers": 40, "hidden_size": 4096, "intermediate_size": 13696,
          "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 151552,
          "attention_bias": True}, 9400279040),
        ({"model_type": "qwen2_5_vl", "num_hidden_layers": 28, "hidden_size": 3584, "intermediate_size": 18944,
          "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064}, 7615616512),
        ({"model_type": "llama4_text", "num_hidden_layers": 48, "hidden_size": 5120, "intermediate_size": 8192,
          "intermediate_size_mlp": 16384, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
          "vocab_size": 202048, "num_local_experts": 16, "num_experts_per_tok": 1,
          "interleave_moe_layer_step": 1}, 107769861120),
    ],
)  # fmt: skip
def test_a_config_json_is_counted_as_its_own_kind(entries: dict[str, object], total: int) -> None:
    assert parameters.model(shape_sources.from_entries(entries, "config.json")).total == total


def test_a_kind_that_was_never_counted_is_named(tmp_path: Path) -> None:
    path = folder(tmp_path / "model", {**SMALL, "model_type": "gemma4_text"}) / "config.json"
    assert "gemma4_text may not be" in shape_sources.from_config_json(str(path))[1]
