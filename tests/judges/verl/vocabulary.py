# SPDX-License-Identifier: Apache-2.0
"""Writes verl's vocabulary: every key of the configurations that its releases compose with Hydra.

    python tests/judges/verl/vocabulary.py build/verl > skill_tools/knowledge/vocabulary/verl.txt

The folder holds a folder for each release (`fetch.py`). It needs hydra-core and no verl. An empty mapping is a section
of free form, below which Hydra takes any key behind a `+`.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

CONFIGS = Path("verl/trainer/config")
UNLISTED = {
    "profiler", "global_profiler", "npu_profile", "worker_nsight_options", "reward_model", "reward", "distillation",
    "transfer_queue", "router_replay", "qat", "checkpoint_engine", "turbo_config", "skip",
}  # fmt: skip
HEAD = """# Keys of the configurations that verl composes with Hydra; `name.*` marks a mapping that is empty by default,
# or whose keys are not listed, because nothing of offloading or of training's memory is in it.
#
# Source: ppo_trainer and ppo_megatron_trainer with every model_engine, sft_trainer, and sft_trainer_engine with every
# engine, of verl {releases}. Written by tests/judges/verl/vocabulary.py.
"""


def main() -> None:
    """Print the names of every release in the folder."""
    folders = sorted(folder for folder in Path(sys.argv[1]).iterdir() if (folder / CONFIGS).is_dir())
    names = {name for folder in folders for root in configurations(folder / CONFIGS) for name in flat(root)}
    print(HEAD.format(releases=", ".join(folder.name for folder in folders)))
    print("\n".join(sorted(names)))


def configurations(folder: Path) -> Iterator[dict[str, object]]:
    """Yield each configuration that the release in `folder` composes, interpolations as they are written."""
    for name, choices in variants(folder):
        with initialize_config_dir(str(folder.resolve()), version_base=None):
            composed = compose(name, overrides=choices)
        assert isinstance(composed, DictConfig)
        root = OmegaConf.to_container(composed, resolve=False)
        assert isinstance(root, dict)
        yield {str(key): value for key, value in root.items()}


def variants(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the main configurations, with each choice of the groups that exchange an engine."""
    for path in sorted(folder.glob("ppo*_trainer.yaml")):
        engines = [each.stem for each in (folder / "model_engine").glob("*.yaml")]
        choices = [[f"model_engine={engine}"] for engine in engines] if path.stem == "ppo_trainer" else []
        yield from ((path.stem, choice) for choice in choices or [[]])
    if (folder / "sft_trainer.yaml").exists():
        yield "sft_trainer", []
    if (folder / "sft_trainer_engine.yaml").exists():
        for path in sorted((folder / "engine").glob("*.yaml")):
            if (folder / "optim" / path.name).exists():
                yield "sft_trainer_engine", [f"engine={path.stem}", f"optim={path.stem}"]


def flat(node: dict[str, object], prefix: str = "") -> Iterator[str]:
    """Yield each key below `node` by its dotted path."""
    for name, value in node.items():
        path = f"{prefix}{name}"
        if name.startswith("_"):
            continue
        yield path
        if value == {} or (name in UNLISTED and isinstance(value, dict)):
            yield f"{path}.*"
        elif isinstance(value, dict):
            yield from flat(value, f"{path}.")


if __name__ == "__main__":
    main()
