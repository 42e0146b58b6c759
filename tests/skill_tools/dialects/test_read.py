# SPDX-License-Identifier: Apache-2.0
"""From any input to one configuration: detection, composition, bad input, and the files of real projects."""

from itertools import product
from pathlib import Path

import pytest
from for_each import for_each
from hypothesis import given, settings
from hypothesis import strategies as st

from skill_tools.configs.files import MAX_BYTES, decode
from skill_tools.configs.source import Kind, Source
from skill_tools.dialects import registry
from skill_tools.dialects.read import read, read_sources, read_text
from skill_tools.errors import UnusableInput

FRAMEWORKS = [dialect.name for dialect in registry.with_files()]

CORPUS = Path(__file__).parents[4] / "shared" / "corpus"
FRAMEWORK_OF_FOLDER = {
    "axolotl": "axolotl",
    "megatron_bridge": "megatron-bridge",
    "megatron_lm": "megatron-lm",
}
corpus_files = [path for folder in FRAMEWORK_OF_FOLDER for path in sorted((CORPUS / folder).glob("*"))]


@pytest.mark.parametrize(
    ("text", "framework"),
    [
        ("model:\n  cpu_offloading: true\n", "megatron-bridge"),
        ("mixed_precision: bf16_mixed\ntrain: {train_iters: 3}\n", "megatron-bridge"),
        ("MODEL_ARGS:\n  --num-layers: 4\n", "megatron-lm"),
        ("num_layers: 4\nhidden_size: 8\ntrain_iters: 9\n", "megatron-lm"),
        ("base_model: x\noptimizer: adamw_torch\n", "axolotl"),
        ("sequence_len: 512\nadapter: lora\n", "axolotl"),
        ('{"zero_optimization": {"stage": 3}}', "deepspeed"),
        ("--num-layers 4 --hidden-size 8", "megatron-lm"),
        ("python run_recipe.py --recipe x model.num_layers=4", "megatron-bridge"),
        ("model.num_layers=4", "megatron-bridge"),
        ("axolotl train config.yml --micro-batch-size 2", "axolotl"),
        ("from a import b\ndef r(cfg):\n    cfg.model.cpu_offloading = True\n", "megatron-bridge"),
    ],
)
def test_the_content_tells_the_framework(text: str, framework: str) -> None:
    assert read_text(text, "<stdin>").framework == framework


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.yml", Kind.YAML), ("a.sbatch", Kind.SHELL), ("a.py", Kind.PYTHON), ("a.JSON", Kind.JSON)],
)
def test_a_suffix_tells_the_kind(name: str, kind: Kind) -> None:
    assert Source(name, "x").kind is kind


@pytest.mark.parametrize("text", ["hello: world\n", "just words", "--help me", "[1, 2]", "echo hi"])
def test_what_is_not_recognised_asks_for_the_framework(text: str) -> None:
    with pytest.raises(UnusableInput, match=r"no training configuration .*--explain.*try --framework"):
        read_text(text, "input")


def test_a_loop_of_its_own_is_sent_to_its_plan_and_its_page() -> None:
    loop = (Path(__file__).parents[3] / "evals" / "files" / "pytorch_loop.py").read_text(encoding="utf-8")
    with pytest.raises(UnusableInput, match=r"plan --framework pytorch .*docs/pytorch-loop\.md") as refused:
        read_text(loop, "train.py")
    assert len(str(refused.value)) < 300


def test_the_framework_can_be_said() -> None:
    assert read_text("bf16: true\n", "x.yaml", framework="axolotl").framework == "axolotl"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\xff\xfem\x00", "x.yaml:1 is not text in UTF-8"),
        (b"a: 1\nb: \x80\n", "x.yaml:2 is not text in UTF-8"),
        (b"a: 1\n\n\x00", "x.yaml:3 is not text in UTF-8"),
        (b"a" * (MAX_BYTES + 1), "x.yaml is larger than 1 MiB"),
    ],
)
def test_bytes_that_are_no_text_are_refused(data: bytes, says: str) -> None:
    with pytest.raises(UnusableInput) as caught:
        decode(data, "x.yaml")
    assert str(caught.value).startswith(says)


def test_a_byte_order_mark_of_utf_8_is_no_obstacle() -> None:
    assert decode(b"\xef\xbb\xbfmodel:\n", "x.yaml") == "model:\n"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.yaml", tmp_path, "nul\0byte.yaml"):
        with pytest.raises(UnusableInput, match="expected"):
            read([path])


@pytest.mark.parametrize(
    ("text", "name", "stated"),
    [
        ("torchrun pretrain_gpt.py --num-layers 4 --hidden-size 8 --bf16 --swiglu --lr 1 --save x --load x "
         "--seq-length 8 --micro-batch-size 1 --global-batch-size 8 --train-iters 9 --vocab-size 9 --optimizer adam "
         "--num-attention-heads 2 --max-position-embeddings 8 --use-distributed-optimizer\n",
         "run.sh", "megatron-bridge"),
        ("base_model: x\nmicro_batch_size: 1\n", "run.yaml", "megatron-bridge"),
        ("_target_: megatron.bridge.training.config.ConfigContainer\nmodel: {bf16: true}\n", "run.yaml", "axolotl"),
    ],
)  # fmt: skip
def test_a_stated_framework_that_the_content_contradicts_is_refused(
    text: str, name: str, stated: str
) -> None:
    with pytest.raises(UnusableInput, match=f"is no configuration of {stated}"):
        read_text(text, name, framework=stated)


def test_an_empty_file_is_called_empty() -> None:
    with pytest.raises(UnusableInput, match=r"x\.yaml is empty"):
        read_text(" \n", "x.yaml")


NO_CONFIGURATIONS = [
    "- 1\n- 2\n", "just text\n", "a: 1\n---\nb: 2\n", "a: [", "{", "? [a]\n: b\n", "\t", "%YAML 9\n---\na: 1",
]  # fmt: skip


@for_each(product(FRAMEWORKS, NO_CONFIGURATIONS))
def test_yaml_that_is_no_configuration(asked: tuple[str, str]) -> None:
    framework, text = asked
    try:
        config, refusal = read_text(text, "x.yaml", framework=framework), ""
    except UnusableInput as error:
        config, refusal = None, str(error)
    assert config is not None or refusal.startswith("x.yaml:")
    assert "\n" not in refusal


snippets = st.sampled_from(
    [
        "model:\n", "  num_layers: 4\n", "&a ", "*a", "<<: ", "[", "{", "'", '"', "--num-layers ", "4", "\\\n", "$(",
        "${A:-", "}", ")", "if [ 1 ]; then\n", "fi\n", "case x in\n", ";;\n", "esac\n", "A=(", "A+=", "def r(cfg):\n",
        "  cfg.model.x = ", "ConfigContainer(", "**{", "lambda: ", "<<EOF\n", "~", "\x0b", "\u2028", "é", "!!int ",
        "1e999", "0x", ": ", "\n", "base_model: x\n", '{"zero_optimization":', "model.num_layers=", "--", "=",
        "torchrun pretrain_gpt.py ",
    ]
)  # fmt: skip


@settings(max_examples=300)
@given(
    st.lists(snippets | st.text(max_size=5), max_size=25).map("".join),
    st.sampled_from(["x.yaml", "x.sh", "x.py", "x.json", "<stdin>"]),
    st.sampled_from([None, *FRAMEWORKS]),
    st.lists(st.lists(snippets, max_size=5).map("".join), max_size=2),
)
def test_any_text_is_read_or_refused_in_one_line(
    text: str, name: str, framework: str | None, overrides: list[str]
) -> None:
    try:
        config, refusal = read_text(text, name, framework=framework, overrides=overrides), ""
    except UnusableInput as error:
        config, refusal = None, str(error)
    assert config is not None or refusal
    assert "\n" not in refusal


def test_thousands_of_unknown_keys_get_few_suggestions() -> None:
    text = "base_model: x\nadapter: lora\nsequence_len: 8\n" + "".join(
        f"no_such_key_{number}: 1\n" for number in range(5000)
    )
    unknown = read_text(text, "x.yaml").unknown
    assert len(unknown) == 5000
    assert not any(key.nearest for key in unknown[1000:])


def test_several_files_of_one_framework_compose() -> None:
    first = Source("a.yaml", "base_model: x\nmicro_batch_size: 1\n")
    second = Source("b.yaml", "base_model: x\nmicro_batch_size: 2\n")
    config = read_sources([first, second])
    assert config.settings["micro_batch_size"].value == 2
    assert config.settings["micro_batch_size"].place.file == "b.yaml"


@pytest.mark.skipif(not corpus_files, reason="needs the folder ../shared/corpus of real configurations")
@pytest.mark.parametrize("path", corpus_files, ids=lambda path: path.name)
def test_real_configurations_are_read_without_false_alarms(path: Path) -> None:
    config = read([path])
    assert config.framework == FRAMEWORK_OF_FOLDER[path.parent.name]
    assert len(config.settings) >= 10
    assert not config.wrong_types
    # `finetune_lr` is a parameter of recipe functions; OptimizerConfig has no such field and Bridge skips it.
    assert {key.written for key in config.unknown} <= {"optimizer.finetune_lr"}
