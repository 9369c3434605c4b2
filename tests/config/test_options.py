"""The mechanism that turns dataclass fields into flags."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from megatron_zpp.config.command_line import command_groups
from megatron_zpp.config.options import Options, UsageError, make_parser, option, option_error
from tests.support import environment, refusal, run


@dataclass(frozen=True, kw_only=True)
class Kitchen(Options):
    """kitchen: what to cook"""

    burners: int = option(4, "How many burners.", at_least=1)
    heat: float = option(0.5, "How hot.", at_least=0, below=1)
    gas: bool = option(False, "Gas instead of electricity.")
    timer: bool = option(True, "Cook without a timer.")
    pans: tuple[str, ...] = option((), "Which pans.")
    range: tuple[int, int] | None = option(None, "From and to.", at_least=1)
    style: Literal["boil", "fry"] = option("fry", "How.")
    limit: int | None = option(None, "At most.", needs="--style boil or --burners 2, 3")


def parse(*argv: str) -> Kitchen:
    return command_groups({"kitchen": Kitchen}, "Cooks.", argv)["kitchen"]


def test_every_kind_of_field_is_read() -> None:
    provided = parse(
        *("--burners", "2", "--heat", "0.25", "--gas", "--no-timer", "--style", "Boil", "--limit", "7"),
        *("--pans", "wok", "pot", "--range", "3", "9"),
    )
    expected = {"burners": 2, "heat": 0.25, "gas": True, "timer": False, "style": "boil", "limit": 7}
    assert provided == Kitchen(**expected, pans=("wok", "pot"), range=(3, 9))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--burners", "0"], ["--burners", "0", "at least 1"]),
        (["--burners", "many"], ["--burners", "many"]),
        (["--heat", "1"], ["--heat", "1.0", "below 1"]),
        (["--heat", "nan"], ["--heat", "nan", "finite"]),
        (["--heat", "inf"], ["--heat", "inf", "finite"]),
        (["--style", "bake"], ["--style", "bake", "boil"]),
        (["--range", "3"], ["--range", "2"]),
        (["--range", "3", "0"], ["--range", "3 0", "at least 1"]),
        (["--timer"], ["--timer", "did you mean --no-timer"]),
        (["--burner", "2"], ["--burner", "did you mean --burners"]),
        (["--burn", "2"], ["--burn"]),
        (["stray"], ["stray"]),
        ([" "], ["argument ' ', maybe behind a backslash"]),
        (["--limit", "7"], ["--limit 7: needs --style boil or --burners 2, 3"]),
    ],
)
def test_a_bad_command_line_is_one_line_with_flag_and_value(argv: list[str], words: list[str]) -> None:
    message = refusal(parse, *argv, error=UsageError)
    for word in words:
        assert word in message


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(UsageError) as refused:
        parse("--burners", "many", "--heat", "1", "--style", "bake", "--limit", "7", "--flux", "3")
    assert str(refused.value).splitlines() == [
        "unrecognized argument --flux 3 (--help lists every flag)",
        "--burners many: must be a whole number",
        "--heat 1.0: must be below 1",
        "--style bake: must be boil or fry",  # so it is not said that --limit needs another style
    ]


def test_python_code_cannot_give_a_choice_that_no_command_line_could() -> None:
    with pytest.raises(ValueError, match=r"^--style Fry: must be boil or fry$"):
        Kitchen(style="Fry")  # type: ignore[arg-type]


def test_help_groups_flags_and_shows_defaults() -> None:
    text = make_parser("cook", "Cooks.", {"kitchen": Kitchen}).format_help()
    assert "kitchen: what to cook" in text
    assert "How many burners. [4]" in text
    assert "--no-timer" in text


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ((1, 2), "1 2"),
        ("\x1b]0;owned\x07", "\\x1b]0;owned\\x07"),
        ("a\rb\x9b2J", "a\\rb\\x9b2J"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\ud83d", "\\ud83d"),
        ("zwei\tSpalten\nund Zeilen: äöü 漢字 🦊", "zwei\tSpalten\nund Zeilen: äöü 漢字 🦊"),
    ],
)
def test_refusal_names_flag_value_and_fix_and_cannot_steer_a_terminal(value: object, shown: str) -> None:
    assert str(option_error("--x", value, "must be one number")) == f"--x {shown}: must be one number"


def test_a_tool_exits_with_the_documented_statuses(tmp_path: Path) -> None:
    program = tmp_path / "tool.py"
    program.write_text(
        "import sys\n"
        "from megatron_zpp.config.command_line import run_tool\n"
        "from megatron_zpp.config.options import UsageError\n"
        "errors = {'0': None, '1': ValueError('two\\nlines'), '2': UsageError('bad flag'),\n"
        "          'io': FileNotFoundError(2, 'No such file', 'x.txt')}\n"
        "def main():\n"
        "    if errors[sys.argv[1]]: raise errors[sys.argv[1]]\n"
        "run_tool(main)\n"
    )
    expected = {
        "0": (0, ""),
        "1": (1, "tool.py: error: two lines\n"),
        "2": (2, "tool.py: error: bad flag\n"),
        "io": (1, "tool.py: error: x.txt: No such file\n"),
    }
    for argument, (status, text) in expected.items():
        done = run(program, argument)
        assert (done.returncode, done.stderr) == (status, text)
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, str(program), "0"]
    done = subprocess.run(closed, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
