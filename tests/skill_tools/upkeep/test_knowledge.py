# SPDX-License-Identifier: Apache-2.0
"""A release's changes are found: against two recorded releases, and against the knowledge about one."""

import io
import json
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from skill_tools.__main__ import main
from skill_tools.upkeep import quotes
from skill_tools.upkeep.difference import between, other_defaults
from skill_tools.upkeep.summary import Summary, summarize

# Changes written into rules and keys by hand when these releases were read, by kind, name and change.
BY_HAND = {
    ("transformers-5.17.0", "transformers-5.23.0"): {
        ("fields", "TrainingArguments.activation_checkpointing", "new"),
        ("fields", "TrainingArguments.gradient_checkpointing", "default"),
        ("messages", "{..} does not support activation checkpointing.", "new"),
    },
    ("axolotl-0.19.0", "axolotl-0.21.0"): {
        ("fields", "SelectiveCheckpointingConfig.save_modules", "new"),
        ("fields", "SelectiveCheckpointingConfig.save_matmul_min_k", "new"),
        ("messages", "FSDP Offload not compatible with {..}", "gone"),
    },
    ("megatron-core-0.16.1", "megatron-core-0.19.2"): {
        ("fields", "ModelParallelConfig.cpu_offloading_retain_pinned_cpu_buffers", "new"),
        ("fields", "TransformerConfig.activation_offload_fraction", "new"),
        ("fields", "TransformerConfig.delta_offload_bytes_across_pp_ranks", "new"),
        ("messages", "activation_offload_fraction must be in range [0, 1].", "new"),
    },
    ("deepspeed-0.18.3", "deepspeed-0.19.8"): {
        ("fields", "DeepSpeedZeroOffloadOptimizerConfig.pin_memory", "default"),
        ("fields", "DeepSpeedZeroOffloadParamConfig.pin_memory", "default"),
        ("messages", "zero_optimization.compute_grad_norm=false does not support optimizer offload", "new"),
    },
}
OLD = """
from dataclasses import dataclass, field
@dataclass
class RunConfig:
    offload_states: bool = field(default=False)
    pin_memory: bool = False
def check(config):
    if config.offload_states and not config.pin_memory:
        raise ValueError(f"offload of {config} needs "
                         "pin_memory")
"""
NEW = OLD.replace(
    "pin_memory: bool = False", "pin_memory: bool = True\n    offload_nvme: str = Field('', ge=0)"
).replace("needs ", "wants ")


def recorded(name: str) -> Summary:
    path = Path(__file__).parent / "recorded" / f"{name}.json"
    return Summary(**json.loads(path.read_text(encoding="utf-8")))


def wheel(folder: Path, files: dict[str, str], name: str = "release.whl") -> Path:
    path = folder / name
    with zipfile.ZipFile(path, "w") as archive:
        for inside, text in files.items():
            archive.writestr(inside, text)
    return path


def report(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["knowledge", "diff", *arguments, "--format", "json"]) in (0, 1)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("pair", BY_HAND)
def test_what_was_found_by_hand_is_found(pair: tuple[str, str]) -> None:
    old, new = map(recorded, pair)
    found = {(each.kind, each.name, each.how) for each in between(old, new)}
    assert BY_HAND[pair] - found == set()
    assert not list(between(new, new))


def test_a_default_a_field_and_a_message_that_changed() -> None:
    found = {
        (each.kind, each.name, each.how, each.now)
        for each in between(*map(summarize, ({"a.py": OLD}, {"a.py": NEW})))
    }
    assert found == {
        ("fields", "RunConfig.pin_memory", "default", "True"),
        ("fields", "RunConfig.offload_nvme", "new", "''"),
        ("messages", "offload of {..} wants pin_memory", "new", "a.py"),
        ("messages", "offload of {..} needs pin_memory", "gone", ""),
    }


def test_a_setting_that_is_not_recorded_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        "class DeepSpeedZeroConfig(X):\n    offload_everything: bool = False\n    overlap_comm: bool = True\n"
    )
    path = wheel(tmp_path, {"deepspeed/runtime/zero/config.py": text, "deepspeed/__init__.py": ""})
    found = report(["deepspeed==0.20.0", str(path)], capsys)
    assert [each["name"] for each in found["unknown"]] == ["DeepSpeedZeroConfig.offload_everything"]
    assert found["recorded_until"] < found["release"]


def test_a_quote_that_is_gone_or_has_moved_is_named() -> None:
    path = "deepspeed/runtime/zero/config.py"
    there = {path: "class DeepSpeedZeroConfig:\n    def offload_ratio_check(self):\n        pass\n"}
    gone = {each.id: each for each in quotes.lost(there, "deepspeed", "0.19.8") if each.ref.startswith(path)}
    assert gone["ds-ratio"].what == "quote"
    (cited,) = (each.words for each in quotes.cited("deepspeed", "0.19.8") if each.id == "ds-ratio")
    moved = {**there, "deepspeed/runtime/zero/other.py": f'assert x, (\n "{cited[:20]}"\n f"{cited[20:]}")\n'}
    now = {
        each.id: each.now for each in quotes.lost(moved, "deepspeed", "0.19.8") if each.ref.startswith(path)
    }
    assert now["ds-ratio"] == "deepspeed/runtime/zero/other.py"


def test_a_rule_that_asks_for_a_release_is_cited_in_no_other() -> None:
    cited = {
        release: {each.id for each in quotes.cited("torchtitan", release)} for release in ("0.2.2", "0.3.0")
    }
    assert ("titan-toml-gone" in cited["0.2.2"], "titan-toml-gone" in cited["0.3.0"]) == (False, True)


def test_a_rule_is_cited_in_the_releases_that_have_the_keys_it_needs() -> None:
    cited = {
        release: {each.id for each in quotes.cited("megatron-core", release)}
        for release in ("0.10.0", "0.11.0", "0.12.0")
    }
    for rule, since in (("oc-host-memory", "0.12.0"), ("oc-nonpao-dtypes", "0.11.0"), ("la-pp", "0.10.0")):
        assert [release for release in cited if rule in cited[release]][:1] == [since], rule


def test_another_form_of_off_is_the_same_default() -> None:
    text = "class SwapConfig:\n    blocks_to_swap: int = {}\n"
    for default, differs in (("None", False), ("2", True)):
        changes = other_defaults(summarize({"library/a.py": text.format(default)}), "sd-scripts")
        assert bool([*changes]) is differs, default


def test_each_release_is_asked_for_the_words_that_it_has() -> None:
    cited = {
        release: next(each for each in quotes.cited("torchtitan", release) if each.id == "titan-offload-key")
        for release in ("0.2.2", "0.3.0")
    }
    assert cited["0.2.2"].path == "torchtitan/models/llama3/infra/parallelize.py"
    assert cited["0.3.0"].path == "torchtitan/distributed/fsdp.py"


def test_recipes_that_disagree_hold_no_default() -> None:
    text = "enable_activation_offloading: {}\nfsdp_cpu_offload: true\n"
    recipes = {f"torchtune/configs/{name}.yaml": text.format(name) for name in ("true", "false")}
    assert summarize(recipes).fields == {"enable_activation_offloading": "", "fsdp_cpu_offload": "True"}


def test_archives_of_every_kind_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {"deepspeed/__init__.py": "", "deepspeed/config.py": NEW}
    packed = tmp_path / "deepspeed.tar.gz"
    with tarfile.open(packed, "w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"deepspeed-1.0/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    for name, text in files.items():
        (tmp_path / "tree" / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / "src" / name).write_text(text, encoding="utf-8")
    sources = [wheel(tmp_path, files), packed, tmp_path / "tree"]
    found = [report(["deepspeed==1.0", str(source)], capsys) for source in sources]
    assert found[0]["unknown"]
    assert found[0] == found[1] == found[2]


def test_a_saved_summary_stands_for_its_release(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = wheel(tmp_path, {"deepspeed/config.py": OLD, "deepspeed/__init__.py": ""}, "old.whl")
    new = wheel(tmp_path, {"deepspeed/config.py": NEW, "deepspeed/__init__.py": ""}, "new.whl")
    saved = tmp_path / "old.json"
    report(["deepspeed==1.0", str(old), "--save", str(saved)], capsys)
    changes = [
        report(["deepspeed==1.1", str(new), "--since", str(each)], capsys)["changes"] for each in (old, saved)
    ]
    assert changes[0] == changes[1]
    assert len(changes[0]) == 4


def test_what_is_unusable_is_one_line_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "a.whl"
    text.write_text("no archive", encoding="utf-8")
    outside = wheel(tmp_path, {"../deepspeed/config.py": NEW}, "outside.whl")
    other = wheel(tmp_path, {"axolotl/__init__.py": ""}, "other.whl")
    broken = tmp_path / "broken.json"
    broken.write_text("{}", encoding="utf-8")
    good = wheel(tmp_path, {"deepspeed/__init__.py": "", "deepspeed/config.py": NEW})
    saved = tmp_path / "saved.json"
    flipped = bytearray(good.read_bytes())
    flipped[flipped.index(b"class RunConfig")] ^= 1
    (damaged := tmp_path / "damaged.whl").write_bytes(flipped)
    with tarfile.open(cut := tmp_path / "cut.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("deepspeed-1.0/deepspeed/config.py")
        member.size = 100_000
        archive.addfile(member, io.BytesIO(bytes(range(250)) * 400))
    cut.write_bytes(cut.read_bytes()[:-100])
    for arguments in (
        ["deepspeed==1.0", str(damaged)],
        ["deepspeed==1.0", str(cut)],
        ["deepspeed==1.0", str(text)],
        ["deepspeed==1.0", str(tmp_path / "gone.whl")],
        ["deepspeed==1.0", str(outside)],
        ["deepspeed==1.0", str(other)],
        ["deepspeed", str(good)],
        ["no-such-package==1.0"],
        ["deepspeed==1.0", str(good), "--since", str(broken)],
    ):
        assert main(["knowledge", "diff", *arguments, "--save", str(saved)]) == 2, arguments
        captured = capsys.readouterr()
        assert captured.out == "", arguments
        assert len(captured.err.splitlines()) == 1, captured.err
        assert not saved.exists(), arguments
    for path in (tmp_path / "gone" / "s.json", "/dev/full"):
        assert main(["knowledge", "diff", "deepspeed==1.0", str(good), "--save", str(path)]) == 2
        assert f"cannot write '{path}'" in capsys.readouterr().err


def test_nothing_of_a_release_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark = tmp_path / "ran"
    bomb = f"open({str(mark)!r}, 'w')\nclass OffloadConfig:\n    offload: bool = open({str(mark)!r}, 'w')\n"
    path = wheel(tmp_path, {"deepspeed/__init__.py": bomb, "setup.py": bomb})
    report(["deepspeed==1.0", str(path)], capsys)
    assert not mark.exists()


def test_the_part_of_a_file_that_is_the_program_is_a_symbol() -> None:
    program = "import sys\nif __name__ == '__main__':\n    sys.exit('no sleep')\n"
    assert quotes._has_symbol(program, "__main__")
    assert not quotes._has_symbol("import sys\n", "__main__")


def test_a_wheel_whose_package_lies_under_data_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = wheel(
        tmp_path,
        {"deepspeed-1.0.data/purelib/deepspeed/config.py": NEW, "deepspeed-1.0.dist-info/METADATA": ""},
    )
    names = {each["name"] for each in report(["deepspeed==1.0", str(path)], capsys)["unknown"]}
    assert "RunConfig.offload_nvme" in names
