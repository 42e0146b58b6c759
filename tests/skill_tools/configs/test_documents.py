# SPDX-License-Identifier: Apache-2.0
"""A script's here-documents are read as files if its command names them, and nothing is executed."""

from pathlib import Path

import pytest

from skill_tools.configs.source import Source
from skill_tools.dialects.read import readings

JSON = '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}\n'
TRAIN = "torchrun train.py --deepspeed ds.json --per_device_train_batch_size 1 --bf16 true\n"
WRITES = [
    f"cat > ds.json <<EOF\n{JSON}EOF\n",
    f"cat <<EOF > ds.json\n{JSON}EOF\n",
    f"cat << 'EOF' >ds.json\n{JSON}EOF\n",
    f'cat >"ds.json" <<"EOT"\n{JSON}EOT\n',
    f"cat <<-EOF > ./ds.json\n\t{JSON}\tEOF\n",
    f"tee ds.json <<EOF\n{JSON}EOF\n",
    f"cat <<EOF | tee ds.json > /dev/null\n{JSON}EOF\n".replace(" > /dev/null", ""),
    f"FILE=ds.json\ncat > $FILE <<EOF\n{JSON}EOF\n",
    f"STAGE=2\ncat > ds.json <<EOF\n{JSON.replace('2', '$STAGE')}EOF\n",
    f"if true; then\n  cat > ds.json <<EOF\n{JSON}EOF\nfi\n",
]


@pytest.mark.parametrize("writes", WRITES)
def test_a_file_that_the_script_writes_is_read(writes: str, tmp_path: Path) -> None:
    (found,) = readings([Source("run.sh", writes + TRAIN, tmp_path)])
    config = found.compose()
    setting = config.settings["deepspeed.zero_optimization.stage"]
    assert setting.value == 2
    assert setting.place.file.endswith("ds.json (in run.sh)")
    assert setting.place.line == writes[: writes.index('{"zero')].count("\n") + 1
    assert list(tmp_path.iterdir()) == []


def test_what_the_script_is_given_is_unknown(tmp_path: Path) -> None:
    text = f"cat > ds.json <<EOF\n{JSON.replace('2', '$STAGE')}EOF\n{TRAIN}"
    (found,) = readings([Source("run.sh", text, tmp_path)])
    assert "deepspeed.zero_optimization.stage" in found.compose().unresolved


def test_the_script_s_own_file_wins_over_one_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(JSON.replace("2", "3"), encoding="utf-8")
    for writes, stage in ((WRITES[0], 2), ("python3 - <<EOF\nopen('ds.json')\nEOF\n", 3)):
        (found,) = readings([Source("run.sh", writes + TRAIN, tmp_path)])
        assert found.compose().value("deepspeed.zero_optimization.stage") == stage
