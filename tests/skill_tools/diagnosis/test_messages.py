# SPDX-License-Identifier: Apache-2.0
"""The known messages: data with a source each, and each found in the line that somebody posted."""

import pytest
from for_each import for_each
from schemas import assert_follows

from skill_tools import knowledge
from skill_tools.diagnosis import failures, messages, texts
from skill_tools.diagnosis.diagnosis import advice, diagnose, host_need
from skill_tools.diagnosis.log import Log
from skill_tools.rules.knowledge import load_rules

FILE = knowledge.load_messages()
LEAST = 60
KINDS = {
    "gpu-memory": 5, "pinned-memory": 1, "locked-memory": 1, "host-memory": 5, "shared-memory": 1, "killed": 4,
    "collectives": 1, "hang": 3, "numerics": 3, "resume": 8, "build": 5, "slow": 2,
    "devices": 1, "offload": 1, "crash": 3,
}  # fmt: skip


def log(text: str) -> Log:
    return Log("train.log", text)


def ended_by(text: str) -> failures.Failure | None:
    return failures.ended_by(log(text), failures.failures(log(text)))


def test_the_file_is_what_its_schema_says() -> None:
    assert_follows(FILE, "messages")
    assert len({entry["id"] for entry in FILE}) == len(FILE)


def test_there_are_sixty_messages_of_every_kind() -> None:
    assert len(FILE) >= LEAST
    for kind, least in KINDS.items():
        assert sum(entry["kind"] == kind for entry in FILE) >= least, kind
    assert set(messages.ORDER) == set(KINDS)


@for_each(FILE, lambda entry: entry["id"])
def test_each_is_found_in_its_example_and_says_what_to_change(entry: dict[str, str]) -> None:
    """A notice that needs a mechanism, and chatter, are no answer by themselves."""
    text = f"some line\n{entry['example']}\nanother\n"
    seen = {each.message.id: each for each in messages.find(log(text), ended_by(text))}
    assert entry["id"] in seen
    assert seen[entry["id"]].line >= 2
    conclusion = diagnose(log(text)).conclusion
    if entry["role"] in messages.ANSWERS or (entry["role"] == "notice" and not entry.get("needs")):
        assert conclusion is not None
        assert conclusion.is_known
        own = [each for each in conclusion.change if not each.startswith("or a newer ")]
        assert 1 <= len(own) <= 2
    else:
        assert conclusion is None


def test_the_rules_that_they_name_exist() -> None:
    ids = {rule.id for rule in load_rules()}
    for message in messages.load_messages():
        assert {*message.explained_by, *filter(None, [message.rule])} <= ids, message.id


def test_what_causes_the_others_comes_first() -> None:
    text = "\n".join(entry["example"] for entry in FILE if entry["kind"] in ("hang", "build"))
    assert messages.find(log(text))[0].message.kind == "build"


def test_a_bar_that_loads_is_no_step() -> None:
    loading = "Loading checkpoint shards: 100%|##########| 4/4 [00:31<00:00,  7.91s/it]"
    text = f"{loading}\n  5%|5| 3/60 [00:03<01:00, 1.10s/it]"
    assert diagnose(log(text)).steps == (1.1,)


def test_the_machine_is_read_from_the_log() -> None:
    text = "NVIDIA GeForce RTX 4090 24GB\nCPU Virtual Memory:  used = 187.4 GB, percent = 74.6%\n"
    found = diagnose(log(text), known_gpu={"GeForce RTX 4090": "rtx4090"}.get)
    assert found.gpu == "rtx4090"
    assert found.host_bytes is not None
    assert round(found.host_bytes / 2**30) == 251


@pytest.mark.parametrize(
    ("line", "gib"),
    [
        ("srun --nodes 1 --gpus 8 --mem 480G deepspeed train.py", 480),
        ("#SBATCH --mem=65536", 64),
        ("docker run --gpus all -m 96g image", 96),
        ("memory: usage 503316480kB, limit 503316480kB, failcnt 91823", 480),
        ("srun --mem 480G x\nmemory: usage 67108864kB, limit 67108864kB, failcnt 1", 64),
        ("srun --mem=0 x\nmemory: usage 1kB, limit 9007199254740988kB", None),
        ("python train.py --mem 480G", None),
    ],
)
def test_what_a_job_may_take_of_its_host_comes_before_what_the_host_has(line: str, gib: int | None) -> None:
    ray = "the memory on the node where the task was running was 95.1GB / 100.0GB"
    found = diagnose(log(f"{line}\n{ray}\n"))
    assert found.host_bytes == (gib or 100) << 30


@pytest.mark.parametrize(
    ("line", "total", "trained"),
    [
        ("model: 32,763,876,352 parameters, world size 8", 32763876352, 32763876352),
        (
            "trainable params: 83,886,080 || all params: 8,114,147,328 || trainable%: 1.0",
            8114147328,
            83886080,
        ),
        ("  Number of trainable parameters = 8,030,261,248", 8030261248, 8030261248),
        ("finished initializing model - num_params = 291, num_elems = 8.03B", 8030000000, 8030000000),
        (" > number of parameters on (tensor, pipeline) model parallel rank (0, 0): 1025048576", None, None),
        ("FullyShardedDataParallel(\n  Number of trainable parameters = 1,003,782,656", None, None),
    ],
)
def test_the_parameters_of_the_whole_model_are_read(line: str, total: int, trained: int) -> None:
    found = diagnose(log(line)).parameters
    assert (found and (found.total, found.trained)) == (total and (total, trained))


KILLED = """\
srun --mem 120G deepspeed train.py
finished initializing model - num_params = 291, num_elems = 8.03B
python invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0
exits with return code = -9
slurmstepd: error: Detected 1 oom_kill event in StepId=88123.0. Some of the step tasks have been OOM Killed.
"""


def test_a_killed_run_is_told_by_whose_limit_and_by_its_sizes() -> None:
    found = diagnose(log(KILLED), known_model={8_030_000_000: "llama-3-8b"}.get)
    assert found.conclusion is not None
    assert found.conclusion.cause == "Slurm's memory limit of the job was reached"
    need = host_need(found)
    assert "119.7 GiB in host memory for 8.0e9 trained parameters (line 2)" in need
    assert need.endswith("the log gives a node 120.0 GiB")
    assert host_need(diagnose(log(KILLED.replace("120G", "64G")))).endswith(
        "too little, if it is on one node"
    )
    (command,) = advice(found)
    assert command.startswith("offload plan FILE --model llama-3-8b --gpu NAME --host-memory 120.0GiB;")


ADAM = """\
  File "/venv/site-packages/torch/optim/adam.py", line 239, in step
    has_complex = self._init_group(
  File "/venv/site-packages/torch/optim/adam.py", line 182, in _init_group
    state["exp_avg_sq"] = torch.zeros_like(
"""
FULL = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 224.00 MiB. GPU 0 has a total capacity of 23.70 GiB "
    "of which 45.75 MiB is free. 20.00 GiB is allocated by PyTorch, and 2.30 GiB is reserved by PyTorch but "
    "unallocated."
)


@pytest.mark.parametrize(
    "frames", [ADAM, ADAM.replace("/", "\\"), "".join(f"[rank0]: {line}\n" for line in ADAM.splitlines())]
)
def test_adams_states_are_named_where_they_found_no_room(frames: str) -> None:
    """A gap that would have held this tensor is not the cause: the states of the other parameters come after it."""
    found = diagnose(log(frames + FULL))
    assert found.conclusion is not None
    assert found.conclusion.cause.startswith("the GPU had no room for the optimizer's states")


def test_a_step_that_ran_out_later_did_not_allocate_states() -> None:
    frames = ADAM.partition("  File")[2].replace("_init_group", "_multi_tensor_adam")
    found = diagnose(log(frames + FULL))
    assert found.conclusion is not None
    assert found.conclusion.cause.startswith("fragmentation")


def test_a_gap_that_is_little_of_the_gpu_is_no_cause() -> None:
    """As somebody met it with nanoGPT: 0.25 of 23.68 GiB unused holds 100 MiB, and the step asks for more than that."""
    found = diagnose(
        log(
            "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 100.00 MiB (GPU 0; 23.68 GiB total "
            "capacity; 21.67 GiB already allocated; 85.06 MiB free; 21.92 GiB reserved in total by PyTorch)"
        )
    )
    assert found.conclusion is not None
    assert found.conclusion.cause == "the GPU had no room for one more tensor"


MOVED = """Traceback (most recent call last):
  File "/home/me/train.py", line 41, in <module>
    model = model.to("cuda")
  File "/venv/torch/nn/modules/module.py", line 1341, in convert
    return t.to(
torch.AcceleratorError: CUDA error: out of memory
"""


@pytest.mark.parametrize(
    ("before", "pins"),
    [
        ("", False),
        ("TrainingArguments(\ndataloader_pin_memory=True,\n", False),
        ("could not page-lock the base (17.2 GB): falling back to pageable memory\n", True),
        ("Adam Optimizer #0 is created with AVX512 arithmetic capability.\n", True),
    ],
)
def test_who_pins_nothing_is_told_no_limit_of_pinned_memory(before: str, pins: bool) -> None:
    """The same text comes of a run that moves its model to a card filled by another process."""
    found = diagnose(log(before + MOVED))
    assert found.conclusion is not None
    assert ("pinned host memory" in found.conclusion.cause) is pins
    assert ("nvidia-smi" in found.conclusion.change[0]) is not pins


SHARED = "RuntimeError: No backend type associated with device type cpu"


@pytest.mark.parametrize(
    ("path", "framework", "rule"),
    [
        ("transformers/trainer.py", "", "hf-fsdp2-offload-clip"),
        ("/venv/axolotl/train.py\n transformers/trainer.py", "", "ax-fsdp2-offload-clip"),
        ("transformers/trainer.py", "torchtune", "tt-offload-clip-old"),
    ],
)
def test_of_rules_with_one_text_the_one_of_the_runs_framework_is_named(
    path: str, framework: str, rule: str
) -> None:
    found = diagnose(log(f'  File "{path}", line 1\n{SHARED}\n'), framework=framework)
    assert [each.id for each in found.errors[0].rules] == [rule]
    assert found.conclusion is not None
    assert found.conclusion.rule == rule


@pytest.mark.parametrize("number", ["9" * 5000, "1.2.3", "."])
def test_numbers_that_are_none_are_left_out(number: str) -> None:
    text = (
        f"iteration 5 | elapsed time per iteration (ms): {number} | memory (MB) | allocated: {number} | "
        f"max allocated: {number}\nCUDA out of memory. Tried to allocate {number} GiB\n"
        f"CPU Virtual Memory:  used = {number} GB, percent = {number}%\n"
    )
    assert diagnose(log(text)).conclusion is not None


def test_the_line_that_every_cpu_adam_prints_is_no_fault() -> None:
    """The text of a message begins with it: in YAML a bare ` #` would end the value there."""
    seen = messages.find(log("Adam Optimizer #0 is created with AVX512 arithmetic capability."))
    assert [(each.message.role, each.message.shows) for each in seen] == [("chatter", "optimizer-offload")]


def test_of_two_texts_in_one_line_the_longer_is_the_cause() -> None:
    """A text with a hole fits more lines than one without."""
    line = "NotImplementedError: offload_to_cpu=True and NO_SHARD is not supported yet"
    found = diagnose(
        Log("train.log", f'Traceback (most recent call last):\n  File "/a.py", line 1, in f\n{line}\n')
    )
    assert found.conclusion is not None
    assert "NO_SHARD" in found.conclusion.cause


def test_a_text_of_which_a_piece_is_nowhere_is_looked_for_no_further() -> None:
    """Its first piece may be in every line."""

    class Counted(str):
        finds = 0

        def find(self, *args: object) -> int:
            Counted.finds += 1
            return super().find(*args)  # type: ignore[arg-type]

    assert texts.span(Counted("a line\n" * 1000), "a{..}zz") == (-1, -1)
    assert Counted.finds < 5


def test_of_two_texts_of_one_exception_the_longer_counts_though_the_other_begins_in_a_source_line() -> None:
    """A text with a hole begins in the line of source above, and reaches into the exception's words."""
    raised = (
        'Traceback (most recent call last):\n  File "/w/sync.py", line 9, in collect\n'
        "    with FSDP.summon_full_params(module, offload_to_cpu=True):\n"
        '  File "/e/torch/distributed/fsdp/_unshard_param_utils.py", line 139, in _validate_unshard_params_args\n'
        "NotImplementedError: offload_to_cpu=True and NO_SHARD is not supported yet\n"
    )
    conclusion = diagnose(log(raised)).conclusion
    assert conclusion is not None
    assert "NO_SHARD" in conclusion.cause


@pytest.mark.parametrize(("line", "kind"), [("MemoryError", "host-memory"), ("Killed", "killed")])
def test_one_word_is_found_where_it_stands_alone(line: str, kind: str) -> None:
    def kinds(text: str) -> set[str]:
        return {each.message.kind for each in messages.find(log(text), ended_by(text))}

    assert kind in kinds(f"step 3\n{line}\n")
    assert kind not in kinds(f"torch.OutOf{line}: 2 GiB\nPre{line} none\n")


def test_an_exception_of_an_own_name_is_one_behind_its_frames() -> None:
    text = 'Traceback (most recent call last):\n  File "/e/a.py", line 3, in f\ntorch._dynamo.exc.Unsupported: no\n'
    found = ended_by(text)
    assert found is not None
    assert found.error == "torch._dynamo.exc.Unsupported"


NPU = (
    "RuntimeError: NPU out of memory. Tried to allocate 5.03 GiB (NPU 3; 60.96 GiB total capacity; 49.47 GiB already "
    "allocated; 49.47 GiB current active; 1.32 GiB free; 57.55 GiB reserved in total by PyTorch) If reserved memory is "
    ">> allocated memory try setting max_split_size_mb to avoid fragmentation.\n"
)  # https://github.com/xingchensong/TouchNet/issues/100
XPU = (
    "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 4.66 GiB. GPU 0 has a total capacity of 5.65 GiB of "
    "which 0.65 GiB is free. Of the allocated memory 195.50 KiB is allocated by PyTorch, and 1.81 MiB is reserved by "
    "PyTorch but unallocated. Please use `empty_cache` to release all unoccupied cached memory.\n"
)  # https://github.com/intel/torch-xpu-ops/issues/3011, with less of it free
TPU = (
    "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in "
    "memory space hbm. Used 21.90G of 7.48G hbm. Exceeded hbm capacity by 14.42G.\n"
)  # https://github.com/erfanzar/EasyDeL/issues/78


@pytest.mark.parametrize(
    ("text", "device", "cause", "change"),
    [
        (NPU, "NPU", "fragmentation: 8.1 GiB", "export PYTORCH_NPU_ALLOC_CONF=expandable_segments:True"),
        (NPU.replace("57.55", "49.50"), "NPU", "the device had no room", "half the micro-batch"),
        (XPU, "XPU", "the device had no room", "half the micro-batch"),
        (XPU.replace("1.81 MiB", "4.81 GiB"), "XPU", "fragmentation: 4.8 GiB", "half the micro-batch"),
        (XPU.replace("XPU", "HIP"), "HIP", "the device had no room", "half the micro-batch"),
        (TPU, None, "the device had no room for a buffer", "a smaller batch a device"),
    ],
)
def test_memory_runs_out_on_any_device(text: str, device: str | None, cause: str, change: str) -> None:
    found = diagnose(log(text))
    assert (found.out_of_memory.device if found.out_of_memory else None) == device
    assert found.conclusion is not None
    assert found.conclusion.cause.startswith(cause)
    assert found.conclusion.change[0].startswith(change)
