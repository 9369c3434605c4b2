"""launch/emulate_nodes.sh: nodes on one machine, whose links show what the traffic ledger claims."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.faults.network import Link
from tests.support import ROOT, environment, executed, nightly, records_of, wait_until

PATIENCE = 200  # seconds; sleepers sleep longer
SCRIPT = ROOT / "launch" / "emulate_nodes.sh"
NAMESPACES = Path("/run/netns")
MODEL = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 255 --num-layers 4 --hidden-size 256 "
    "--num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --lr 1e-3 --num-workers 0 "
    "--train-iters 5 --log-interval 1 --eval-iters 0 --zero-stage 3"
).split()
ZEROPP = "--zero-quantized-weights --zero-hpz-partition-size auto --zero-quantized-gradients".split()
FOUR_BITS = [
    *ZEROPP,
    *"--zero-quantized-weights-format delta4 --zero-quantized-gradients-format rotated4".split(),
    *"--zero-gradient-partition-size auto --global-batch-size 8".split(),  # two micro-batches
]


@pytest.fixture
def namespaces(link: Link) -> None:
    if missing := [tool for tool in ("tc", "setpriv") if shutil.which(tool) is None]:
        pytest.skip(f"{', '.join(missing)} missing")


def emulate(*argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [SCRIPT, *argv],
        cwd=ROOT,
        env=environment(PYTHON=sys.executable, CUDA_VISIBLE_DEVICES=""),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def left_behind(run: int) -> list[str]:
    """Namespaces and processes of the run of this process."""
    processes = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"EMULATE_NODES={run}".encode() in environ.read_bytes().split(b"\0"):
                processes.append(environ.parent.name)
        except OSError:  # it has just ended
            continue
    return [path.name for path in NAMESPACES.glob(f"zpp-{run}-*")] + processes


def wait_for(path: Path, lines: int) -> None:
    wait_until(lambda: path.exists() and path.read_text().count("\n") >= lines, PATIENCE)


def sleeper(directory: Path) -> tuple[str, Path]:
    """A program that runs until it is stopped, and the file in which each of its ranks writes a line."""
    program, started = directory / "sleeper.py", directory / "started"
    program.write_text(f"import time\nopen({str(started)!r}, 'a').write('x\\n')\ntime.sleep(300)\n")
    return str(program), started


PREFLIGHT = 4 * 3 * 2**20  # of four ranks: what each sends to the other node, to measure the link


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("zero", [nightly([], id="stage 3"), nightly(FOUR_BITS, id="4 bits")])
def test_the_ledger_is_what_the_kernel_counts(zero: list[str], tmp_path: Path) -> None:
    """Bytes between nodes by metrics.jsonl, of a whole run, against the counters of both nodes' links.

    The counters hold more than the ledger: packet headers and acknowledgements, and what start-up,
    rendezvous, the gradient norm and logging send: some 150 kB a run and 50 kB a step. Never less.
    """
    metrics = tmp_path / "metrics.jsonl"
    flags = [*MODEL, *zero, "--metrics-file", str(metrics)]
    run = emulate("--nodes", "2", "--ranks-per-node", "2", "--", "pretrain_gpt.py", *flags)
    out, err = run.communicate(timeout=PATIENCE)
    assert run.returncode == 0, err[-2000:]
    ledger = [step["inter_node_bytes"] for step in records_of(metrics) if "lm_loss" in step]
    assert len(ledger) == 5
    assert len(set(ledger[1:])) == 1
    (line,) = [line for line in out.splitlines() if line.startswith("bytes that left each node:")]
    counted = [int(nbytes) for nbytes in re.findall(r"node \d+ (\d+)", line)]
    print(f"ledger {sum(ledger)}, counters {sum(counted)} = {counted}")
    assert counted[0] == pytest.approx(counted[1], rel=0.01)
    assert sum(ledger) < sum(counted) - PREFLIGHT < 1.03 * sum(ledger) + 150_000
    assert left_behind(run.pid) == []


@pytest.mark.nightly
@pytest.mark.usefixtures("namespaces")
def test_all_nodes_share_a_secret_of_their_job(tmp_path: Path) -> None:
    program, said = tmp_path / "program.py", tmp_path / "said"
    words = "os.environ['MEGATRON_ZPP_SECRET'] + '\\n'"
    program.write_text(f"import os\nopen({str(said)!r}, 'a').write({words})\n")
    run = emulate("--nodes", "2", "--ranks-per-node", "1", "--", str(program))
    printed = "".join(run.communicate(timeout=PATIENCE))
    one, other = said.read_text().splitlines()
    assert one == other
    assert re.fullmatch("[0-9a-f]{64}", one)
    assert one not in printed


@pytest.mark.nightly
@pytest.mark.usefixtures("namespaces")
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    program, started = sleeper(tmp_path)
    run = emulate("--nodes", "2", "--ranks-per-node", "1", "--link-rate", "100mbit", "--", program)
    wait_for(started, lines=2)
    assert len(left_behind(run.pid)) == 3 + 4  # two nodes and the switch; two launchers and two ranks
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=PATIENCE)
    assert run.returncode == 130
    assert left_behind(run.pid) == []


@pytest.mark.nightly
@pytest.mark.usefixtures("namespaces")
def test_the_next_run_removes_what_a_killed_one_left_and_reports_its_own_failure(tmp_path: Path) -> None:
    program, started = sleeper(tmp_path)
    killed = emulate("--nodes", "1", "--ranks-per-node", "1", "--", program)
    wait_for(started, lines=1)
    killed.kill()
    killed.wait()
    assert left_behind(killed.pid) != []

    failing = tmp_path / "failing.py"
    failing.write_text(
        "import os, sys, time\n"
        "if os.environ['GROUP_RANK'] == '0': time.sleep(300)\n"
        "sys.exit('out of luck with ' + ' '.join(sys.argv[1:]))\n"
    )
    run = emulate("--nodes", "2", "--ranks-per-node", "1", "--", str(failing), "two words", "$HOME")
    _, err = run.communicate(timeout=PATIENCE)
    assert run.returncode == 1
    assert f"removing what the killed run {killed.pid} left behind" in err
    assert "node 1: out of luck with two words $HOME\n" in err
    assert "launch/emulate_nodes.sh: node 1 failed with status 1\n" in err
    assert left_behind(killed.pid) + left_behind(run.pid) == []


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ("--nodes 2 --ranks-per-node 2 pretrain_gpt.py --zero-stage", "pretrain_gpt.py: unknown"),
        ("--nodes 2 --ranks-per-node 2", "-- PROGRAM.py: missing"),
        ("--nodes", "usage:"),
        ("--nodes 0 --ranks-per-node 2 -- x.py", "--nodes '0'"),
        ("--nodes 251 --ranks-per-node 2 -- x.py", "--nodes '251'"),
        ("--nodes 2 --ranks-per-node two -- x.py", "--ranks-per-node 'two'"),
        ("--nodes 2 --ranks-per-node 2 --link-rate 100 -- x.py", "--link-rate '100'"),
        ("--nodes 2 --ranks-per-node 2 --latency soon -- x.py", "--latency 'soon'"),
    ],
)
def test_a_bad_command_line_is_refused_in_one_line(argv: str, named: str) -> None:
    run = emulate(*argv.split())
    out, err = run.communicate(timeout=PATIENCE)
    assert (run.returncode, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("launch/emulate_nodes.sh: ")
    assert named in err


def test_without_root_it_says_so() -> None:
    if os.geteuid() != 0:
        user = []
    elif shutil.which("setpriv"):
        user = ["setpriv", "--reuid", "65534", "--clear-groups"]
    else:
        pytest.skip("setpriv missing: root cannot play somebody else")
    argv = [*user, "bash", SCRIPT, "--nodes", "2", "--ranks-per-node", "2", "--", "x.py"]
    done = executed(*argv, CUDA_VISIBLE_DEVICES="")
    if "Permission denied" in done.stderr:
        pytest.skip(f"others may not read {SCRIPT}")
    said = "launch/emulate_nodes.sh: network namespaces need root; start it with sudo\n"
    assert (done.returncode, done.stderr) == (2, said)
