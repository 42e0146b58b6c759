"""The known messages: data with a source each, and each found in the line that somebody posted."""

import json

import jsonschema
import pytest
import yaml

from skill_tools.bundle import knowledge_path, schema_path
from skill_tools.diagnosis import messages
from skill_tools.diagnosis.diagnosis import diagnose
from skill_tools.diagnosis.log import Log
from skill_tools.rules.knowledge import load_rules

FILE = yaml.safe_load(knowledge_path("messages.yaml").read_text(encoding="utf-8"))
LEAST = 60
KINDS = {
    "gpu-memory": 5, "pinned-memory": 1, "locked-memory": 1, "host-memory": 5, "shared-memory": 1, "collectives": 1,
    "hang": 3, "numerics": 3, "resume": 8, "build": 5, "slow": 2,
}  # fmt: skip


def log(text: str) -> Log:
    return Log("train.log", text, len(text), 0)


def test_the_file_is_what_its_schema_says() -> None:
    jsonschema.validate(FILE, json.loads(schema_path("messages").read_text(encoding="utf-8")))
    assert len({entry["id"] for entry in FILE}) == len(FILE)


def test_there_are_sixty_messages_of_every_kind() -> None:
    assert len(FILE) >= LEAST
    for kind, least in KINDS.items():
        assert sum(entry["kind"] == kind for entry in FILE) >= least, kind
    assert set(messages.ORDER) == set(KINDS)


@pytest.mark.parametrize("entry", FILE, ids=lambda entry: str(entry["id"]))
def test_each_is_found_in_its_example_and_says_what_to_change(entry: dict[str, str]) -> None:
    found = diagnose(log(f"some line\n{entry['example']}\nanother\n"))
    seen = {each.message.id: each for each in found.messages}
    assert entry["id"] in seen
    assert seen[entry["id"]].line >= 2
    assert found.conclusion is not None
    assert 1 <= len(found.conclusion.change) <= 2


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


@pytest.mark.parametrize("number", ["9" * 5000, "1.2.3", "."])
def test_numbers_that_are_none_are_left_out(number: str) -> None:
    text = (
        f"iteration 5 | elapsed time per iteration (ms): {number} | memory (MB) | allocated: {number} | "
        f"max allocated: {number}\nCUDA out of memory. Tried to allocate {number} GiB\n"
        f"CPU Virtual Memory:  used = {number} GB, percent = {number}%\n"
    )
    assert diagnose(log(text)).conclusion is not None
