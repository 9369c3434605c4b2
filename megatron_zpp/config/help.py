"""The help of a run: the flags that most runs need, those of a section, or all of them."""

import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import NoReturn

from megatron_zpp.config.options import Options, UsageError, make_parser
from megatron_zpp.config.words import did_you_mean

COMMON = (  # the flags that most runs need
    *("--model-preset", "--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length"),
    *("--tokenizer-type", "--tokenizer-model", "--data-path", "--split"),
    *("--micro-batch-size", "--global-batch-size", "--train-iters", "--lr", "--lr-warmup-fraction"),
    *("--zero-stage", "--eval-interval", "--save", "--load", "--save-interval", "--metrics-file"),
)
_ALL = "all"
_LIKELY = 0.6  # similarity of a typing error


def show_help(prog: str, argv: Sequence[str], groups: Mapping[str, type[Options]]) -> NoReturn:
    """Print the help that `argv` asks for by --help, --help SECTION or --help all, and exit.

    SECTION is a group, with dashes. Beside --dry-run, --help shows the flags of plans too. Raises UsageError
    for an unknown section.
    """
    place = next(number for number, word in enumerate(argv) if word in ("-h", "--help"))
    section = next((word for word in argv[place + 1 : place + 2] if not word.startswith("-")), None)
    sys.stdout.write(_text(prog, section, groups, plan="--dry-run" in argv))
    sys.stdout.flush()
    sys.exit(0)


def _text(prog: str, section: str | None, groups: Mapping[str, type[Options]], *, plan: bool) -> str:
    sections = {name.replace("_", "-"): name for name in groups}
    if section is None:
        of_plans = make_parser(prog, "", {"plan": groups["plan"]} if plan else {})._option_string_actions
        words = "Pretrain a GPT. These flags are enough for most runs."
        parser = make_parser(prog, words, groups, only={*COMMON, *of_plans})
        parser.epilog = _wrapped(
            f"--help SECTION lists all flags of a section, and --help {_ALL} those of every section: "
            f"{', '.join(sections)}."
        )
        return parser.format_help()
    if section == _ALL:
        from megatron_zpp.config.legacy.old_flags import RENAMED

        parser = make_parser(prog, "Pretrain a GPT. README.md shows whole command lines.", groups)
        parser.epilog = _wrapped(
            "These old flags of Megatron-LM and Megatron-DeepSpeed work, and print their current names: "
            f"{', '.join(flag.name for flag in RENAMED)}. docs/guide/deepspeed.md lists them, flags without "
            "effect, and refused flags."
        )
        return parser.format_help()
    if section not in sections:
        known = f"{did_you_mean(section, sections, _LIKELY)} there are {', '.join((*sections, _ALL))}"
        raise UsageError(f"--help {section}: no such section; {known.lstrip()}")
    return make_parser(prog, "", {sections[section]: groups[sections[section]]}).format_help()


def _wrapped(text: str) -> str:
    return textwrap.fill(text, shutil.get_terminal_size().columns - 2, break_on_hyphens=False)
