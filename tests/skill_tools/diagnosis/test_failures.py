# SPDX-License-Identifier: Apache-2.0
"""Of all exceptions in a log, the one that ended the run: by rank, in order, through every launcher's prefixes."""

import pytest

from skill_tools.diagnosis.failures import Failure, ended_by, failures
from skill_tools.diagnosis.log import Log
from skill_tools.diagnosis.phases import Phase, phase_of

STEP = "iteration {}/ 100 | elapsed time per iteration (ms): 500.0 | lm loss: 2.0E+00 |"


def raised(error: str, *, rank: str = "", path: str = "/a/b.py", function: str = "f") -> str:
    lines = [
        "Traceback (most recent call last):",
        f'  File "{path}", line 3, in {function}',
        "    g()",
        error,
    ]
    return "".join(f"{rank}{line}\n" for line in lines)


def ending(text: str) -> Failure | None:
    log = Log("train.log", text)
    return ended_by(log, failures(log))


@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "[rank3]: ",
        "[default2]:",
        "(WorkerDict pid=77) ",
        "(TaskRunner pid=901, ip=10.0.0.1) ",
        "(vLLMHttpServer pid=77) (EngineCore_DP0 pid=901) ",
        "(EngineCore_DP0 pid=901) ERROR 08-22 12:00:01 [core.py:700] ",
        "trainer-1  | ",
        "[1,3]<stderr>:",
        "24: [rank24]: ",
        "node-1: [rank3]: ",
        "2026-01-02T03:04:05.678Z stderr F ",
        "2026-01-02T03:04:05.678Z ",
    ],
)
def test_what_stands_in_front_of_a_line_is_no_part_of_it(prefix: str) -> None:
    found = ending(raised("ValueError: no", rank=prefix))
    assert found is not None
    assert (found.error, found.text) == ("ValueError", "ValueError: no")
    assert [(frame.path, frame.line, frame.function) for frame in found.frames] == [("/a/b.py", 3, "f")]


def test_an_exception_of_zeromq_is_one() -> None:
    found = ending(raised("zmq.error.Again: Resource temporarily unavailable"))
    assert found is not None
    assert found.text == "zmq.error.Again: Resource temporarily unavailable"


def test_interleaved_ranks_keep_their_own_frames() -> None:
    one = raised("ValueError: one", rank="[rank0]: ", function="one").splitlines()
    two = raised("KeyError: two", rank="[rank1]: ", function="two").splitlines()
    mixed = "\n".join(line for pair in zip(one, two, strict=True) for line in pair)
    found = failures(Log("train.log", mixed))
    assert [(each.rank, each.frames[0].function) for each in found] == [("rank0", "one"), ("rank1", "two")]


def test_of_several_ranks_the_first_to_fail_counts() -> None:
    found = ending(
        raised("ValueError: first", rank="[rank5]: ") + raised("KeyError: later", rank="[rank0]: ")
    )
    assert found is not None
    assert found.rank == "rank5"


def test_of_one_rank_the_last_exception_counts() -> None:
    found = ending(raised("ImportError: optional") + "using the slow path\n" + raised("ValueError: end"))
    assert found is not None
    assert found.text == "ValueError: end"


def test_a_line_below_a_heading_of_the_users_own_is_of_what_was_tried_afterwards() -> None:
    found = ending(
        f"{raised('AssertionError: first')}# printing a tensor afterwards:\nRuntimeError: second\n"
    )
    assert found is not None
    assert found.text == "AssertionError: first"


def test_an_exception_after_which_training_went_on_ended_nothing() -> None:
    assert ending(raised("ValueError: caught") + STEP.format(7)) is None
    assert ending(STEP.format(7) + "\n" + raised("ValueError: end")) is not None


def test_the_step_that_another_rank_was_in_is_no_sign_that_the_failed_one_went_on() -> None:
    failed = raised("ValueError: end", rank="[rank3]: ")
    steps = [f"[rank0]: {STEP.format(number)}\n" for number in range(5)]
    assert ending("".join([*steps[:2], failed, steps[2]])) is not None
    assert ending("".join([*steps[:2], failed, *steps[2:]])) is None
    assert ending(steps[0] + failed + f"[rank3]: {STEP.format(1)}\n") is None


@pytest.mark.parametrize(
    "aftermath",
    [
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: train.py FAILED",
        "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 0.",
        "RuntimeError: [../third_party/gloo/pair.cc:534] Connection closed by peer [10.0.0.3]:5301",
        "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
    ],
)
def test_what_others_raise_of_it_is_its_aftermath(aftermath: str) -> None:
    text = (
        raised(aftermath, rank="[rank0]: ") + raised("KeyError: cause", rank="[rank1]: ") + raised(aftermath)
    )
    found = ending(text)
    assert found is not None
    assert found.text == "KeyError: cause"


def test_what_a_destructor_raises_is_ignored() -> None:
    text = (
        raised("ValueError: end")
        + "Exception ignored in: <function A.__del__ at 0x7f>\n"
        + raised("AttributeError: 'A' object has no attribute 'b'")
    )
    found = ending(text)
    assert found is not None
    assert found.text == "ValueError: end"


def test_the_text_of_an_exception_ends_at_what_a_destructor_raises() -> None:
    found = ending(raised("ImportError: a.so") + "Exception ignored in: <A.__del__>\nAttributeError: gone\n")
    assert found is not None
    assert found.end == len(raised("ImportError: a.so"))


def test_a_list_of_errors_is_told_with_its_first() -> None:
    text = raised(
        "pydantic_core.ValidationError: 1 validation error for Cfg\nadapter\n  Value error, no adapter"
    )
    found = ending(f"{text}other\n")
    assert found is not None
    assert found.text.endswith("1 validation error for Cfg: adapter: Value error, no adapter")


def test_a_chain_is_one_failure_with_its_first_cause_inside() -> None:
    chain = "\nThe above exception was the direct cause of the following exception:\n\n"
    text = raised("OSError: first") + chain + raised("RuntimeError: last")
    (found,) = failures(Log("train.log", text))
    assert found.text == "RuntimeError: last"
    assert found.start == 0


@pytest.mark.parametrize(
    "line",
    [
        "Segmentation fault (core dumped)",
        "Bus error (core dumped)",
        "python: a.cpp:3: f(): Assertion `n > 0' failed.",
    ],
)
def test_a_native_crash_ends_a_run_too(line: str) -> None:
    assert ending(f"training\n{line}\n") is not None


def test_notebooks_write_frames_in_their_own_form() -> None:
    text = "File ~/env/torch/nn/modules/module.py:1736, in Module._call_impl(self)\nValueError: no\n"
    found = ending(text)
    assert found is not None
    assert found.frames[-1].path == "~/env/torch/nn/modules/module.py"


@pytest.mark.parametrize(
    ("before", "function", "phase"),
    [
        ("", "build_model", Phase.STARTUP),
        ("", "backward", Phase.FIRST_STEP),
        ("", "_init_group", Phase.FIRST_UPDATE),
        (STEP.format(3) + "\n", "forward", Phase.LATER),
        ("SUCCESS Step 3 |  12.3s | Loss 0.1234 | Entropy 0.3\n", "forward", Phase.LATER),
        (f"{'=' * 25} Step 1/100 {'=' * 25}\n", "forward", Phase.FIRST_STEP),
        (f"{'=' * 25} Step 2/100 {'=' * 25}\n", "forward", Phase.LATER),
        ("Epoch 1/10 Step 3/93 Train step 3/930 done.\n", "forward", Phase.LATER),
        ("pipeline step 3 finished\n", "forward", Phase.LATER),
        ("step 16  GPU 31.2 GB  host 12.0 GB\n", "forward", Phase.LATER),
        ("step 1  GPU 31.2 GB  host 12.0 GB\n", "build_model", Phase.STARTUP),
        ("step 2  weights loaded, GPU 31.2 GB\n", "build_model", Phase.STARTUP),
        (STEP.format(3) + "\n", "save_checkpoint", Phase.SAVE),
        (STEP.format(3) + "\nsaving checkpoint at iteration 3\n", "gather", Phase.SAVE),
        ("", "load_checkpoint", Phase.RESUME),
        ("", "load_optimizer_state", Phase.RESUME),
        (STEP.format(3) + "\n", "load_optimizer", Phase.LATER),
        (STEP.format(3) + "\n", "load_fsdp_model_to_gpu", Phase.LATER),
        ("loading distributed checkpoint from out\n", "read", Phase.RESUME),
        ("Loading checkpoint shards: 100%\n", "build_model", Phase.STARTUP),
    ],
)
def test_the_phase_is_where_it_was_raised(before: str, function: str, phase: Phase) -> None:
    log = Log("train.log", before + raised("ValueError: no", function=function))
    assert phase_of(log, ended_by(log, failures(log))) is phase


def test_what_another_rank_raises_behind_it_is_not_its_text() -> None:
    text = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/a/n.py", line 4, in g
[rank1]: ValueError: rank one is first
[rank0]: torch.distributed.DistBackendError: NCCL communicator was aborted on rank 0
"""
    first = ended_by(Log("log", text), failures(Log("log", text)))
    assert first is not None
    assert text[first.start : first.end].endswith("rank one is first\n")


@pytest.mark.parametrize(
    ("lines", "frame"),
    [
        (
            "RuntimeError                              Traceback (most recent call last)\n"
            "/tmp/ipython-input-2.py in <cell line: 0>()\n----> 1 trainer.train()\n\n12 frames\n"
            "/usr/lib/python3/dist-packages/unsloth_zoo/gradient_checkpointing.py in forward(ctx, *args)\n"
            "--> 440             x.copy_(arg)\n\n",
            ("/usr/lib/python3/dist-packages/unsloth_zoo/gradient_checkpointing.py", 440, "forward"),
        ),
        (
            "╭───── Traceback (most recent call last) ─────╮\n│ /home/u/train.py:88 in <module>    │\n"
            "│ /e/site-packages/deepspeed/ops/adam/cpu_adam.py:95 in step   │\n│ ❱ 95 │   self.x()  │\n╰────╯\n",
            ("/e/site-packages/deepspeed/ops/adam/cpu_adam.py", 95, "step"),
        ),
    ],
)
def test_frames_of_colab_and_of_rich_are_read(lines: str, frame: tuple[str, int, str]) -> None:
    (found,) = failures(Log("cell.log", f"{lines}RuntimeError: it failed\n"))
    assert found.frames[-1] == frame
    assert found.text == "RuntimeError: it failed"
