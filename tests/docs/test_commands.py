"""Every block of commands on pages is executed, parsed, or says what it needs (tests/docs/blocks.py)."""

import json
import os
import re
import shutil
import sys
import typing
from pathlib import Path

import pytest

from docs.site.reference import PROGRAMS
from megatron_zpp.config.command_line import command_groups
from megatron_zpp.config.legacy.translate import add_old_flags
from megatron_zpp.config.options import make_parser, parse_known
from megatron_zpp.config.root import Config, parse_command_line
from megatron_zpp.config.sources.provided import OTHERS, Provided
from megatron_zpp.config.sources.settings_file import DeepSpeedFile, SettingsFile
from tests.docs.blocks import Block, Command, blocks, command, lines
from tests.support import ROOT, executed

NEEDS = re.compile(r"GPU|cluster|network|root|server")
IGNORED = shutil.ignore_patterns(*".git .venv build mine quickstart wandb __pycache__ *_cache".split())
EXECUTED = [block for block in blocks() if block.kind == "executed"]


def commands() -> list[Command]:
    """The different command lines of ours on all pages."""
    found = [command(line) for block in blocks() for line in lines(block)]
    return list(dict.fromkeys(one for one in found if one is not None))


@pytest.mark.parametrize("block", blocks(), ids=str)
def test_each_block_has_a_class(block: Block) -> None:
    if block.kind == "needs":
        assert NEEDS.search(block.words)
    if block.kind == "parsed":
        foreign = [line for line in lines(block) if command(line) is None]
        assert not foreign, "write <!-- executed --> or <!-- needs … --> above this block"
    if block.kind == "executed" and block.words:
        runners = block.words.removeprefix("by ").split(" and ")
        code = "".join((ROOT / runner).read_text() for runner in runners)
        programs = {Path(line.split()[0]).name for line in lines(block)}
        assert block.page.name in code or all(program in code for program in programs)


def test_commands_for_all_cores_suit_any_number_of_them() -> None:
    """A batch that is given suits some numbers only."""
    ours = [line for block in blocks() if block.kind == "executed" for line in lines(block)]
    assert not [line for line in ours if line.startswith("launch/local.sh pretrain") and "--global-b" in line]


@pytest.mark.parametrize("one", commands(), ids=lambda one: f"{one.program} {' '.join(one.arguments)}"[:70])
def test_commands_on_pages_are_valid(one: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds_zeropp_config.json").write_text("{}")
    if {"--help", "--version"} & {one.program, *one.arguments}:
        return
    from_hub = any(argument.startswith("hf:") for argument in one.arguments)  # it gives flags when it is read
    if one.program in ("train", "plan") and one.whole and not from_hub:
        parse_command_line([*one.arguments, *["--dry-run"] * (one.program == "plan")])
    elif one.program in ("train", "plan"):
        parse_flags(one.arguments)
    elif one.program in PROGRAMS:
        command_groups({cls.__name__: cls for cls in PROGRAMS[one.program]}, "", one.arguments)
    else:  # lm-eval's own command line, and programs that measure, whose flags test_pages.py looks for
        assert one.program.startswith(("benchmarks/", "lm-eval"))


def parse_flags(arguments: tuple[str, ...]) -> None:
    """Parse a command line of which parts are omitted: each flag exists, and its values have its type."""
    parts = typing.get_type_hints(Config)
    files = {"deepspeed": DeepSpeedFile, "settings": SettingsFile}
    parser = make_parser("pretrain_gpt.py", "", parts | files)
    add_old_flags(parser)
    typed, unknown = parse_known(parser, (*parts, *files, OTHERS), arguments)
    Provided(parts | files, typed, unknown).check_refused()


def test_an_invalid_command_would_be_noticed() -> None:
    with pytest.raises(ValueError, match="--no-such-flag"):
        parse_flags(("--no-such-flag", "1"))
    for line in ("launch/local.sh -n 2 -m megatron_zpp sample --load D …", "megatron-zpp sample --load D …"):
        assert command(line) == Command("sample", ("--load", "D"), False)
    assert command("pip install lm-eval") is None


def test_the_json_of_the_deepspeed_page_means_its_flags(tmp_path: Path) -> None:
    page = ROOT / "docs" / "guide" / "from_deepspeed.md"
    settings = json.loads(re.search(r"```json\n(.*?)```", page.read_text(), re.DOTALL).group(1))
    (tmp_path / "ds.json").write_text(json.dumps(settings))
    (line,) = [line for block in blocks() if block.page == page for line in lines(block)]
    typed = command(line).arguments
    model = typed[typed.index("--model-preset") :]
    from_file = parse_command_line(["--deepspeed_config", str(tmp_path / "ds.json"), *model]).config
    assert from_file == parse_command_line(typed).config


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository, as a clone that was set up."""
    copy = tmp_path_factory.mktemp("clone") / "repository"
    shutil.copytree(ROOT, copy, ignore=IGNORED)
    (copy / ".venv").symlink_to(sys.prefix)
    return copy


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("block", [block for block in EXECUTED if not block.words], ids=str)
def test_blocks_run_one_after_the_other(block: Block, checkout: Path) -> None:
    path = f"{sys.prefix}/bin{os.pathsep}{os.environ['PATH']}"
    argv = ("bash", "-euo", "pipefail", "-c", block.text)
    done = executed(*argv, cwd=checkout, timeout=850, PATH=path, PYTHONPATH="")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
