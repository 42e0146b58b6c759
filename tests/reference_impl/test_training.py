# SPDX-License-Identifier: Apache-2.0
"""The old names of `reference_impl.verification` work for one release, and say so."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
CODE = """import sys
import reference_impl
assert "reference_impl.training" not in sys.modules
from reference_impl.training.model import Decoder, DecoderShape, decoder_loss
from reference_impl.training.lora import add_lora
from reference_impl.training.apply import apply_plan
import reference_impl.training.model as old
from reference_impl.verification import model
assert old is model
assert (Decoder, DecoderShape, decoder_loss) == (model.Decoder, model.DecoderShape, model.decoder_loss)
assert add_lora is model.add_lora
assert apply_plan is reference_impl.apply_plan
"""


@pytest.mark.slow
def test_old_imports_give_the_same_objects_and_warn_once_where_they_stand():
    command = [sys.executable, "-W", "default", "-c", CODE]
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert found.returncode == 0, found.stderr
    warning = "<string>:4: DeprecationWarning: reference_impl.training is reference_impl.verification now"
    assert found.stderr.count("DeprecationWarning") == 1, found.stderr
    assert warning in found.stderr
