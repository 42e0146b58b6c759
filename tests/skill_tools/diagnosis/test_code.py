# SPDX-License-Identifier: Apache-2.0
"""The owner of the failing code, and a deciding experiment if nothing else is known."""

from schemas import assert_follows

from skill_tools import knowledge
from skill_tools.configs.keys import load_keys
from skill_tools.diagnosis import code
from skill_tools.diagnosis.diagnosis import diagnose
from skill_tools.diagnosis.failures import Failure, Frame
from skill_tools.diagnosis.log import Log
from tests.support.for_each import for_each


def failed(*paths: str) -> Failure:
    frames = tuple(Frame(path, line, f"f{line}") for line, path in enumerate(paths, 1))
    return Failure("", 0, 0, 10, "ValueError", "ValueError: x", frames, is_aftermath=False)


def raised(*paths: str) -> str:
    lines = [f'  File "{path}", line {line}, in f{line}' for line, path in enumerate(paths, 1)]
    return "\n".join(
        ["Traceback (most recent call last):", *lines, "ValueError: nothing like this is known", ""]
    )


def test_the_facts_are_what_their_schema_says() -> None:
    assert_follows(knowledge.load_yaml("code.yaml"), "code")
    mechanisms = {key.mechanism for key in load_keys().values()}
    assert {each for entry in code.load_code() for each in entry.mechanisms} <= mechanisms


@for_each(code.load_code(), name=lambda entry: entry.path)
def test_each_code_is_told_by_a_frame_of_its_own(entry: code.Code) -> None:
    """No entry before it takes its frames."""
    where = code.of(failed("/my/train.py", f"/e/site-packages/{entry.path.lstrip('/')}/x.py"))
    assert where is not None
    assert where.code == entry


def test_of_one_code_the_innermost_frame_is_told() -> None:
    where = code.of(failed("/e/axolotl/cli/train.py", "/e/axolotl/loaders/model.py", "/e/json/decoder.py"))
    assert where is not None
    assert where.frame.path == "/e/axolotl/loaders/model.py"
    exact = code.of(
        failed("/e/torch/distributed/fsdp/_fully_shard/_fsdp_param.py", "/e/axolotl/loaders/model.py")
    )
    assert exact is not None
    assert exact.code.name == "torch's FSDP2"


FRAMEWORKS = {
    "vLLM": "/e/vllm/v1/worker/gpu_worker.py",
    "verl": "/e/verl/trainer/ppo/ray_trainer.py",
    "ms-swift": "/e/swift/megatron/trainers/base.py",
    "Unsloth": "/e/unsloth/models/loader.py",
    "Axolotl": "/e/axolotl/cli/train.py",
    "SGLang": "/e/sglang/srt/managers/scheduler.py",
}


@for_each(FRAMEWORKS.items(), name=lambda case: case[0])
def test_an_exception_that_nobody_knows_is_told_by_its_framework(case: tuple[str, str]) -> None:
    found = diagnose(Log("train.log", raised("/my/train.py", case[1]))).conclusion
    assert found is not None
    assert not found.is_known
    assert f"raised through {case[0]}" in found.cause
    assert len(found.change) == 2
