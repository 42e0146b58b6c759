# SPDX-License-Identifier: Apache-2.0
"""A launch script is followed as a shell would, as far as its own text tells."""

import shlex
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skill_tools.configs.shell.command import Command
from skill_tools.configs.shell.launch import program_end
from skill_tools.configs.shell.script import run
from skill_tools.errors import UnusableInput

plain_text = st.text(string.ascii_letters + string.digits + " -_=./:[]{}()<>|&;*?!\"'\\$#~,\t\n", max_size=20)


def last(text: str) -> Command:
    return run(text, name="run.sh")[-2]


def words(text: str) -> list[str]:
    return [word.text for word in last(text).words]


@pytest.mark.parametrize(
    ("folder", "path"),
    [
        ("$(dirname $0)", "."),
        ("`dirname $0`", "."),
        ('"$(dirname "$(realpath "${BASH_SOURCE[0]}")")"', "."),
        ('"$(cd "$(dirname "${BASH_SOURCE[0]}")" >/dev/null 2>&1; pwd -P)"', "."),
        ('"$(cd "$(dirname "$0")/../.." && pwd)"', "./../.."),
        ('"$(dirname "$(dirname "$0")")"', "./.."),
        ("${0%/*}", "."),
        ("$(pwd)", "."),
        ("$PWD", "."),
    ],
)
def test_the_folder_of_the_script_is_known_from_where_it_lies(folder: str, path: str) -> None:
    (_, word), (_, held) = last(f"train {folder}/a").words, last(f"A={folder}\ntrain $A/a").words
    assert (word.text, held.text) == (f"{path}/a", f"{path}/a")
    assert word.resolved
    assert held.resolved


@pytest.mark.parametrize(
    "folder", ["$(dirname $1)", "$(basename $0)", "$(cd /data && pwd)", "$(realpath $0)"]
)
def test_any_other_output_is_not_known(folder: str) -> None:
    assert not last(f"train {folder}/a").words[1].resolved


def test_a_module_that_is_cut_off_ends_the_program() -> None:
    assert program_end(last("torchrun --nproc_per_node 8 -m")) == 4


@given(st.lists(plain_text, min_size=1, max_size=6))
def test_quoted_words_come_back(arguments: list[str]) -> None:
    assert words("train " + " ".join(map(shlex.quote, arguments))) == ["train", *arguments]


@given(st.text(max_size=60))
def test_any_text_ends_in_commands_or_a_refusal(text: str) -> None:
    try:
        commands, refusal = run(text, name="run.sh"), ""
    except UnusableInput as error:
        commands, refusal = [], str(error)
    assert commands or refusal
    assert "\n" not in refusal


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("A=4; train --x $A", ["train", "--x", "4"]),
        ("A='4 5'; train $A \"$A\"", ["train", "4", "5", "4 5"]),
        ('train "${A:-7}" "${B:-8 9}" ${C-}', ["train", "7", "8 9"]),
        ("A=; train ${A:-7}${A-8}", ["train", "7"]),
        ("A=${1:-4}; shift\ntrain $A ${2-8} ${10:-9}", ["train", "4", "8", "9"]),
        ("run() { { :; }; B=$1; }\ntrain ${1:-4}", ["train", "4"]),
        ("A=1; train ${A:+--on} ${B:+--off}", ["train", "--on"]),
        (
            "A=(--x 1)\nA+=(--y '2 3')\ntrain \"${A[@]}\" ${A[0]}",
            ["train", "--x", "1", "--y", "2 3", "${A[0]}"],
        ),
        ("A='--x 1'\nA+=' --y'\ntrain $A", ["train", "--x", "1", "--y"]),
        ('A=()\ntrain "${A[@]}" ${A[@]} "$A" "$@"', ["train", ""]),
        ("train \\\n  --x 1 \\\n  --y # note\n", ["train", "--x", "1", "--y"]),
        ("train --x > log 2>&1 < in", ["train", "--x"]),
        ('cat <<EOF\nnot $A "\nEOF\ntrain --x', ["train", "--x"]),
        ("train $'a' \"b\\\"c\" 'd$e'", ["train", "a", 'b"c', "d$e"]),
        ("run() {\n  train --x\n}\nrun2 () { :; }\n", [":"]),
        ('CMD="train --x"\n$CMD --y', ["train", "--x", "--y"]),
        ("bash -c \"train --x 'a'\"", ["bash", "-c", "train", "--x", "a"]),
    ],
)
def test_words(script: str, expected: list[str]) -> None:
    assert words(script) == expected


def test_a_tilde_is_the_home_folder_where_bash_has_it_so(monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "x=~/a; y='p ~/q'\ntrain $x \"~/b\" ~/c --k=~/d data_dir=~/e a.b=~/f ~\"/g\" $y ${Z:-~/z} '~/i' \\~/j"
    )
    as_bash_prints_them = "/h/a ~/b /h/c --k=~/d data_dir=/h/e a.b=~/f ~/g p ~/q /h/z ~/i ~/j"
    monkeypatch.setenv("HOME", "/h")
    assert words(script)[1:] == as_bash_prints_them.split()
    assert words(f"HOME=/other\n{script}")[1:3] == ["/other/a", "~/b"]


@pytest.mark.parametrize(
    "text",
    [
        "cd x; train --a 1 $O; echo done",
        "cd x && train --a 1 $O && echo done",
        'export P=\\"$O; $O\\"; cd x; train --a 1 $O;',
        "cd x; train --a 1 $O | tee log; exit ",
    ],
)
@pytest.mark.parametrize("shell", ["srun -N 2 bash -c", "docker exec a bash -lc", "eval"])
def test_a_text_for_another_shell_holds_several_commands(shell: str, text: str) -> None:
    script = f'O="--b 2"\n{shell} "{text}"\n'
    commands = [[word.text for word in command.words] for command in run(script, name="run.sh")]
    before = shell.split()
    assert [*before, "train", "--a", "1", "--b", "2"] in commands
    assert [*before, "cd", "x"] in commands
    assert not any(word.endswith(";") for command in commands for word in command)


def test_a_text_for_another_shell_sets_variables_before_its_command() -> None:
    (command,) = run('docker exec a bash -lc "A=1 B=2 train --x"\n', name="run.sh")[:-1]
    assert {name: word.text for name, word in command.environment.items()} == {"A": "1", "B": "2"}


@pytest.mark.parametrize(
    ("condition", "branch"),
    [
        ('[ "$A" = "4" ]', "yes"),
        ("[[ $A == 4* && -n $A ]]", "yes"),
        ("[ $A -gt 4 ]", "no"),
        ('[ -z "$A" ] || [ $A != 4 ]', "no"),
        ("! [ $A = 4 ]", "no"),
        ("[ ! $A = 5 ]", "yes"),
        ("! [ $A = 5 ] && true", "yes"),
        ('[ -n "${B:-}" ]', "no"),
        ("[ $A = 5 ]; then train never; elif true", "yes"),
    ],
)
def test_decided_conditions(condition: str, branch: str) -> None:
    script = f"A=4\nif {condition}; then\n  train yes\nelse\n  train no\nfi\n"
    commands = [[word.text for word in command.words] for command in run(script, name="run.sh")[:-1]]
    assert commands == [["train", branch]]


@pytest.mark.parametrize(
    ("value", "flag"), [("7B", "--small"), ("13B", "--mid"), ("70B", "--large"), ("x", "--other")]
)
def test_case(value: str, flag: str) -> None:
    script = f"""SIZE={value}
case $SIZE in
  7B) ARGS=(--small);;
  13B|14B)
    ARGS=(--mid)
    ;;
  70*) ARGS=(--large) ;;
  *) ARGS=(--other)
esac
train ${{ARGS[@]}}
"""
    assert words(script) == ["train", flag]


@pytest.mark.parametrize(
    "script",
    [
        "if [ $1 = x ]; then A=1; fi\ntrain $A",
        "for A in 1 2; do :; done\ntrain $A",
        "while read A; do A=1; done\ntrain $A",
        "train $A",
        "train $(date)",
        "train `date`",
        "train $1",
        "train ${10}",
        "run() { { :; }; train ${1:-4}; }",
        "run ()\n{\n  train ${1:-4}\n}",
        "function run {\n  train ${1:-4}\n}",
        "function run() { train ${1:-4}; }",
        "set -- 8; train ${1:-4}",
        "A=$B\ntrain $A",
        "train ${A%.*}",
    ],
)
def test_what_is_not_known_is_not_resolved(script: str) -> None:
    (word,) = last(script).words[1:]
    assert not word.resolved


def test_flags_of_an_undecided_branch_are_not_certain() -> None:
    command = last('A=(--x)\nif [ -f data ]; then A+=(--y); fi\n[ -d out ] || A+=(--z)\ntrain "${A[@]}"')
    assert [(word.text, word.certain) for word in command.words] == [
        ("train", True),
        ("--x", True),
        ("--y", False),
        ("--z", False),
    ]


def test_every_word_keeps_the_place_of_its_text() -> None:
    script = (
        'TP=4\nARGS=(\n  --tp $TP\n  --name="a b"\n)\nOPTS=" --one \\\n   --two"\ntrain "${ARGS[@]}" $OPTS\n'
    )
    assert [(word.text, word.line, word.column) for word in last(script).words] == [
        ("train", 8, 1),
        ("--tp", 3, 3),
        ("4", 1, 4),
        ("--name=a b", 4, 3),
        ("--one", 6, 8),
        ("--two", 7, 4),
    ]


def test_the_environment_is_what_was_exported_before_and_on_the_line() -> None:
    command = last("export A=1 B=2\nC=3\nexport C\nunset B\nD=4 E=5 train\nexport F=6\n")
    assert {name: value.text for name, value in command.environment.items()} == {
        "A": "1",
        "C": "3",
        "D": "4",
        "E": "5",
    }


@pytest.mark.parametrize(
    "script",
    [
        "A=aaaa\n" + 'A="$A$A"\n' * 60 + "train $A",
        "A=(a)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 60 + "train",
        "train " + "$" * 100_000,
        "train " + "a " * 100_000,
    ],
)
def test_growth_without_end_is_refused(script: str) -> None:
    with pytest.raises(UnusableInput, match="expected a launch script"):
        run(script, name="run.sh")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ('"--a `date` --b"', ["--a", "`date`", "--b"]),
        ('"`echo \\`date\\` x`"', ["`echo \\`date\\` x`"]),
        ('"$(echo "a)" b)"', ['$(echo "a)" b)']),
        ('"$(cat <<E\nit\'s\nE\n)"', ["$(cat <<E\nit's\nE\n)"]),
        ("\"$(echo '(' # it's\n)\"", ["$(echo '(' # it's\n)"]),
        ('"--a `# it\'s a comment` --b"', ["--a", "--b"]),
        ('"${A:-it\'s} ${B:-"x y"} ${C:-`d`}"', ["its", "x", "y", "`d`"]),
        ("${A:-'x}'}", ["x}"]),
        ('"$((1 + (2)))"', ["$((1 + (2)))"]),
        ('"unfinished `date --b"', ["unfinished", '`date --b"']),
    ],
)
def test_a_quoted_value_ends_where_its_quotes_do(value: str, expected: list[str]) -> None:
    """Later lines behind it are not swallowed."""
    text = f"EXTRA={value}\ntrain $EXTRA --end\n"
    if "unfinished" not in value:
        assert words(text) == ["train", *expected, "--end"]
    else:
        assert run(text, name="run.sh")  # no shell would run it either


def sourced(tmp_path: Path, text: str) -> Command:
    return run(text, name="run.sh", folder=tmp_path)[-2]


@pytest.mark.parametrize(
    "line",
    ["source args.sh", ". ./args.sh", 'source "$(dirname "$0")/args.sh"', "source ${HERE}/args.sh"],
)
def test_a_sourced_file_beside_the_script_is_read(tmp_path: Path, line: str) -> None:
    (tmp_path / "args.sh").write_text('ARGS="--a 1"\nexport MODE=2\n', encoding="utf-8")
    command = sourced(tmp_path, f"\n{line}\ntrain $ARGS\n")
    assert [word.text for word in command.words] == ["train", "--a", "1"]
    assert not command.missing
    assert command.environment["MODE"].line == 2


def test_a_sourced_file_that_is_not_there_is_noted(tmp_path: Path) -> None:
    command = sourced(tmp_path, "source ~/.bashrc\nsource venv/bin/activate\nsource env.sh\ntrain --a $B\n")
    assert [path.text for path in command.missing] == ["env.sh"]
    assert not command.words[2].resolved


@pytest.mark.parametrize(
    "script",
    [
        "set -a\nsource .env\nset +a\nNOT=1\ntrain",
        "set -euo pipefail\nset -o allexport; . ./.env; set +o allexport\nNOT=1\ntrain",
        "env MODE=2 train\n",
        "NOT=1\nsrun --nodes 2 env MODE=2 B=3 train NOT=1\n",
    ],
)
def test_what_a_command_is_given_may_come_from_a_file_or_from_env(tmp_path: Path, script: str) -> None:
    (tmp_path / ".env").write_text("MODE=2\n", encoding="utf-8")
    given = sourced(tmp_path, script).environment
    assert given["MODE"].text == "2"
    assert "NOT" not in given


def test_an_export_of_what_a_command_prints_may_set_anything(tmp_path: Path) -> None:
    assert sourced(tmp_path, "export $(grep -v '^#' .env | xargs)\ntrain\n").missing
    assert not sourced(tmp_path, "export A=$(date)\ntrain\n").missing


def test_files_that_source_each_other_end(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text("source b.sh\nif x; then\n", encoding="utf-8")
    (tmp_path / "b.sh").write_text("source a.sh\nfi\nA=1\n", encoding="utf-8")
    assert [word.text for word in sourced(tmp_path, "source a.sh\ntrain $A\n").words] == ["train", "1"]
