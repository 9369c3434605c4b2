"""`megatron-zpp`: its commands, their help and names, and the console scripts that it replaces."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_zpp.commands import scripts
from megatron_zpp.commands.scripts import COMMANDS
from megatron_zpp.config.help import COMMON
from megatron_zpp.config.root import parse_args
from tests.config.command_line import SMALLEST
from tests.support import executed, nightly, run

SCRIPT = "import sys; from megatron_zpp.commands.scripts import {0}; sys.argv[0] = '/bin/{1}'; {0}()"


def script(function: str, name: str, *argv: str, **more: str) -> subprocess.CompletedProcess[str]:
    """What a console script of an installed package does."""
    return run("-c", SCRIPT.format(function, name), *argv, **more)


def test_help_lists_the_commands_without_torch() -> None:
    done = run("-X", "importtime", "-m", "megatron_zpp", "--help")
    assert done.returncode == 0
    assert "torch" not in {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    lines = done.stdout.splitlines()
    assert lines[0] == "usage: python -m megatron_zpp COMMAND [flags]"
    listed = [line.split()[0] for line in lines if line.startswith("  ")]
    assert listed == list(COMMANDS)
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("trian", ": error: unknown command trian; did you mean train? (--help lists all commands)"),
        ("flux", ": error: unknown command flux (--help lists all commands)"),
        ("", ": error: no command (--help lists all commands)"),
        nightly("sample --lod x", " sample: error: the following arguments are required: --load"),
        ("train --flux", " train: error: unrecognized argument --flux (--help all lists every flag)"),
        ("plan --help modle", " plan: error: --help modle: no such section; did you mean model?"),
    ],
)
def test_a_wrong_command_line_is_one_line_with_the_name_that_was_typed(argv: str, said: str) -> None:
    done = script("main", "megatron-zpp", *argv.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"megatron-zpp{said}")


@pytest.mark.parametrize(
    ("start", "said"),
    [
        ("PYTHONIOENCODING=ascii", r"1 layer \xd7 16"),
        ("exec >&-;", ""),
        ("exec 2>&-; PYTHONIOENCODING=utf-8", "1 layer × 16"),
    ],
)
def test_output_that_lacks_our_characters_or_is_closed_ends_no_run(start: str, said: str) -> None:
    train = f'{start} "$0" -m megatron_zpp train "$@" --device cpu'
    done = executed("bash", "-c", train, sys.executable, *SMALLEST)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout if said else not done.stdout
    assert "error" not in done.stderr


def test_ctrl_c_during_the_imports_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(scripts, "import_module", interrupted)
    monkeypatch.setattr(sys, "argv", ["megatron-zpp sample"])
    with pytest.raises(SystemExit, match="130"):
        scripts.run("sample")
    assert capsys.readouterr().err == "megatron-zpp sample: interrupted\n"


def test_train_and_plan_run_under_torchrun_and_as_a_module(tmp_path: Path) -> None:
    launched = ["-m", "torch.distributed.run", "--nproc-per-node", "1", "-m", "megatron_zpp", "train"]
    trained = run(*launched, *SMALLEST, "--device", "cpu", "--save", str(tmp_path / "run"))
    assert trained.returncode == 0, trained.stderr
    planned = run("-m", "megatron_zpp", "plan", *SMALLEST, "--plan-nodes", "2", "--plan-link-gbit", "100")
    assert planned.returncode == 0, planned.stderr
    assert "memory" in planned.stdout
    refused = run("-m", "megatron_zpp", "train", "--load", "x")
    assert refused.stderr.startswith("python -m megatron_zpp train: error: --")


@pytest.mark.parametrize(
    ("name", "argv", "new", "status"),
    [
        ("pretrain", ["--help"], "train", 0),
        ("build-corpus", ["--help"], "corpus", 0),
        nightly("huggingface", ["export", "--help"], "export", 0),
        ("huggingface", [], "import or export", 2),
        ("import-checkpoint", ["gone", "--output=new", "--from", "megatron"], "import", 1),
    ],
)
def test_an_old_script_works_and_says_its_new_name_once_per_node(
    name: str, argv: list[str], new: str, status: int
) -> None:
    old = f"megatron-zpp-{name}"
    done = script("renamed", old, *argv)
    assert done.returncode == status, done.stderr
    first, *rest = done.stderr.splitlines()
    assert first == f"{old}: warning: is deprecated; use megatron-zpp {new}"
    assert all(line.startswith(f"{old}: error: ") for line in rest)
    if name == "import-checkpoint":
        assert rest == [
            f"{old}: error: SOURCE gone: holds no model of transformers, Megatron-LM or DeepSpeed; "
            "name a directory that does"
        ]
    if not status:
        assert done.stdout.startswith(f"usage: {old} [flags]")
        assert script("renamed", old, *argv, LOCAL_RANK="1").stderr == ""


def flags_of_help(capsys: pytest.CaptureFixture[str], *words: str) -> set[str]:
    with pytest.raises(SystemExit) as ended:
        parse_args(["--help", *words])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    return {line.split()[0].rstrip(",") for line in lines if line.startswith("  --")} - {"--version"}


def test_help_shows_what_most_runs_need_a_section_or_all(capsys: pytest.CaptureFixture[str]) -> None:
    common, everything = flags_of_help(capsys), flags_of_help(capsys, "all")
    assert common == set(COMMON)
    assert len(common) == 20
    assert common < everything
    rates = {flag for flag in everything if "lr" in flag.split("-")} - {"--outer-lr"}
    assert flags_of_help(capsys, "learning-rate") == rates
    assert flags_of_help(capsys, "--dry-run") - common == {flag for flag in everything if "plan" in flag} | {
        "--dry-run"
    }
