# SPDX-License-Identifier: Apache-2.0
"""How a plain PyTorch loop on several GPUs has its model: sharded by FSDP2, or whole on each if that is asked for."""

from enum import StrEnum

from skill_tools.configs.config import Config
from skill_tools.dialects import fields
from skill_tools.dialects.assumptions import Assumption
from skill_tools.dialects.run import Exchange, Precision, Spread, TrainingRun
from skill_tools.errors import UnusableInput


class Sharding(StrEnum):
    """The values of the setting `sharding`."""

    FSDP2 = "fsdp2"
    REPLICAS = "replicas"


# The dtypes that shards may have between uses; an fp32 shard is its own master.
_PRECISIONS = {
    "float32": Precision(weight_bytes=4, gradient_bytes=4, master_bytes=0, gradient_is_buffer=False),
    "bfloat16": Precision(weight_bytes=2, gradient_bytes=2, gradient_is_buffer=False),
}
_EAGER = Assumption("eager PyTorch with flash attention")
BF16_EAGER = Assumption(
    f"bf16 weights, fp32 master weights and moments, {_EAGER.text}"
)  # of one GPU, or replicas
BF16_SHARDS = {"shard_dtype": "bfloat16"}


def spread(run: TrainingRun, config: Config) -> TrainingRun:
    """Return `run`, of several GPUs, with its model sharded or replicated as `config` says."""
    if _one_of(config, "sharding", tuple(Sharding)) == Sharding.REPLICAS:
        if config.value("shard_dtype"):
            raise UnusableInput(
                "shard_dtype with sharding=replicas, which has no shards",
                expected="one of them",
                attempt="sharding=fsdp2 shard_dtype=bfloat16",
            )
        # DDP keeps gradients in its buckets, which are never freed, and reduces them there.
        return run._replace(
            precision=run.precision._replace(gradient_is_buffer=True),
            spread=Spread(shards=False, reduced_bytes=run.precision.gradient_bytes),
            exchange=Exchange(reduced=run.precision.gradient_bytes, all_reduces=True),
            assumptions=(
                *run.assumptions,
                Assumption(
                    f"each of {run.layout.gpus} GPUs has all weights, gradients and states (DistributedDataParallel "
                    "with gradient_as_bucket_view); without sharding=replicas FSDP2 shards them"
                ),
            ),
        )
    dtype = _one_of(config, "shard_dtype", tuple(_PRECISIONS))
    precision = _PRECISIONS[dtype]._replace(moments_bytes=run.precision.moments_bytes)
    if run.adapter is not None:
        said, precision = "the frozen base and the adapters in bf16", run.precision
    elif dtype == "float32":
        said = "shards of weights, gradients and states in fp32; shard_dtype=bfloat16 for bf16 weights and gradients"
    else:
        said = "shards of weights and gradients in bf16, with fp32 masters and moments"
    if run.matrices is not None:
        said += "; each matrix is whole on one GPU for its update, to which the others send their shards"
    return run._replace(
        precision=precision,
        widens_gradients=precision.weight_bytes < 4,
        shards_optimizer=True,
        weight_shards=run.layout.gpus,
        gradient_shards=run.layout.gpus,
        spread=Spread(),
        exchange=Exchange(
            gathered_forward=Spread().gathered_bytes,
            gathered_backward=Spread().gathered_bytes,
            reduced=Spread().reduced_bytes,
        ),
        assumptions=(
            *(_EAGER if each == BF16_EAGER else each for each in run.assumptions),
            Assumption(
                f"FSDP2 over {run.layout.gpus} GPUs: {said}; computed in bf16, gradients reduced in fp32; each block, "
                "the embedding and the head are sharded as modules of their own, a tied table with the rest of the "
                "model"
            ),
        ),
    )


def check_alone(config: Config) -> None:
    """Raise `UnusableInput` for settings that only several GPUs have."""
    for key in ("sharding", "shard_dtype"):
        if config.value(key) is not None:
            raise UnusableInput(
                f"{key}={config.value(key)} on one GPU",
                expected="several GPUs to spread the model over",
                attempt="--gpus 2",
            )


def _one_of(config: Config, key: str, choices: tuple[str, ...]) -> str:
    """Return the value of `key`, the first of `choices` where it is not set."""
    written = fields.text(config, key)
    if written is not None and written not in choices:
        raise UnusableInput(
            f"{key}={written}", expected=f"one of {', '.join(choices)}", attempt=f"{key}={choices[0]}"
        )
    return written or choices[0]


def launch(run: TrainingRun) -> str:
    """Return the lines that launch a loop and shard its `model`, or launch one with a replicated model."""
    here = run.layout.ranks_on_node
    nodes = -(-run.layout.gpus // here)
    across = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500 " if nodes > 1 else ""
    command = f"torchrun {across}--nproc-per-node {here} train.py"
    if not run.is_fully_sharded:
        return f"{command}\nmodel = DistributedDataParallel(model, gradient_as_bucket_view=True)"
    apart = "*blocks, model" if run.shape.tied_embeddings else "*blocks, embedding, head, model"
    wide = "fp32" if run.precision.weight_bytes >= 4 else "bf16"
    policy = "mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)"
    return f"{command}\nfor module in ({apart}): fully_shard(module, {policy})  # {wide} weights"
