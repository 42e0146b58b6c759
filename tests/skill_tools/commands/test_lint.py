# SPDX-License-Identifier: Apache-2.0
"""The lint command from argument list to exit code and text."""

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from schemas import assert_follows

from skill_tools.__main__ import main
from skill_tools.bundle import root

BAD = """\
model:
  num_layers: 32
  cpu_offloading: true  # keep me
  cpu_offloading_num_layers: 8
  pipeline_model_parallel_size: 2
"""
GOOD = BAD.replace("size: 2", "size: 1")
FIXABLE = """\
# my run
optimizer:
  optimizer_cpu_offload: true   # offload
  optimizer_offload_fraction: 0.5
  use_torch_optimizer_for_cpu_offload: true
"""
AXOLOTL = "base_model: a/b\ngradient_checkpointing: false\nactivation_offloading: true\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "bad.yaml": BAD,
        "good.yaml": GOOD,
        "fixable.yaml": FIXABLE,
        "axolotl.yaml": AXOLOTL,
    }.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def rules_in(capsys: pytest.CaptureFixture[str]) -> set[str]:
    return {finding["rule"] for finding in json.loads(capsys.readouterr().out)["findings"]}


def test_a_finding_is_one_line_and_exit_code_1(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", "bad.yaml", "--format", "concise"]) == 1
    line = next(line for line in capsys.readouterr().out.splitlines() if " la-pp " in line)
    assert line.startswith("bad.yaml:3:3 error la-pp ")
    assert "model.cpu_offloading=true (line 3)" in line
    assert "model.pipeline_model_parallel_size=2 (line 5)" in line
    assert " → " in line


@pytest.mark.parametrize(("fail_on", "code"), [("error", 0), ("info", 1)])
def test_fail_on_sets_the_bar(here: Path, fail_on: str, code: int) -> None:
    (here / "info.yaml").write_text(
        "optimizer:\n  optimizer_cpu_offload: true\n  optimizer_offload_fraction: 1.0\n"
    )
    assert main(["lint", "info.yaml", "--fail-on", fail_on]) == code


def test_many_files_are_linted_each_on_its_own(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", "good.yaml", "bad.yaml", "axolotl.yaml", "--format", "json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["summary"]["inputs"] == 3
    by_rule = {finding["rule"]: finding["file"] for finding in document["findings"]}
    assert by_rule["la-pp"] == "bad.yaml"
    assert by_rule["ax-ao-needs-gc"] == "axolotl.yaml"


def test_overrides_compose_and_the_finding_points_at_what_won(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(
        ["lint", "good.yaml", "--overrides", "model.pipeline_model_parallel_size=4", "--format", "json"]
    )
    assert code == 1
    (finding,) = [f for f in json.loads(capsys.readouterr().out)["findings"] if f["rule"] == "la-pp"]
    assert finding["observed"]["pipeline_model_parallel_size"] == 4
    assert "model.pipeline_model_parallel_size=4 (<overrides> line 1)" in finding["message"]


def test_a_recipe_composes_with_overrides_and_a_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "recipe.py").write_text(
        "def recipe():\n    cfg = base()\n    cfg.model.cpu_offloading = True\n"
        "    cfg.model.cpu_offloading_num_layers = 8\n    cfg.model.num_layers = 32\n    return cfg\n"
    )
    (here / "more.yaml").write_text("model:\n  recompute_granularity: null\n")
    command = ["lint", "recipe.py", "--overrides", "model.pipeline_model_parallel_size=2", "more.yaml"]
    assert main([*command, "--format", "json"]) == 1
    assert "la-pp" in rules_in(capsys)


def test_compose_makes_one_configuration_of_files(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "pp.yaml").write_text("model:\n  pipeline_model_parallel_size: 2\n")
    assert main(["lint", "good.yaml", "pp.yaml", "--format", "json"]) in (0, 1)
    assert "la-pp" not in rules_in(capsys)
    assert main(["lint", "good.yaml", "pp.yaml", "--compose", "--format", "json"]) == 1
    assert "la-pp" in rules_in(capsys)
    main(["lint", "good.yaml", "pp.yaml", "--compose"])
    assert capsys.readouterr().out.startswith("good.yaml + pp.yaml is read as Megatron Bridge (")


def test_overrides_alone_are_a_configuration(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "model.cpu_offloading=true model.cpu_offloading_num_layers=8 model.pipeline_model_parallel_size=2"
    assert main(["lint", "--overrides", text, "--format", "json"]) == 1
    assert "la-pp" in rules_in(capsys)


@pytest.mark.parametrize(
    "words",
    [
        ["good.yaml", "--overrides", "model.sequence_parallel=true", "model.pipeline_model_parallel_size=2"],
        ["good.yaml", "--overrides", "model.sequence_parallel=true model.pipeline_model_parallel_size=2"],
        ["--overrides", "model.sequence_parallel=true", "model.pipeline_model_parallel_size=2", "good.yaml"],
        ["--overrides=model.sequence_parallel=true", "good.yaml", "model.pipeline_model_parallel_size=2"],
    ],
)
def test_overrides_are_words_or_one_text(
    here: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lint", *words, "--format", "json"]) == 1
    assert "la-pp" in rules_in(capsys)


def test_a_file_in_the_place_of_an_override_is_told(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", "--overrides", "good.yaml"]) == 2
    assert capsys.readouterr().err.endswith("try offload lint good.yaml --overrides KEY=VALUE\n")


def test_standard_input_has_a_name(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(BAD.encode())))
    assert main(["lint", "--stdin", "--stdin-filename", "dir/x.yaml"]) == 1
    assert "dir/x.yaml:3:3 error la-pp" in capsys.readouterr().out


def test_one_call_tells_an_agent_all_in_2000_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    """A token is four characters. Six faults: text, consequence and remedy of each, in both forms."""
    for form in ("blocks", "json"):
        assert main(["lint", str(root() / "examples/broken_bridge.yaml"), "--format", form]) == 1
        out = capsys.readouterr().out
        assert len(out) / 4 < 2000
        assert "Currently there is no support for Pipeline parallelism with CPU offloading" in out
        assert "refused at startup" in out
        assert "Set pipeline_model_parallel_size to 1" in out
    document = json.loads(out)
    assert_follows(document, "findings")


def test_releases_beside_a_file_are_used_and_said(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "graphs.yaml").write_text(GOOD + "  cuda_graph_impl: full_iteration\n")
    (here / "Dockerfile").write_text("FROM nvcr.io/nvidia/nemo:26.02\n")
    assert main(["lint", "graphs.yaml"]) == 1
    out = capsys.readouterr().out.replace("\n  ", " ")
    assert "megatron-core 0.16.0 (Dockerfile line 1)" in out
    assert "error la-cuda-graph-any" in out
    main(["lint", "graphs.yaml", "--target", "megatron-core==0.19.0"])
    out = capsys.readouterr().out.replace("\n  ", " ")
    assert "megatron-core 0.19.0 (--target)" in out
    assert "la-cuda-graph-any" not in out


def test_targets_decide_what_depends_on_a_release(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graphs = GOOD + "  cuda_graph_impl: full_iteration\n"
    (here / "graphs.yaml").write_text(graphs)
    (here / "pip.txt").write_text("megatron-core==0.18.2\ntransformer-engine==2.12\n")

    def severities(*more: str) -> dict[str, str]:
        main(["lint", "graphs.yaml", "--format", "json", *more])
        return {f["rule"]: f["severity"] for f in json.loads(capsys.readouterr().out)["findings"]}

    assert severities()["la-cuda-graph-any"] == "info", "releases that have ended are the less likely ones"
    assert severities("--target", "megatron-core==0.16.1")["la-cuda-graph-any"] == "error"
    assert "la-cuda-graph-any" not in severities("--versions", "pip.txt")
    assert (
        severities("--versions", "pip.txt", "--target", "megatron-core==0.16.1")["la-cuda-graph-any"]
        == "error"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["missing.yaml"],
        ["bad.yaml", "--framework", "nemo"],
        ["bad.yaml", "--target", "megatron-core"],
        ["bad.yaml", "--versions", "missing.txt"],
        ["bad.yaml", "--versions", "bad.yaml"],
        ["bad.yaml", "--limit", "many"],
        ["bad.yaml", "--limit", "-1"],
        ["bad.yaml", "--no-such-option"],
        ["broken.yaml"],
        ["nothing.yaml"],
        ["folder"],
        ["--stdin", "--fix"],
        [],
    ],
)
@pytest.mark.parametrize("form", ["concise", "json"])
def test_unusable_input_is_one_line_and_exit_code_2(
    here: Path,
    arguments: list[str],
    form: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (here / "broken.yaml").write_text("model: [1,\n")
    (here / "nothing.yaml").write_text("just: text\n")
    (here / "folder").mkdir()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert main(["lint", *arguments, "--format", form]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("offload: ")
    assert len(err.splitlines()) == 1
    if form == "json":
        document = json.loads(out)
        assert_follows(document, "findings")
        assert document["errors"]


def test_one_unusable_file_does_not_hide_the_others(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", "missing.yaml", "bad.yaml"]) == 2
    out, err = capsys.readouterr()
    assert "la-pp" in out
    assert "missing.yaml" in err


def test_files_of_no_framework_can_be_passed_over(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "other.yaml").write_text("just: text\n")
    assert main(["lint", "other.yaml", "good.yaml", "--skip-unrecognized", "--fail-on", "error"]) == 0
    assert "in 1 input" in capsys.readouterr().out


def test_a_fault_of_ours_is_one_line_and_exit_code_3(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("lost\nline")

    monkeypatch.setattr("skill_tools.commands.lint.lint", broken)
    assert main(["lint", "bad.yaml", "--format=json"]) == 3
    out, err = capsys.readouterr()
    assert json.loads(out)["errors"][0]["kind"] == "internal"
    assert err.startswith("offload: internal error: KeyError")
    assert len(err.splitlines()) == 1


def test_a_limit_shows_the_worst(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", "bad.yaml", "fixable.yaml", "--limit", "1", "--format", "concise"]) == 1
    *_, first, summary = capsys.readouterr().out.splitlines()
    assert " error " in first
    assert "not shown (--limit)" in summary


def test_a_suppression_silences_its_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "bad.yaml").write_text(BAD.replace("# keep me", "# offload: ignore[la-pp] our fork supports it"))
    main(["lint", "bad.yaml", "--format", "json"])
    assert not rules_in(capsys) & {"la-pp", "suppression-unused"}


def test_fix_changes_one_line_and_nothing_else(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rule = "oc-use-torch-dead"
    main(["lint", "fixable.yaml", "--format", "json"])
    assert rule in rules_in(capsys)
    main(["lint", "fixable.yaml", "--fix", "--format", "json"])
    assert rule not in rules_in(capsys)
    text = (here / "fixable.yaml").read_text()
    assert "use_torch_optimizer_for_cpu_offload" not in text
    assert text.startswith("# my run\noptimizer:\n  optimizer_cpu_offload: true   # offload\n")


def test_diff_shows_the_change_and_writes_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", "fixable.yaml", "--diff"]) == 1
    out = capsys.readouterr().out
    assert "-  use_torch_optimizer_for_cpu_offload: true\n" in out
    assert (here / "fixable.yaml").read_text() == FIXABLE
    main(["lint", "fixable.yaml", "--fix"])
    capsys.readouterr()
    assert main(["lint", "fixable.yaml", "--diff"]) == main(["lint", "fixable.yaml", "--fail-on", "warning"])
    main(["lint", "fixable.yaml", "--diff", "--format", "json"])
    assert "use_torch_optimizer_for_cpu_offload" not in capsys.readouterr().out
    (here / "clean.yaml").write_text("optimizer:\n  optimizer_cpu_offload: false\n")
    assert main(["lint", "clean.yaml", "--diff"]) == 0
    assert capsys.readouterr() == ("", "")


def test_a_diff_that_can_change_nothing_says_so_and_fails_as_lint_does(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["lint", "bad.yaml"])
    capsys.readouterr()
    assert code == main(["lint", "bad.yaml", "--diff"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("offload: no safe fix; ")
    assert " error" in err
    assert err.endswith(": offload lint bad.yaml\n")
    assert main(["lint", "bad.yaml", "--fix"]) == 1


def test_a_diff_counts_what_it_leaves(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "both.yaml").write_text(BAD + FIXABLE)
    assert main(["lint", "both.yaml", "--diff"]) == 1
    out, err = capsys.readouterr()
    assert "-  use_torch_optimizer_for_cpu_offload: true" in out
    assert err.startswith("offload: 1 safe fix shown; ")


def test_a_diff_says_what_comes_after_it(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "fp8.yaml").write_text(
        "model: {fp8_recipe: blockwise}\nddp: {fp8_param_gather: true}\noptimizer:\n  optimizer_cpu_offload: true\n"
        "  optimizer_offload_fraction: 1.0\n  fp8_recipe: blockwise\n  use_precision_aware_optimizer: false\n"
    )
    main(["lint", "fp8.yaml", "--format", "json"])
    (finding,) = [
        each
        for each in json.loads(capsys.readouterr().out)["findings"]
        if each["rule"] == "oc-precision-aware-missing-bridge"
    ]
    assert [each["rule"] for each in finding["after"]] == ["oc-fp8-param-gather-bridge"]
    assert main(["lint", "fp8.yaml", "--diff", "--unsafe-fixes"]) == 1
    assert "after this: error oc-fp8-param-gather-bridge: " in capsys.readouterr().err


def test_choices_are_never_made(here: Path) -> None:
    main(["lint", "bad.yaml", "--fix", "--unsafe-fixes"])
    assert "pipeline_model_parallel_size: 2" in (here / "bad.yaml").read_text()


def test_a_fixed_diff_applies_with_patch(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which("patch") is None:
        pytest.skip("the patch program is not installed")
    main(["lint", "fixable.yaml", "--diff"])
    diff = capsys.readouterr().out
    subprocess.run(["patch", "-p1"], input=diff, text=True, check=True, cwd=here, capture_output=True)
    assert "use_torch_optimizer_for_cpu_offload" not in (here / "fixable.yaml").read_text()


@pytest.mark.parametrize("form", ["concise", "json", "github", "sarif"])
def test_every_format_names_the_finding(here: Path, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", "bad.yaml", "--format", form]) == 1
    assert "la-pp" in capsys.readouterr().out


def test_the_same_input_gives_the_same_output(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = set()
    for _ in range(2):
        main(["lint", "bad.yaml", "fixable.yaml", "axolotl.yaml", "--format", "json"])
        outputs.add(capsys.readouterr().out)
    assert len(outputs) == 1


def test_it_runs_uninstalled_from_any_folder(here: Path) -> None:
    command = [sys.executable, "-S", str(root() / "skill_tools"), "explain", "la-pp"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=here, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("# la-pp")
    command = [sys.executable, str(root() / "skill_tools"), "lint", "bad.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=here, check=False)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_missing_package_is_named(here: Path) -> None:
    command = [sys.executable, "-S", str(root() / "skill_tools"), "lint", "bad.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=here, check=False)
    assert done.returncode == 2
    assert "pip install pyyaml" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_pre_commit_hook_calls_what_exists(here: Path) -> None:
    (hook,) = yaml.safe_load((root() / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    program, *arguments = hook["entry"].split()
    assert program == "offload"
    assert {"id", "name", "language", "files"} <= hook.keys()
    assert main([*arguments, "bad.yaml", "good.yaml"]) == 1


def test_a_deepspeed_file_that_is_not_there_is_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "run.yaml").write_text("base_model: a/b\ndeepspeed: ds.json\n")
    assert main(["lint", "run.yaml"]) == 0
    assert "run.yaml:2 deepspeed=ds.json: no such file" in capsys.readouterr().err
    (here / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    main(["lint", "run.yaml"])
    assert capsys.readouterr().err == ""
