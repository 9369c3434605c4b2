"""One node's torchrun in a SLURM step: `megatron-zpp torchrun --nproc-per-node N FILE …`.

It differs from torchrun in four ways. SLURM provides the number of nodes and the rendezvous address. USR1
and TERM are sent to the ranks, and torchrun waits for them. The exit status is that of the ranks, so that a
job knows whether to resume. The ranks' store has a port that follows from job and step: torchrun would choose
one that is free while it starts, and any program may take that until rank 0 has imported torch.
"""

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from megatron_zpp.config.command_line import one_line, program_name
from megatron_zpp.distributed.slurm import RANKS_PORT, ranks_port, rendezvous_endpoint
from megatron_zpp.train.steps.stopping import NOT_FINITE, STOPPED

_USAGE = 2
_SAID_BY_ALL = (STOPPED, NOT_FINITE, _USAGE)  # statuses with which all ranks end together


def main() -> None:
    """Run the ranks of this node; exit with 0 or with the status of the rank that failed first."""
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, _: pass_on(number))
    # On TERM, torchrun would end ranks that are saving, without returning their status.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGINT,SIGHUP,SIGQUIT"
    # Ranks then use a store of rank 0, which outlives a torchrun that ends early.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    try:
        flags = rendezvous_flags(os.environ)
        os.environ[RANKS_PORT] = ranks_port(os.environ)
        run(parse_args([*flags, *sys.argv[1:]]))
    except ChildFailedError as error:
        failures = sorted(error.failures.values(), key=lambda failure: failure.timestamp)
        sys.exit(status_of([failure.exitcode for failure in failures]))
    except Exception as error:
        sys.stderr.write(f"{program_name()} [{os.uname().nodename}]: error: {one_line(error)}\n")
        sys.exit(1)


def rendezvous_flags(environment: Mapping[str, str]) -> list[str]:
    """torchrun's flags for this node of a SLURM step. Raises ValueError if a variable is missing."""
    for name in ("SLURM_NODEID", "SLURM_STEP_NUM_NODES", "SLURMD_NODENAME"):
        if not environment.get(name):
            raise ValueError(f"{name} (not set): start it with srun; on one machine torchrun serves")
    place = rendezvous_endpoint(environment)
    flags = {
        "nnodes": environment["SLURM_STEP_NUM_NODES"],
        "max-restarts": "0",  # torchrun restarts after any status; the job decides by status
        "local-addr": environment["SLURMD_NODENAME"],
        "rdzv-backend": "c10d",
        "rdzv-endpoint": f"{place['MASTER_ADDR']}:{place['MASTER_PORT']}",
        "rdzv-id": f"{environment['SLURM_JOB_ID']}.{environment['SLURM_STEP_ID']}",
        "rdzv-conf": f"is_host={int(environment['SLURM_NODEID'] == '0')}",
    }
    return [f"--{name}={value}" for name, value in flags.items()]


def pass_on(number: int) -> None:
    """Send a signal to the ranks; before they start, end this process: there is nothing to save."""
    ranks = children(os.getpid())
    if not ranks:
        sys.exit(128 + number)
    for rank in ranks:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(rank, number)


def children(parent: int) -> list[int]:
    """The child processes of `parent` that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, its_parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it has just ended
            continue
        if int(its_parent) == parent and state != "Z":
            found.append(int(stat.parent.name))
    return found


def status_of(codes: Sequence[int]) -> int:
    """One status for a node, from those of its ranks, of which the first has failed first.

    Signals come last: torchrun ends the remaining ranks when one exits.
    """
    for status in _SAID_BY_ALL:
        if status in codes:
            return status
    return codes[0] if codes[0] > 0 else 128 - codes[0]
