"""launch/local.sh: one process a rank, and nothing left behind."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_zpp.config.root import parse_args
from tests.config.command_line import SMALLEST
from tests.support import ROOT, environment, executed, wait_until

PATIENCE = 120  # seconds; what has to be ended sleeps longer
SCRIPT = ROOT / "launch" / "local.sh"


def local(*argv: str, **extra: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [SCRIPT, *argv],
        env=environment(**{"PYTHON": sys.executable, **extra}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outcome(*argv: str, **extra: str) -> tuple[int, str, str]:
    """The status of a job, and what it prints."""
    child = local(*argv, **extra)
    out, err = child.communicate(timeout=PATIENCE)
    return child.returncode, out, err


def write(directory: Path, text: str) -> str:
    program = directory / "program.py"
    program.write_text("import os, sys, time\nrank = int(os.environ['RANK'])\n" + text)
    return str(program)


def test_every_rank_gets_the_launchers_variables_and_the_flags(tmp_path: Path) -> None:
    program = write(
        tmp_path,
        "names = 'RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR'.split()\n"
        "values = ' '.join(os.environ[name] for name in names)\n"
        "sys.stdout.write(f\"{values} {int(os.environ['MASTER_PORT']) > 0} {sys.argv[1:]}\\n\")",
    )
    out, err = local("-n", "3", program, "--flag", "two words").communicate(timeout=PATIENCE)
    expected = [f"{rank} 3 {rank} 3 127.0.0.1 True ['--flag', 'two words']" for rank in range(3)]
    assert (sorted(out.splitlines()), err) == (expected, "")


def test_ranks_share_a_secret_of_their_job_that_nobody_else_sees(tmp_path: Path) -> None:
    """It is neither printed, not even by `bash -x`, nor in the arguments of a process, which `ps` shows."""
    program = write(
        tmp_path,
        "from pathlib import Path\n"
        "secret = os.environ['MEGATRON_ZPP_SECRET']\n"
        "pids = os.getpid(), os.getppid()\n"
        "assert not any(secret in Path(f'/proc/{pid}/cmdline').read_text() for pid in pids)\n"
        "Path(sys.argv[1], str(rank)).write_text(secret)",
    )
    found = []
    for job, extra in (("1", {}), ("2", {}), ("3", {"MEGATRON_ZPP_SECRET": "g" * 40})):
        (tmp_path / job).mkdir()
        argv = ["bash", "-x", SCRIPT, "-n", "2", program, tmp_path / job]
        done = executed(*argv, PYTHON=sys.executable, **extra)
        assert done.returncode == 0
        one, other = ((tmp_path / job / rank).read_text() for rank in "01")
        assert one == other
        assert one not in done.stdout + done.stderr
        found.append(one)
    assert found[0] != found[1]
    assert all(re.fullmatch("[0-9a-f]{64}", secret) for secret in found[:2])
    assert found[2] == "g" * 40


def test_an_environment_that_is_not_active_is_named(tmp_path: Path) -> None:
    """Instead of a ModuleNotFoundError for each rank, by the launcher as by the program alone."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # without site-packages
    bare.chmod(0o755)
    for argv in ([SCRIPT, "pretrain_gpt.py"], [bare, ROOT / "pretrain_gpt.py"]):
        done = executed(*argv, PYTHON=str(bare))
        (line,) = done.stderr.splitlines()
        assert " has no torch" in line
        assert "source " in line
        assert line.endswith("bin/activate")
        assert done.returncode == 1


def test_a_python_that_is_not_there_is_refused() -> None:
    refusal = "launch/local.sh: PYTHON nopython: not found; activate an environment, or set PYTHON\n"
    assert outcome("-n", "2", "pretrain_gpt.py", PYTHON="nopython") == (2, "", refusal)


def test_a_module_is_started_as_python_does() -> None:
    out, err = local("-n", "2", "-m", "json.tool", "--help").communicate(timeout=PATIENCE)
    assert (out.count("usage:"), err) == (2, "")


def test_a_prompt_ends_at_once(tmp_path: Path) -> None:
    """At a terminal the kernel would stop the rank, which is in its background."""
    program = write(tmp_path, "try:\n    input('W&B choice: ')\nexcept EOFError:\n    sys.exit(7)")
    master, terminal = os.openpty()
    command = ["setsid", "--ctty", "--wait", SCRIPT, "-n", "1", program]
    env = environment(PYTHON=sys.executable)
    assert (
        subprocess.run(command, env=env, stdin=terminal, capture_output=True, timeout=PATIENCE).returncode
        == 7
    )
    os.close(master)
    os.close(terminal)


def test_the_first_failure_ends_the_others_and_is_the_status(tmp_path: Path) -> None:
    program = write(tmp_path, "time.sleep(0.2 if rank == 1 else 600)\nsys.exit(7)")
    assert outcome("-n", "3", program)[0] == 7


@pytest.mark.parametrize(
    ("sent", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 143)]
)
def test_a_signal_reaches_every_rank(tmp_path: Path, sent: signal.Signals, status: int) -> None:
    pids = tmp_path / "pids"
    program = write(tmp_path, f"open({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n')\ntime.sleep(600)")
    child = local("-n", "2", program)
    wait_until(lambda: pids.exists() and pids.read_text().count("\n") == 2, PATIENCE)
    child.send_signal(sent)
    child.communicate(timeout=PATIENCE)
    assert child.returncode == status
    for pid in pids.read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="util-linux is not installed")
def test_no_rank_outlives_a_script_that_is_killed(tmp_path: Path) -> None:
    child = local("-n", "2", write(tmp_path, "print(rank, flush=True)\ntime.sleep(600)"))
    for _ in range(2):
        child.stdout.readline()
    child.kill()
    child.communicate(timeout=PATIENCE)  # returns when no process has its output


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_a_signal_before_the_first_rank_ends_the_script(
    tmp_path: Path, sent: signal.Signals, status: int
) -> None:
    """While it looks for a free port, which takes a while on a busy machine; no rank is started."""
    python, looking = tmp_path / "python", tmp_path / "looking"
    python.write_text(
        f'#!/bin/sh\n[ "$1" != -c ] || {{ : >{looking}; sleep 1; }}\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    program = write(tmp_path, "sys.stdout.write('started')")
    child = local("-n", "2", program, PYTHON=str(python))
    wait_until(looking.exists, PATIENCE)
    child.send_signal(sent)
    out, err = child.communicate(timeout=PATIENCE)
    assert (child.returncode, out, err) == (status, "", "")


def test_a_signal_while_a_rank_is_started_reaches_it(tmp_path: Path) -> None:
    """It comes between the start of the rank and the moment when the script knows its process."""
    moment = tmp_path / "moment.sh"
    moment.write_text("set -T\ntrap '[[ $BASH_COMMAND != pids+=* ]] || kill -TERM $$' DEBUG\n")
    assert outcome("-n", "1", write(tmp_path, "time.sleep(10)"), BASH_ENV=str(moment))[0] == 143


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("", "launch/local.sh"),
        ("-n 0 x.py", "launch/local.sh"),
        ("-n two x.py", "launch/local.sh"),
        ("-n 99999999999 pretrain_gpt.py", "-n 99999999999: must be a whole number of processes, from 1 to"),
        ("-n 2 pretrain_gpt3.py --flag", "launch/local.sh: pretrain_gpt3.py: no such file\n"),
    ],
)
def test_bad_usage_is_status_2(argv: str, said: str) -> None:
    status, _, err = outcome(*argv.split())
    assert status == 2
    assert said in err


SAVED = ("--save", "there", "--load=there")


def attempts(directory: Path, text: str) -> str:
    """A program that knows which start this is: `start` counts from 1, and all ranks have begun it."""
    begun = (
        "ranks = range(int(os.environ['WORLD_SIZE']))\n"
        f"files = [{str(directory / 'starts')!r} + str(each) for each in ranks]\n"
        "with open(files[rank], 'a') as file:\n"
        "    file.write('x')\n"
        "    start = file.tell()\n"
        "while any(not os.path.exists(file) or os.path.getsize(file) < start for file in files):\n"
        "    time.sleep(0.01)\n"
    )
    return write(directory, begun + text)


def test_a_crashed_job_is_restarted_with_all_its_ranks(tmp_path: Path) -> None:
    """By a signal, then by its status; the other rank is ended each time."""
    program = attempts(
        tmp_path,
        "import signal\n"
        "if start == 1 and rank == 1: os.kill(os.getpid(), signal.SIGSEGV)\n"
        "if start == 2 and rank == 0: sys.exit(7)\n"
        "time.sleep(0 if start == 3 else 600)\n"
        "sys.stdout.write(os.environ['MASTER_PORT'] + '\\n')\n",
    )
    out, err = local("-n", "2", "--max-restarts", "2", program, *SAVED).communicate(timeout=PATIENCE)
    assert len(set(out.splitlines())) == 1
    assert err.splitlines() == [  # and nothing of bash's about killed jobs
        "launch/local.sh: rank 1 ended with SIGSEGV; restart 1 of 2",
        "launch/local.sh: rank 0 ended with status 7; restart 2 of 2",
    ]
    assert [len((tmp_path / f"starts{rank}").read_text()) for rank in (0, 1)] == [3, 3]


def settings(save: str, load: str, *more: str) -> str:
    """The config.yaml that a run writes to --save."""
    return parse_args([*SMALLEST, "--save", save, "--load", load, *more]).to_yaml(["by a test"])


@pytest.mark.parametrize(
    "text",
    [
        settings("two words", "two words"),
        "save: a\nload: a\nfinetune: false\nload_optim: true\nckpt_step: null\n# save_optim: false\n",
    ],
    ids=["written by a run", "with settings that resume"],
)
def test_settings_of_a_file_tell_that_a_job_resumes(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    program = attempts(tmp_path, "sys.exit(0 if start == 2 else 7)")
    status, _, err = outcome("-n", "1", "--max-restarts", "1", program, f"--config={tmp_path / 'run.yaml'}")
    assert status == 0, err
    assert (tmp_path / "starts0").read_text() == "xx"


def refused(*flags: str) -> str:
    """The line that refuses restarts."""
    status, _, err = outcome("-n", "1", "--max-restarts", "1", "x.py", *flags)
    assert (status, err.count("\n")) == (2, 1)
    return err


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        (settings("there", "elsewhere"), ()),
        (settings("there", "there"), ("--save", "elsewhere")),
        ("checkpoint: {save: there, load: elsewhere}\n", ()),
    ],
)
def test_settings_of_a_file_that_do_not_resume_are_refused(
    tmp_path: Path, text: str, flags: tuple[str, ...]
) -> None:
    (tmp_path / "run.yaml").write_text(text)
    said = "--max-restarts 1: needs --save DIRECTORY and a --load equal to it, as flags or in --config"
    assert said in refused("--config", str(tmp_path / "run.yaml"), *flags)


def test_a_log_without_space_keeps_no_job_from_its_restart(tmp_path: Path) -> None:
    program = attempts(tmp_path, "sys.exit(0 if start == 2 else 7)")
    with open("/dev/full", "w") as full:
        argv = [SCRIPT, "-n", "1", "--max-restarts", "1", program, *SAVED]
        done = subprocess.run(argv, env=environment(PYTHON=sys.executable), stderr=full, timeout=PATIENCE)
    assert done.returncode == 0
    assert (tmp_path / "starts0").read_text() == "xx"


@pytest.mark.parametrize("status", [2, 75])
def test_a_failure_that_would_repeat_is_not_restarted(tmp_path: Path, status: int) -> None:
    program = attempts(tmp_path, f"sys.exit({status})")
    assert outcome("-n", "2", "--max-restarts", "2", program, *SAVED)[0] == status
    assert (tmp_path / "starts0").read_text() == "x"


def test_restarts_end(tmp_path: Path) -> None:
    status, _, err = outcome("-n", "1", "--max-restarts", "1", attempts(tmp_path, "sys.exit(9)"), *SAVED)
    assert status == 9
    assert "rank 0 ended with status 9; no restart is left" in err
    assert (tmp_path / "starts0").read_text() == "xx"


def test_restarts_need_flags_that_resume() -> None:
    """They would take the old weights again, or lose the optimizer's state, at each restart."""
    said = "--max-restarts 1: --ckpt-step: a second start would not go on from where the first one ended"
    assert said in refused("--save", "a", "--load", "a", "--ckpt-step=3")


@pytest.mark.parametrize(
    "line",
    [
        "finetune: true",
        "load_optim: false",
        "load-optim: 'FALSE'",
        "ckpt_step: 0",
        "checkpoint: {\n  load_optim: false,\n  keep_last: 2}",
    ],
)
def test_restarts_need_settings_of_a_file_that_resume(tmp_path: Path, line: str) -> None:
    """They are refused as their flags are."""
    file = tmp_path / "run.yaml"
    file.write_text(f"{line}\nsave: a\nload: a\n")
    for flags in (("--config", str(file)), (f"--config={file}", "--save", "b", "--load", "b")):
        assert f"in --config {file}: a second start would not go on" in refused(*flags)
