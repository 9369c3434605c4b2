"""Foreign text in errors cannot steer a terminal."""

import pytest

from megatron_zpp.config.options import option_error, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;owned\x07", "\\x1b]0;owned\\x07"),
        ("a\rb\x9b2J", "a\\rb\\x9b2J"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\ud83d", "\\ud83d"),
        ("zwei\tSpalten\nund Zeilen: äöü 漢字 🦊", "zwei\tSpalten\nund Zeilen: äöü 漢字 🦊"),
    ],
)
def test_what_a_terminal_would_obey_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert str(option_error("--load", text, "no")) == f"--load {shown}: no"
