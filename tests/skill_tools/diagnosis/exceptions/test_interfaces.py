# SPDX-License-Identifier: Apache-2.0
"""A call that does not fit is told by caller, callee and arguments: frames, the line of source, and the run's own
files."""

from collections.abc import Mapping

from skill_tools.diagnosis.diagnosis import diagnose
from skill_tools.diagnosis.evidence import Conclusion
from skill_tools.diagnosis.failures import ended_by, failures, source_line
from skill_tools.diagnosis.log import Log

FLAG = """Traceback (most recent call last):
  File "/e/site-packages/mine/wrap.py", line 40, in offloaded
    return Saved.apply(function, *args)
  File "/e/site-packages/torch/autograd/function.py", line 581, in apply
    return super().apply(*args, **kwargs)
  File "/e/site-packages/mine/wrap.py", line 71, in forward
    if keep_state:
       ^^^^^^^^^^
RuntimeError: Boolean value of Tensor with more than one value is ambiguous
"""
ASSERTS = """[rank0]: Traceback (most recent call last):
[rank0]:   File "/e/site-packages/peft/utils/other.py", line 137, in prepare
[rank0]:     model.enable(**options)
[rank0]:   File "/srv/patch.py", line 63, in new_enable
[rank0]:     assert checkpoint_options == None
[rank0]: AssertionError
"""
HANDED_ON = """Traceback (most recent call last):
  File "/e/site-packages/mine/wrapper.py", line 164, in forward
    ret = function(*args, **kwargs)
TypeError: Block.forward() got an unexpected keyword argument 'keep_on_host'
"""


def concluded(log: str, files: Mapping[str, str] | None = None) -> Conclusion:
    found = diagnose(Log("train.log", log), unread=files or {}).conclusion
    assert found is not None
    return found


def test_a_flag_that_is_a_tensor_names_the_flag_and_the_caller() -> None:
    found = concluded(FLAG)
    assert "in the place of keep_state, which forward (wrap.py:71) takes for a flag" in found.cause
    assert "its caller offloaded (wrap.py:40)" in found.cause
    assert found.change[0].startswith("a newer mine")
    assert not concluded(FLAG.replace("if keep_state:", "if (keep_state > 0):")).is_known


def test_an_assertion_without_words_says_what_it_asks_and_who_called() -> None:
    found = concluded(ASSERTS)
    assert "takes only calls for which checkpoint_options == None, and prepare (other.py:137)" in found.cause
    assert "called without checkpoint_options" in found.change[0]
    assert not concluded(ASSERTS.replace("AssertionError", "AssertionError: too long")).is_known


def test_an_argument_that_the_run_s_own_file_passes_is_told_with_its_place() -> None:
    found = concluded(HANDED_ON, {"train.py": "import x\nwrap = partial(x.wrap, keep_on_host=False)\n"})
    assert found.cause.startswith("train.py:2 passes keep_on_host")
    assert found.change[0] == "without keep_on_host at train.py:2"
    assert not concluded(HANDED_ON.replace("/e/site-packages/", "/srv/")).is_known


def test_an_object_of_another_kind_is_told_with_who_holds_it() -> None:
    log = (
        'Traceback (most recent call last):\n  File "/e/site-packages/mine/engine.py", line 7, in offload_states\n'
        "AttributeError: 'ParamOffload' object has no attribute 'offload_states'\n"
    )
    found = concluded(log)
    assert "offload_states (engine.py:7) holds a ParamOffload without offload_states" in found.cause
    assert found.change[1] == "or a newer mine"
    assert not concluded(log.replace("ParamOffload", "NoneType")).is_known


def test_the_line_of_source_is_read_past_marks_and_ranks() -> None:
    for text, line in ((FLAG, "if keep_state:"), (ASSERTS, "assert checkpoint_options == None")):
        log = Log("train.log", text)
        failure = ended_by(log, failures(log))
        assert failure is not None
        assert source_line(log, failure) == line
    bare = Log(
        "train.log", 'Traceback (most recent call last):\n  File "/a.py", line 3, in f\nValueError: x\n'
    )
    failure = ended_by(bare, failures(bare))
    assert failure is not None
    assert source_line(bare, failure) == ""


def test_a_script_that_asks_a_library_for_a_part_that_is_gone_was_written_for_another_release() -> None:
    log = """Traceback (most recent call last):
  File "/home/me/train.py", line 9, in <module>
    callback = mine.callbacks.Offload()
AttributeError: module 'mine.callbacks' has no attribute 'Offload'
"""
    found = concluded(log)
    assert "train.py:9 was written for another release of mine" in found.cause
    assert found.change[0].startswith("the release of mine")


def test_a_setting_that_a_library_misses_in_another_s_class_of_settings_is_of_another_release() -> None:
    log = """Traceback (most recent call last):
  File "/e/site-packages/mine/losses.py", line 61, in loss
    if trainer.args.mine_chunks is None:
AttributeError: 'GRPOConfig' object has no attribute 'mine_chunks'
"""
    found = concluded(log)
    assert "loss (losses.py:61) of mine reads mine_chunks of a GRPOConfig" in found.cause
    assert found.change[1] == "or mine imported first in the script"
    assert not concluded(log.replace("/e/site-packages/mine", "/home/me")).is_known


def test_a_library_that_lacks_a_module_of_its_own_is_not_whole() -> None:
    frames = '  File "/e/site-packages/deepspeed/engine.py", line 7, in _configure\n    from deepspeed.new import A\n'
    own = (
        f"Traceback (most recent call last):\n{frames}ModuleNotFoundError: No module named 'deepspeed.new'\n"
    )
    found = diagnose(Log("train.log", own)).conclusion
    assert found is not None
    assert found.is_known
    assert "the installed deepspeed is not whole" in found.cause
    assert found.change[0].startswith("a newer deepspeed")
    other = own.replace("named 'deepspeed.new'", "named 'apex.new'")
    found = diagnose(Log("train.log", other)).conclusion
    assert found is not None
    assert "not whole" not in found.cause
