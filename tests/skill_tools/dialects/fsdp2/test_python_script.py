# SPDX-License-Identifier: Apache-2.0
"""FSDP2 in a plain script: the policy, the backend, and calls beside them."""

import pytest

from skill_tools.configs.config import Config
from skill_tools.dialects.read import read_text
from skill_tools.errors import Unrecognised, UnusableInput
from skill_tools.rules.lint import lint

SCRIPT = """\
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

dist.init_process_group({group})
for layer in model.layers:
    fully_shard(layer, {layer})
fully_shard(model, {model})
optimizer = torch.optim.AdamW(model.parameters())
loss.backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
"""
OFFLOADED = "offload_policy=CPUOffloadPolicy()"


def composed(group: str = '"nccl"', layer: str = OFFLOADED, model: str = OFFLOADED) -> Config:
    return read_text(SCRIPT.format(group=group, layer=layer, model=model), "train.py")


def found(config: Config) -> set[str]:
    return {each.rule for each in lint(config, versions={}).findings}


@pytest.mark.parametrize(
    ("group", "is_found"),
    [
        ('"nccl"', True),
        ('backend="nccl", timeout=t', True),
        ('"cuda:nccl"', True),
        ('"cpu:gloo,cuda:nccl"', False),
        ('"cuda:nccl,cpu:gloo"', False),
        ("backend=args.backend", False),
        ("", False),
    ],
)
def test_clipping_on_the_host_needs_a_backend_there(group: str, is_found: bool) -> None:
    assert ("fs2-offload-clip" in found(composed(group))) is is_found


@pytest.mark.parametrize(
    "policy",
    [
        "offload_policy=CPUOffloadPolicy() if args.offload else OffloadPolicy()",
        "**kwargs",
        "offload_policy=policy",
    ],
)
def test_a_policy_that_is_computed_decides_nothing(policy: str) -> None:
    config = composed(model=policy)
    assert "fsdp2.offload_policy" in config.unresolved
    assert not found(config)


def test_a_policy_in_a_name_is_followed() -> None:
    text = SCRIPT.format(group='"nccl"', layer="offload_policy=policy", model="offload_policy=policy")
    named = read_text(text.replace("for layer", "policy = CPUOffloadPolicy()\nfor layer"), "train.py")
    assert "fs2-offload-clip" in found(named)


@pytest.mark.parametrize(
    "said",
    [
        'os.environ["OMP_NUM_THREADS"] = "8"\n',
        "torch.set_num_threads(8)\n",
    ],
)
def test_a_script_that_sets_threads_is_not_told_of_one(said: str) -> None:
    text = SCRIPT.format(group='"cpu:gloo,cuda:nccl"', layer=OFFLOADED, model=OFFLOADED)
    assert found(read_text(text, "train.py")) == {"fs2-offload-threads"}
    assert not found(read_text(text.replace("for layer", f"{said}for layer"), "train.py"))


def test_our_optimizer_is_refused_beside_the_policy() -> None:
    text = SCRIPT.format(group="", layer=OFFLOADED, model=OFFLOADED)
    ours = text.replace("torch.optim.AdamW", "HybridDeviceOptimizer")
    assert found(read_text(f"from reference_impl import HybridDeviceOptimizer\n{ours}", "train.py")) == {
        "fs2-offload-ours"
    }
    assert "fs2-offload-ours" not in found(
        read_text(f"from mine import HybridDeviceOptimizer\n{ours}", "train.py")
    )


def test_a_script_without_the_policy_is_a_loop_of_its_own() -> None:
    plain = SCRIPT.format(group='"nccl"', layer="", model="").replace("CPUOffloadPolicy, ", "")
    with pytest.raises(Unrecognised, match=r"docs/pytorch-loop\.md"):
        read_text(plain, "train.py")


def test_overrides_are_refused() -> None:
    text = SCRIPT.format(group="", layer=OFFLOADED, model=OFFLOADED)
    with pytest.raises(UnusableInput, match="FSDP2 is read from one Python script"):
        read_text(text, "train.py", overrides=["backend=gloo"])


@pytest.mark.parametrize(
    ("model", "more", "expected"),
    [
        (f"{OFFLOADED}, ignored_params=set(model.head.parameters())", "", True),
        (f"{OFFLOADED}, ignored_params={{model.head.weight}}", "", True),
        (f"{OFFLOADED}, ignored_params=None", "", False),
        (OFFLOADED, "", False),
        (f"{OFFLOADED}, ignored_params=left", "", None),
        (
            f"{OFFLOADED}, ignored_params=set(model.head.parameters())",
            "model.head.requires_grad_(False)",
            None,
        ),
    ],
)
def test_clipping_takes_no_plain_gradients_beside_sharded_ones(
    model: str, more: str, expected: bool | None
) -> None:
    text = SCRIPT.format(group='"cpu:gloo,cuda:nccl"', layer=OFFLOADED, model=model)
    verdict = lint(read_text(f"{text}{more}\n", "train.py"), versions={})
    assert ("fs2-clip-mixed" in {each.rule for each in verdict.findings}) is (expected is True)
    assert ("fs2-clip-mixed" in {each.rule for each in verdict.undecided}) is (expected is None)


@pytest.mark.parametrize(
    ("policy", "pins"), [("CPUOffloadPolicy()", True), ("CPUOffloadPolicy(pin_memory=False)", False)]
)
def test_a_hook_of_gradients_is_seen_beside_what_the_policy_pins(policy: str, pins: bool) -> None:
    text = (
        "from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard\n"
        f"fully_shard(model, offload_policy={policy})\n"
        "for each in model.parameters():\n    each.register_post_accumulate_grad_hook(update)\n"
    )
    config = read_text(text, "train.py")
    assert config.value("fsdp2.grad_hooks") is True
    for release, is_wrong in (("2.12.1", pins), ("2.13.0", False)):
        found = {each.rule for each in lint(config, versions={"torch": release}).findings}
        assert ("fs2-offload-grad-hooks" in found) is is_wrong
