# SPDX-License-Identifier: Apache-2.0
"""Names of one framework alone prove a file's framework; a similar file is refused."""

import json
import re
from pathlib import Path

import pytest
from for_each import for_each

from skill_tools.__main__ import main
from skill_tools.configs.source import Kind, Source, load
from skill_tools.dialects import registry
from skill_tools.dialects.read import Contradiction, readings
from skill_tools.errors import Unrecognised, UnusableInput
from skill_tools.knowledge import examples

# One small file of our own of each kind that looks close to a training configuration, or shares a weak key with one.
LOOK_ALIKES = {
    "workflow.yml": "on: [push]\njobs:\n  train:\n    steps:\n      - run: axolotl train config.yml\n",
    "inference.sh": "python -m axolotl.cli.inference config.yml --lora-model-dir x --gradio\n",
    "dependabot.yml": "version: 2\nupdates:\n  - package-ecosystem: pip\n    directory: /\n",
    "codecov.yml": "coverage:\n  status:\n    project: {default: {target: 80%}}\ncomment: false\n",
    ".pre-commit-config.yaml": "repos:\n  - repo: local\n    hooks: [{id: x, name: x, entry: x, language: system}]\n",
    "mkdocs.yml": "site_name: x\ntheme: {name: material}\nnav: [a.md]\nplugins: [search]\n",
    ".readthedocs.yaml": "version: 2\nbuild: {os: ubuntu-22.04, tools: {python: '3.11'}}\n",
    "compose.yaml": "services:\n  train:\n    image: x\n    command: python train.py --batch-size 8\n",
    "pod.yaml": "apiVersion: v1\nkind: Pod\nspec:\n  containers:\n    - {name: x, command: [sleep], args: ['9']}\n",
    "args.yaml": "apiVersion: v1\nkind: Pod\nspec: {containers: [{args: [--port, '1', --seed, '2']}]}\n",
    "values.yaml": "replicaCount: 1\nmodel: {name: x}\nresources: {limits: {nvidia.com/gpu: 8}}\noptimizer: {}\n",
    "serve.sky.yaml": "resources: {accelerators: 'A100:8'}\nrun: |\n  vllm serve x --tensor-parallel-size 8\n",
    "hydra.yaml": "defaults: [model: gpt, optimizer: adam]\nmodel: {num_layers: 12, hidden_size: 768}\n",
    "hydra_model.yaml": "_target_: src.models.Net\noptimizer: {_target_: torch.optim.Adam, lr: 0.001}\nscheduler: {}\n",
    "nemo1.yaml": "name: x\ntrainer: {devices: 8}\nexp_manager: {}\nmodel:\n  tensor_model_parallel_size: 2\n",
    "lightning.yaml": "trainer: {max_epochs: 3}\nmodel: {class_path: x.Net, init_args: {lr: 0.1}}\noptimizer: {}\n",
    "trainer.yaml": "trainer: {model: net, max_epochs: 3}\norchestrator: {x: 1}\nmodel: {optim_cpu_offload: true}\n",
    "environment.yml": "name: x\nchannels: [conda-forge]\ndependencies: [python=3.11]\n",
    "card.md.yaml": "license: mit\nlibrary_name: peft\nbase_model: a/b\ndatasets: [c/d]\ntags: [axolotl]\n",
    "config.json": '{"architectures": ["X"], "model_type": "x", "hidden_size": 8, "num_hidden_layers": 2}',
    "tokenizer_config.json": '{"tokenizer_class": "X", "model_max_length": 8, "bos_token": "<s>"}',
    "trainer_state.json": '{"epoch": 1.0, "global_step": 3, "log_history": [{"learning_rate": 0.1, "loss": 1}]}',
    "adapter_config.json": '{"base_model_name_or_path": "a/b", "peft_type": "LORA", "r": 8, "lora_alpha": 16}',
    "launch.json": '{"version": "0.2.0", "configurations": [{"name": "train", "args": ["--bf16"]}]}',
    "pyproject.toml": '[project]\nname = "x"\n[tool.ruff]\nline-length = 99\n',
    "Cargo.toml": '[package]\nname = "x"\n[profile.release]\nopt-level = 3\n',
    "package.json": '{"name": "x", "scripts": {"train": "node train.js"}, "optimizer": "adam"}',
    "tsconfig.json": '{"compilerOptions": {"strict": true}}',
    "openapi.yaml": "openapi: 3.0.0\npaths: {/train: {post: {}}}\ncomponents: {}\n",
    "dvc.yaml": "stages:\n  train:\n    cmd: python train.py --lr 0.1\n    deps: [data]\n",
    "gitlab.yml": "stages: [test]\ntest:\n  stage: test\n  script: [pytest]\n",
    "skill.card.yaml": "name: x\ndescription: offload\ncommands: {lint: offload lint}\nmodel: {}\n",
    "mergekit.yaml": "merge_method: ties\nbase_model: a/b\nmodels: [{model: c/d}]\ndtype: bfloat16\nparameters: {}\n",
    "eval.yaml": "task: x\ndataset_path: a\nmetric_list: [{metric: acc}]\nmodel: hf\noptimizer: none\n",
    "mlflow.yaml": "name: x\nentry_points: {main: {command: python train.py}}\n",
    "inference.yaml": "model: a/b\ntensor_parallel_size: 8\ngpu_memory_utilization: 0.9\n",
    "sweep.yaml": "program: train.py\nmethod: grid\nparameters: {learning_rate: {values: [0.1]}}\n",
    "just_a_list.json": "[1, 2, 3]",
    "words.yaml": "training\n",
    "library.py": "import torch\n\n\ndef train(model, config):\n    config.model.x = 1\n    return model\n",
    "words.py": "NAMES = ['megatron.bridge', 'ConfigContainer(']\n\n\ndef f(self):\n    self.a.b = 1\n    return 1\n",
    "django.py": "from django.db import models\n\n\nclass Config(models.Model):\n    optimizer = models.TextField()\n",
    "diffusers.sh": "python train_dreambooth_lora_flux.py --pretrained_model_name_or_path a --rank 8\n",
    "train_network.sh": "python train_network.py --epochs 3 --lr 0.1\n",
    "train_gpt.py": "import argparse\nparser = argparse.X()\nparser.add_argument('--num-layers', type=int)\n",
    "test_args.py": "import argparse\nargs = make_parser().parse_args(['--num-layers', '4'])\n",
    "adapter.py": "from transformers import AutoModel\nfrom mcore.dpo import (\n    Trainer,\n    DPOConfig,\n)\n"
    "from .rewards import RewardConfig, Reward\nx = DPOConfig(lr=1)\ny = RewardConfig()\n",
    "prune.py": "if cfg.model.tensor_model_parallel_size == 1:\n    prune(cfg.model.num_layers == 2)\n",
    "install.sh": "#!/bin/bash\nset -e\npip install axolotl megatron-core deepspeed\nmake --jobs 8\n",
    "other.sh": "export PYTHONPATH=/opt/Megatron-Bridge:/opt/Megatron-LM\npython -m other.train trainer.lr=1\n",
    "prepare.sh": "python Megatron-LM/tools/preprocess_data.py --input a --output-prefix b --workers 8\n",
    "serve.sh": "vllm serve x --tensor-parallel-size 8 --pipeline-parallel-size 2 --seed 1\n",
    "server.sh": "torchrun serve_text.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
    "--num-layers 4 --seq-length 8 --batch 1 --path a --max-new-tokens 1 --quantize x\n",
    "fork.sh": "python3 -m verl.trainer.main config=a.yaml worker.actor.fsdp.enable_cpu_offload=true\n",
    "generate.sh": "python3 -m verl.trainer.main_generation model.path=a rollout.n=1\n",
    "train.sh": "python train.py --lr 0.1 --epochs 3 --num-layers 4 --batch-size 8\n",
}  # fmt: skip


@for_each(LOOK_ALIKES)
def test_what_looks_alike_is_refused(name: str) -> None:
    with pytest.raises(
        Unrecognised, match="no training configuration that is known; expected proof of one"
    ) as caught:
        readings([Source(name, LOOK_ALIKES[name])])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["dependabot.yml", "codecov.yml", "package.json", "pyproject.toml", "mkdocs.yml"]
)
def test_what_has_no_mark_of_a_training_is_not_even_parsed(name: str) -> None:
    source = Source(name, LOOK_ALIKES[name])
    with pytest.raises(Unrecognised):
        readings([source])
    assert "documents" not in vars(source)


def test_each_framework_has_marks() -> None:
    """Without any, each YAML and JSON file of a folder would be parsed for it."""
    assert [each.name for each in registry.with_keyed_files() if not each.marks] == []


@pytest.mark.parametrize(("name", "kind"), [("run.sh", Kind.SHELL), ("train.py", Kind.PYTHON)])
def test_whoever_a_script_is_proven_to_be_of_has_a_mark_in_it(name: str, kind: Kind) -> None:
    """Only those that have one are asked. Each text of a rule's examples stands for a script, whatever it is."""
    of_rules = [each for by_framework in examples().values() for each in by_framework.values()]
    texts = {text for example in of_rules for text in example.values() if isinstance(text, str)}
    proven = 0
    for text in texts:
        source = Source(name, text)
        marked = set(registry.marked_in(source.script if kind is Kind.SHELL else text, kind))
        holders = {each for each in registry.with_files() if each.evidence(source).votes}
        assert holders <= marked, text
        proven += len(holders)
    assert proven > 50


def test_a_folder_of_look_alikes_is_passed_over_silently(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in LOOK_ALIKES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "template.yaml").write_text("{{ x }}: [\n", encoding="utf-8")
    (tmp_path / "broken.py").write_text("def f(:\n", encoding="utf-8")
    paths = [str(path) for path in sorted(tmp_path.iterdir())]
    assert main(["lint", "--skip-unrecognized", *paths]) == 0
    assert main(["lint", "--skip-unrecognized", str(tmp_path)]) == 0
    assert main(["lint", "--skip-unrecognized", "--format", "concise", *paths]) == 0
    assert capsys.readouterr() == ("", "")
    assert main(["lint", str(tmp_path)]) == 2
    assert "no training configuration among" in capsys.readouterr().err


PROVEN = {
    "megatron-bridge": ("run.yaml", "model: {recompute_granularity: full, num_layers: 4}\ntrain: {train_iters: 9}\n"),
    "megatron-lm": ("run.sh", "torchrun pretrain_gpt.py --num-layers 4 --tensor-model-parallel-size 2\n"),
    "axolotl": ("lora.yml", "base_model: a/b\nadapter: lora\ndatasets: [{path: c, type: alpaca}]\n"),
    "deepspeed": ("ds.json", '{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}'),
}  # fmt: skip


@pytest.mark.parametrize("framework", PROVEN)
def test_what_is_proven_says_by_what(framework: str) -> None:
    name, text = PROVEN[framework]
    (found,) = readings([Source(name, text)])
    assert found.dialect.name == framework
    assert found.proof
    assert not found.is_part


def test_the_first_line_says_what_a_file_was_read_as(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in PROVEN.values():
        (tmp_path / name).write_text(text, encoding="utf-8")
    main(["lint", str(tmp_path / "lora.yml")])
    assert (
        "lora.yml is read as Axolotl (base_model, adapter, datasets)"
        in capsys.readouterr().out.splitlines()[0]
    )
    main(["lint", str(tmp_path)])
    out = capsys.readouterr().out
    assert [" is read as " in line for line in out.splitlines()[:5]] == [True] * 4 + [False]
    for number in range(2):
        (tmp_path / f"more{number}.yml").write_text(PROVEN["axolotl"][1], encoding="utf-8")
    main(["lint", str(tmp_path), "--format", "concise"])
    assert "3 as Axolotl" in capsys.readouterr().out.splitlines()[0]
    for number in range(2):
        (tmp_path / f"more{number}.yml").unlink()
    assert out.splitlines()[-1].count(" in 4 inputs") == 1
    main(["lint", str(tmp_path), "--format", "json"])
    read = {
        Path(each["file"]).name: each["framework"] for each in json.loads(capsys.readouterr().out)["read"]
    }
    assert read == {name: framework for framework, (name, _) in PROVEN.items()}


def test_two_proofs_at_once_are_both_named_and_none_is_taken() -> None:
    text = "model: {recompute_granularity: full}\nMODEL_ARGS: {--num-layers: 4}\nbase_model: a/b\nadapter: lora\n"
    with pytest.raises(
        Contradiction, match=r"Megatron Bridge by .* and Axolotl by base_model, adapter at once"
    ):
        readings(
            [Source("x.yaml", text.replace("MODEL_ARGS: {--num-layers: 4}\n", "train: {train_iters: 3}\n"))]
        )


KUBERNETES = """\
apiVersion: batch/v1
kind: Job
spec:
  template:
    spec:
      containers:
        - name: train
          command:
            - torchrun
            - pretrain_gpt.py
          args:
            - --num-layers=4
            - --tensor-model-parallel-size
            - "2"
            - --cpu-offloading-num-layers
            - "2"
"""
SKYPILOT = (
    "resources: {accelerators: 'H100:8'}\nrun: |\n  cd x\n  torchrun pretrain_gpt.py \\\n    --num-layers 4\n"
)
DSTACK = "type: task\ncommands:\n  - pip install axolotl\n  - axolotl train config.yml --micro-batch-size 2\n"


@pytest.mark.parametrize(
    ("text", "framework", "key", "place"),
    [
        (KUBERNETES, "megatron-lm", "num_layers", "task.yaml:12:15"),
        (KUBERNETES, "megatron-lm", "cpu_offloading_num_layers", "task.yaml:15:15"),
        (SKYPILOT, "megatron-lm", "num_layers", "task.yaml:5:5"),
        (DSTACK, "axolotl", "micro_batch_size", "task.yaml:4:30"),
    ],
)
def test_the_command_in_a_task_is_linted_where_it_stands(
    text: str, framework: str, key: str, place: str
) -> None:
    (found,) = readings([Source("task.yaml", text)])
    assert (found.dialect.name, found.is_part) == (framework, True)
    assert str(found.compose().settings[key].place) == place


def test_of_gpt_neox_what_deepspeed_gets_is_linted() -> None:
    text = '{\n  "pipe_parallel_size": 1,\n  "num_layers": 9,\n  "zero_optimization": {"stage": 1}\n}\n'
    (found,) = readings([Source("19M.yml", text)])
    assert found.dialect.name == "deepspeed"
    assert "GPT-NeoX" in found.proof
    settings = found.compose().settings
    assert settings["deepspeed.zero_optimization.stage"].value == 1
    assert str(settings["deepspeed.zero_optimization.stage"].place) == "19M.yml:4:25"
    assert "num_layers" not in settings


RECIPES = """\
from megatron.bridge.training.config import ConfigContainer


def small() -> ConfigContainer:
    cfg = _common()
    cfg.model.cpu_offloading = True
    return cfg


def large() -> ConfigContainer:
    cfg = _common()
    cfg.model.num_layers = 4
    return cfg
"""


def test_each_recipe_of_a_file_is_linted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipes.py").write_text(RECIPES, encoding="utf-8")
    main(["lint", str(tmp_path / "recipes.py"), "--format", "json"])
    read = [each["file"].rpartition("/")[2] for each in json.loads(capsys.readouterr().out)["read"]]
    assert read == ["recipes.py::small", "recipes.py::large"]
    main(["lint", str(tmp_path / "recipes.py") + "::large", "--format", "json"])
    assert len(json.loads(capsys.readouterr().out)["read"]) == 1


def test_a_file_of_the_package_that_sets_nothing_is_nobodys() -> None:
    with pytest.raises(Unrecognised):
        readings(
            [Source("x.py", "import megatron.bridge\n\n\ndef shape(batch):\n    return batch.tokens.shape\n")]
        )


def test_folders_are_walked_in_order_without_what_tools_keep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, text = PROVEN["axolotl"]
    for folder in (".", "b", "a", ".git", "node_modules", "venv", "a/.cache"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_text(text, encoding="utf-8")
    (tmp_path / "venv" / "pyvenv.cfg").touch()
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    main(["lint", str(tmp_path), "--format", "json"])
    read = [
        str(Path(each["file"]).relative_to(tmp_path)) for each in json.loads(capsys.readouterr().out)["read"]
    ]
    assert read == ["lora.yml", "a/lora.yml", "b/lora.yml"]


LAUNCHER = """\
import subprocess, sys

ARGS = ["--num-layers", "4"]
cmd = ["torchrun", "pretrain_gpt.py", *sys.argv[1:]]
cmd += ARGS
cmd.extend(["--bf16", "--hidden-size", str(size())])
if sys.argv:
    cmd.append("--swiglu")


def launch():
    subprocess.run(cmd, check=True)
"""


@pytest.mark.parametrize(
    "text",
    [
        LAUNCHER,
        "import os\nos.system('torchrun pretrain_gpt.py --num-layers 4 --bf16')\n",
        "import sys\nsys.argv = ['pretrain_gpt.py', '--num-layers', '4', '--bf16']\n",
        "import subprocess as s\ns.run(args=['bash', '-c', 'torchrun pretrain_gpt.py --num-layers 4 --bf16'])\n",
    ],
)
def test_the_command_line_that_a_program_hands_on_is_linted(text: str) -> None:
    (found,) = readings([Source("launch.py", text)])
    assert (found.dialect.name, found.is_part) == ("megatron-lm", True)
    config = found.compose()
    assert config.settings["num_layers"].value == 4
    assert config.settings["bf16"].value is True
    assert "swiglu" not in config.settings
    assert "hidden_size" in (config.unresolved if "size()" in text else {"hidden_size"})


def test_a_key_that_decides_may_hold_anything() -> None:
    with pytest.raises(UnusableInput):
        readings([Source("x.yaml", "stage: [[1], {a: b}]\nfinetuning_type: {a: [1]}\n")])


SOURCING = {
    "transformers": "torchrun train.py $ARGS --deepspeed $ZERO\n",
    "llama-factory": "FORCE_TORCHRUN=1 llamafactory-cli train --stage sft --deepspeed $ZERO\n",
    "deepspeed": "deepspeed --num_gpus 8 train.py --deepspeed --deepspeed_config $ZERO\n",
    "accelerate": "accelerate launch --use_deepspeed --deepspeed_config_file $ZERO train.py\n",
}


@pytest.mark.parametrize("framework", SOURCING)
def test_what_a_launch_needs_may_stand_in_a_file_that_it_sources(tmp_path: Path, framework: str) -> None:
    options = "--output_dir a --learning_rate 1 --max_steps 2 --model_name_or_path b"
    args = f"ARGS='{options}'\n" if "$ARGS" in SOURCING[framework] else ""
    (tmp_path / "common.sh").write_text(f"ZERO=ds.json\n{args}")
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    (tmp_path / "run.sh").write_text(f'HERE=$(dirname "$0")\nsource "$HERE/common.sh"\n{SOURCING[framework]}')
    (found,) = readings([load(tmp_path / "run.sh")])
    assert found.dialect.name == framework
    stage = found.compose().settings["deepspeed.zero_optimization.stage"]
    assert (stage.value, Path(stage.place.file).name) == (3, "ds.json")


def test_a_deepspeed_file_that_only_the_caller_names_is_nobodys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.sh").write_text("deepspeed train.py --deepspeed_config $1 # such as ds.json\n")
    assert main(["lint", "--skip-unrecognized", str(tmp_path / "run.sh")]) == 0
    assert capsys.readouterr().err == ""
    assert main(["lint", str(tmp_path / "run.sh")]) == 2


NOT_READ = {
    "fsdp2.sh": ("torchrun train_fsdp2.py --config-file a.yaml\n", "MindSpeed-LLM's FSDP2"),
    "litgpt.sh": ("litgpt finetune_lora a/b --config c.yaml\n", "LitGPT's"),
    "litgpt.yaml": (
        "checkpoint_dir: a\nout_dir: b\ntrain: {global_batch_size: 8, micro_batch_size: 1}\neval: {}\n",
        "LitGPT's",
    ),
    "nanotron.yaml": (
        "general: {run: a}\nparallelism: {dp: 2, tp: 1}\ntokens: {}\ncheckpoints: {}\n",
        "nanotron's",
    ),
    "roll.sh": ("python examples/start_rlvr_pipeline.py --config_path a --config_name b\n", "ROLL's"),
    "mcore.sh": (
        "torchrun run_train.py --stage=sft --finetuning_type=full --use_mca --tensor_model_parallel_size 2\n",
        "mcore_adapter's",
    ),
    "oumi.sh": ("oumi distributed torchrun -m oumi train -c a.yaml\n", "Oumi's"),
    "automodel.sh": ("automodel examples/llm_finetune/a.yaml --nproc-per-node 8\n", "AutoModel's"),
    "xtuner.sh": ("torchrun xtuner/v1/train/cli/sft.py --config a.py\n", "XTuner's"),
    "veomni.sh": ("bash train.sh tasks/train_text.py configs/text/a.yaml\n", "VeOmni's"),
    "simpletuner.sh": ("simpletuner train --env mine\n", "SimpleTuner's"),
    "args.json": (
        '{"model": "a", "dataset": ["b"], "tuner_type": "full", "swift_version": "4.6.0", "global_world_size": 8}',
        "a record of ms-swift's",
    ),
    "foundry.yaml": (
        "max_seq_len: 8\nmax_duration: 1ba\ntrain_loader: {}\nfsdp_config: {}\n",
        "LLM Foundry's",
    ),
}


def test_a_framework_that_is_not_read_is_refused_by_its_name() -> None:
    for filename, (text, label) in NOT_READ.items():
        with pytest.raises(Unrecognised, match=label) as refused:
            readings([Source(filename, text)])
        assert re.search("offload plan|offload lint|--framework", refused.value.attempt), filename


MINDSPEED = (
    "torchrun pretrain_gpt.py --num-layers 32 --use-mcore-models --tensor-model-parallel-size 2 --swap-attention "
    "--swap-optimizer\n"
)


def test_one_option_alone_makes_a_command_no_other_framework_s() -> None:
    assert readings([Source("run.sh", MINDSPEED)])[0].dialect.name == "mindspeed-llm"
    text = MINDSPEED.replace("--swap-optimizer", "--bf16")
    assert readings([Source("run.sh", text)])[0].dialect.name == "megatron-lm"


def test_the_user_may_state_the_framework_all_the_same() -> None:
    assert readings([Source("run.sh", MINDSPEED)], framework="megatron-lm")[0].dialect.name == "megatron-lm"


def test_names_of_training_in_a_program_s_own_file_are_not_axolotl_s() -> None:
    own = "{base_model: a/b, learning_rate: 1.0e-4, gradient_accumulation_steps: 8, %s}"
    with pytest.raises(Unrecognised):
        readings(
            [
                Source(
                    "pilot.json",
                    own % "gamma_values: [1], judge: x, beta_values: [2], epochs: 3, lora_rank: 4",
                )
            ]
        )
    assert readings([Source("run.yaml", own % "lr_schduler: cosine")])[0].dialect.name == "axolotl"


@pytest.mark.parametrize(
    "text",
    [
        "{base_model: a/b, adapter: c, n: 40, correct: 31, accuracy: 0.775, per_q: []}",
        "{stage: sft, finetuning_type: lora, bench_seed: 1, warm_rounds: 2, hosts: [a], matrix: b}",
    ],
)
def test_a_program_s_own_file_is_not_a_framework_s_for_two_of_its_names(text: str) -> None:
    with pytest.raises(Unrecognised):
        readings([Source("result.yaml", text)])
