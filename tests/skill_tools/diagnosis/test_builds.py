# SPDX-License-Identifier: Apache-2.0
"""A build that failed is told by its first error, in whatever language the compiler speaks."""

import pytest
from schemas import assert_follows

from skill_tools import knowledge
from skill_tools.diagnosis import builds
from skill_tools.diagnosis.diagnosis import diagnose
from skill_tools.diagnosis.log import Log

BEGIN = "Building extension module cpu_adam...\nFAILED: cpu_adam.o\n"
END = "ninja: build stopped: subcommand failed.\nRuntimeError: Error building extension 'cpu_adam'\n"


@pytest.mark.parametrize("name", ["builds", "changes", "code"])
def test_the_facts_are_what_their_schemas_say(name: str) -> None:
    assert_follows(knowledge.load_yaml(f"{name}.yaml"), name)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (
            "a.h:9:1: error: inlining failed in call to 'always_inline': target specific option mismatch",
            "-march",
        ),
        # As somebody has shortened it.
        ("avx512fintrin.h: error: inlining failed in call to 'always_inline': target", "-march"),
        ("/t/python_headers.h:12:10: fatal error: Python.h: No such file or directory", "Python's headers"),
        (
            "t.h:12:10: schwerwiegender Fehler: Python.h: Datei oder Verzeichnis nicht gefunden",
            "Python's headers",
        ),
        ("t.h:12:10: 致命错误：Python.h：没有那个文件或目录", "Python's headers"),
        ("t.h:12:10: erreur fatale : Python.h : Aucun fichier ou dossier", "Python's headers"),
        ("/usr/bin/ld: cannot find -lcurand: No such file or directory", "libcurand of the CUDA toolkit"),
        ("/bin/sh: 1: /usr/local/cuda/bin/nvcc: not found", "no nvcc"),
        ("nvcc fatal   : Unsupported gpu architecture 'compute_120'", "does not know compute_120"),
        ("gcc: fatal error: Killed signal terminated program cc1plus", "the host's memory ran out"),
        (
            "h.h:139:2: error: #error -- unsupported GNU version! gcc versions later than 12",
            "so new a compiler",
        ),
        ("a.cpp:1:2: error: #error You need C++17 to compile PyTorch", "too old"),
        ("[rank1]: a.cpp:1:2: error: 'x' was not declared in this scope", "the compiler's first error"),
    ],
)
def test_the_first_error_is_named_with_its_line(error: str, cause: str) -> None:
    text = f"start\n{BEGIN}a.h:1:1: warning: nothing\n{error}\nb.h:7:7: error: a later one\n{END}"
    found = builds.first_error(Log("train.log", text))
    assert found is not None
    assert found.line == 5
    assert cause in found.cause
    conclusion = diagnose(Log("train.log", text)).conclusion
    assert conclusion is not None
    assert cause in conclusion.cause
    assert found.text in conclusion.cause
    assert 1 <= len(conclusion.change) <= 2


def test_an_error_without_a_build_is_no_compiler_s() -> None:
    assert builds.first_error(Log("train.log", "a.py:3:4: error: not of a compiler\n")) is None
