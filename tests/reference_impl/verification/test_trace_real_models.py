# SPDX-License-Identifier: Apache-2.0
"""Real models of transformers, traced in Python and by `offload trace`."""

import json
import re

import pytest

from reference_impl.verification.trace import trace
from reference_impl.verification.trace_profile import at, peak_bytes
from skill_tools.__main__ import main

QWEN3_4B = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 2560, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 9728,
    "vocab_size": 151936, "tie_word_embeddings": True, "max_position_embeddings": 40960,
}  # fmt: skip


def test_a_real_model_takes_what_was_measured(tmp_path):
    """One NVIDIA H100, torch 2.11, transformers 5.17: 37.75 GiB with 22.47 of weights and states in bf16."""
    pytest.importorskip("transformers.modeling_utils", reason="transformers is not installed")
    from reference_impl.verification.hugging_face import model_of, text_batch

    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B))
    step = trace(model_of(tmp_path), text_batch(1, 2048))
    assert step.layer_bytes[1] // 2048 == 170_280
    assert step.peak_bytes / 2**30 == pytest.approx(37.75 - 22.47, rel=0.01)


@pytest.mark.parametrize("text", [None, "{", "[1]", "{}", '{"model_type": "no-such-model"}'])
def test_the_command_refuses_what_is_no_model_in_one_line(tmp_path, capsys, text):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    assert main(["trace", str(path)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1


BERT = {
    "model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 1000, "max_position_embeddings": 512,
}  # fmt: skip


def test_a_model_of_few_positions_is_traced_within_them(tmp_path, capsys):
    pytest.importorskip("transformers.modeling_utils", reason="transformers is not installed")
    (tmp_path / "config.json").write_text(json.dumps(BERT))
    out = tmp_path / "profile.json"
    assert main(["trace", str(tmp_path), "--tokens", "512", "--out", str(out)]) == 0
    assert json.loads(out.read_text())["traced_tokens"] == 256
    assert "BertForMaskedLM, bfloat16, 1 x 512 tokens" in capsys.readouterr().out


def test_a_type_without_a_class_asks_for_the_class(tmp_path, capsys):
    pytest.importorskip("transformers.modeling_utils", reason="transformers is not installed")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "encodec"}))
    assert main(["trace", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "no causal language model of type encodec, and architectures names no class" in said


def test_the_command_prints_peaks_and_writes_the_profile(tmp_path, capsys):
    pytest.importorskip("transformers.modeling_utils", reason="transformers is not installed")
    small = {
        **QWEN3_4B,
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "vocab_size": 1000,
    }
    (tmp_path / "config.json").write_text(json.dumps(small))
    out = tmp_path / "profile.json"
    assert main(["trace", str(tmp_path), "--tokens", "4096", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "Qwen3ForCausalLM, bfloat16, 1 x 4096 tokens" in said
    assert re.search(r"model\.layers\.\*\.[\w.]+ +[1-9]\d*\.\d\d MiB", said)
    document = json.loads(out.read_text())
    assert document["model"] == "Qwen3ForCausalLM"
    assert document["parameters"] == document["weights_bytes"] // 2


HYBRID = {
    "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "hidden_size": 64,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 128, "vocab_size": 1000, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
WITH_A_TOWER = {
    "model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "image_token_index": 999,
    "text_config": {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 1000,
    },
    "vision_config": {
        "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "image_size": 28, "patch_size": 14, "projection_dim": 32,
    },
}  # fmt: skip


def test_a_model_is_traced_with_images(tmp_path, capsys):
    pytest.importorskip("transformers.modeling_utils", reason="transformers is not installed")
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    from reference_impl.verification.hugging_face import image_batch, model_from
    from skill_tools import bundle

    (tmp_path / "config.json").write_text(json.dumps(WITH_A_TOWER))
    out = str(tmp_path / "profile.json")
    assert main(["trace", str(tmp_path), "--images", "2", "--tokens", "64", "--out", out]) == 0
    profile = json.loads((tmp_path / "profile.json").read_text())
    jsonschema.validate(
        profile, json.loads((bundle.root() / "schema" / "model-profile.schema.json").read_text())
    )
    assert not any("vision" in each for each in profile["assumptions"])
    # Features are taken before the tower's last layer: nothing uses its outputs and those of the norm behind it.
    unused = [
        param.numel()
        for name, param in model_from(WITH_A_TOWER).named_parameters()
        if "vision" in name and (".layers.1." in name or "post_layernorm" in name)
    ]
    assert profile["without_gradients"] == sum(unused) > 0
    again = tmp_path / "again.json"
    assert main(["trace", out, "--tokens", "64", "--out", str(again)]) == 0
    assert again.read_text() == (tmp_path / "profile.json").read_text()
    step = trace(model_from(WITH_A_TOWER), image_batch(WITH_A_TOWER, 2, "bfloat16")(3, 5000))
    assert at(profile["steps"][0]["flops"], 3, 5000) == pytest.approx(step.flops, rel=1e-6)
    assert peak_bytes(profile, 3, 5000)[0] == pytest.approx(step.peak_bytes, rel=2e-3)
    capsys.readouterr()
    assert main(["plan", "--trace", out, "--gpu", "h100", "--format", "json"]) == 0
    plan = capsys.readouterr().out
    assert any("2 images a sequence" in line for line in json.loads(plan)["assumptions"])
    verified = ["plan", "--trace", out, "--gpu", "h100", "--format", "json", "--overrides", "seq_length=64"]
    assert main(verified) == 0
    (tmp_path / "plan.json").write_text(capsys.readouterr().out)
    assert main(["verify", "--plan", str(tmp_path / "plan.json"), "--device", "cpu"]) == 0
    assert "the plan was true" in capsys.readouterr().out


@pytest.mark.parametrize(("config", "images"), [(HYBRID, "1"), (WITH_A_TOWER, "-1"), (WITH_A_TOWER, "2000")])
def test_images_that_cannot_be_are_refused(tmp_path, capsys, config, images):
    if images == "1":
        pytest.importorskip("transformers.modeling_utils", reason="transformers is not installed")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["trace", str(tmp_path), "--images", images]) == 2
    assert "image" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "notes"), [(HYBRID, []), (WITH_A_TOWER, ["text alone: no vision is given to the model"])]
)
def test_what_no_shape_describes_is_planned_by_its_trace(tmp_path, capsys, config, notes):
    pytest.importorskip("transformers.modeling_utils", reason="transformers is not installed")
    (tmp_path / "config.json").write_text(json.dumps(config))
    out = str(tmp_path / "profile.json")
    assert main(["trace", str(tmp_path), "--tokens", "512", "--out", out]) == 0
    said = json.loads((tmp_path / "profile.json").read_text())
    assert [each for each in said["assumptions"] if each.startswith("text alone")] == notes
    capsys.readouterr()
    assert main(["plan", "--trace", out, "--gpu", "h100", "--format", "json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert any(line.endswith(", sdpa, text alone") for line in plan["assumptions"]) == bool(notes)
    lines = plan["as_it_is"]["memory"]["gpu"]
    held = {line["name"]: line["bytes"] for line in lines}
    assert held["weights"] == said["weights_bytes"]
    assert held["moments"] == 8 * said["parameters"]
