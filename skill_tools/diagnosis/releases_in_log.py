"""The releases that a log states: DeepSpeed's first line, Unsloth's banner, `pip freeze`, and reports of environments.

Apart because no configuration is read for it. Only an exact release counts that the log does not contradict: where it
states two of one distribution, neither does.
"""

import re

from skill_tools.diagnosis.log import Log
from skill_tools.diagnosis.metrics import edges
from skill_tools.rules.versions import canonical_name, is_version

_NAMES = {
    "pytorch": "torch",
    "swift": "ms-swift",
    "llama-factory": "llamafactory",
    "pytorch-lightning": "lightning",
}
_PACKAGES = (
    r"deepspeed|py-?torch|torch|transformers|accelerate|trl|peft|vllm|sglang|axolotl|llama-?factory|ms-swift|swift|verl"
    r"|nemo-rl|megatron[-_]core|transformer[-_]engine|torchtune|torchtitan|torchao|unsloth|unsloth_zoo|diffusers|lightning"
    r"|pytorch-lightning|openrlhf|prime-rl|skyrl|slime"
)
# What stands between a name and its release: the word, a row of dots, two signs of equality, or a colon and all of it.
_BETWEEN = (
    r"(?: info)?:?[ ]{0,3}version(?: \(GPU\?\))?[ .:=]{1,40}|(?: info)? \.{3,40} |==|: ?(?=\d+\.\d+\.\d)"
    r"|[ ](?=\d{4}\.\d+\.\d+:)"
)
_RELEASE = r"\d+\.\d+(?:\.\d+)?(?:\.?(?:post|dev|rc|a|b)\d+)?"
_STATED = re.compile(
    rf"(?<![\w/.-])[`'\"]?(?P<name>{_PACKAGES})[`'\"]?(?:{_BETWEEN})v?(?P<version>{_RELEASE})(?:\+[\w.]+)?"
    r"(?![\w-])(?! (?:or|and) (?:newer|later|above|higher))",
    re.IGNORECASE,
)
_ENGINE = re.compile(r"LLM engine \(v(?P<version>\d+\.\d+\.\d+)")


def releases(log: Log) -> dict[str, str]:
    """Return the release of each distribution that `log` states and does not contradict."""
    found: dict[str, set[str]] = {}
    for match in edges(log.text, _STATED):
        name = match["name"].lower()
        if is_version(match["version"]):
            found.setdefault(canonical_name(_NAMES.get(name, name)), set()).add(match["version"])
    for match in edges(log.text, _ENGINE):
        found.setdefault("vllm", set()).add(match["version"])
    return {name: next(iter(versions)) for name, versions in found.items() if len(versions) == 1}
