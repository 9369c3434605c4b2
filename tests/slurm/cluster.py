"""A SLURM of two nodes on this machine: real daemons with ports, keys and states of their own; needs root."""

import os
import platform
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

from tests.support import ROOT, environment, free_port, wait_until

_TOOLS = ("slurmctld", "slurmd", "munged", "sbatch", "scontrol", "unshare", "mount", "setpriv")
_PATIENCE = 240.0  # seconds
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY")
# A requeued job waits until the credentials of its last start are void: cred_expire, which is at least 5 s.
_CONFIGURATION = """
ClusterName=megatron-zpp
SlurmctldHost=localhost
SlurmctldPort={controller}
SlurmctldPidFile={root}/slurmctld.pid
SlurmctldLogFile={root}/slurmctld.log
StateSaveLocation={root}/state
SlurmUser=root
SlurmdUser=root
SlurmdPidFile={root}/slurmd-%n.pid
SlurmdLogFile={root}/slurmd-%n.log
SlurmdSpoolDir={root}/spool-%n
SlurmdParameters=config_overrides
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=sched_min_interval=100000,sched_interval=1
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def why_not() -> str | None:
    """Why no SLURM can be started here."""
    if os.geteuid() != 0:
        return "SLURM's daemons need root"
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(missing)} missing; on Debian and Ubuntu apt-get install slurm-wlm munge"
    probe = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True)
    return f"no mount namespaces here: {probe.stderr.strip()}" if probe.returncode else None


class Cluster:
    """Nodes n1 and n2, both this machine, where their names are known too. Use it in a `with` block."""

    def __init__(self, root: Path) -> None:
        self._root, self._daemons = root, []
        (root / "munge.key").write_bytes(os.urandom(128))
        (root / "munge.key").chmod(0o600)
        (root / "state").mkdir()
        (root / "hosts").write_text(Path("/etc/hosts").read_text() + "\n127.0.0.1 n1 n2\n")
        lines = [
            f"NodeName={node} NodeHostname={platform.node()} NodeAddr=127.0.0.1 Port={free_port()} CPUs=8"
            for node in ("n1", "n2")
        ]
        text = _CONFIGURATION.format(root=root, controller=free_port()) + "\n".join(lines) + "\n"
        (root / "slurm.conf").write_text(text)
        self.environment = environment(SLURM_CONF=str(root / "slurm.conf"))
        del self.environment["PYTHONPATH"]  # the scripts find the repository themselves

    def __enter__(self) -> "Cluster":
        root = self._root
        names = {name: f"{root}/munge.{name}" for name in ("key-file", "socket", "pid-file", "seed-file")}
        names["key-file"] = f"{root}/munge.key"
        options = [f"--{name}={path}" for name, path in names.items()]
        self._daemon("munged", "--foreground", "--force", f"--log-file={root}/munge.log", *options)
        wait_until((root / "munge.socket").exists, _PATIENCE)
        self._daemon("slurmctld", "-D")
        for node in ("n1", "n2"):
            known = f"mount --bind {root}/hosts /etc/hosts && exec slurmd -D -N {node}"
            self._daemon("unshare", "--mount", "bash", "-c", known)
        wait_until(
            lambda: self.ask("sinfo", "--noheader", "--format=%D %T", check=False) == "2 idle\n", _PATIENCE
        )
        return self

    def __exit__(self, *exception: object) -> None:
        self.ask("scancel", "--user=root", check=False)
        deadline = time.monotonic() + 15
        while self.ask("squeue", "--noheader", check=False) and time.monotonic() < deadline:
            time.sleep(0.2)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _daemon(self, *argv: str) -> None:
        with open(self._root / f"daemon-{len(self._daemons)}.log", "w") as log:
            command = ["setpriv", "--pdeathsig", "TERM", *argv]
            daemon = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)
        self._daemons.append(daemon)

    def logs(self) -> str:
        """The last lines of each daemon."""
        last = {file.name: file.read_text().splitlines()[-60:] for file in sorted(self._root.glob("*.log"))}
        return "\n".join(f"{name}:\n" + "\n".join(lines) for name, lines in last.items())

    def ask(self, *argv: str, check: bool = True) -> str:
        """The output of one of SLURM's commands."""
        done = subprocess.run(argv, env=self.environment, capture_output=True, text=True, timeout=_PATIENCE)
        assert done.returncode == 0 or not check, (argv, done.stdout, done.stderr)
        return done.stdout


class Job:
    """A script of launch/slurm, submitted from `directory`; `resources` win over its own."""

    def __init__(
        self, cluster: Cluster, directory: Path, script: str, resources: str, *flags: str, **variables: str
    ) -> None:
        directory.mkdir(exist_ok=True)
        self._cluster, self.directory = cluster, directory
        command = ["sbatch", "--parsable", *resources.split(), ROOT / "launch" / "slurm" / script, *flags]
        environment = cluster.environment | variables
        done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        self.id = done.stdout.strip()

    def log(self, task: str = "") -> str:
        """The output of the job, or of a task of an array, in the file that SLURM names by its id."""
        files = list(self.directory.glob(f"*-{self.id}{task and '_' + task}.out"))
        return files[0].read_text() if files else ""

    def wait_for(self, text: str, times: int = 1, task: str = "") -> None:
        """Wait until the log contains `text` so often; fail if the job ends earlier."""
        wait_until(lambda: self.log(task).count(text) >= times or self._ended(task), _PATIENCE, every=0.2)
        assert self.log(task).count(text) >= times, self.log(task)

    def signal(self, *argv: str, task: str = "") -> None:
        """scancel with these arguments."""
        self._cluster.ask("scancel", *argv, self.id + (task and f"_{task}"))

    def signal_held(self, hold: Path, variable: str, task: str = "") -> None:
        """USR1 to a job whose ranks wait while `hold` is there; it goes when one of them has the signal.

        That one, which `rank` finds by `variable`, is stopped meanwhile: its pending signals are seen.
        """
        rank = self.rank(variable)
        os.kill(rank, signal.SIGSTOP)
        self.signal("--batch", "--signal=USR1", task=task)
        try:
            wait_until(lambda: _pending(rank, signal.SIGUSR1), _PATIENCE)
        except AssertionError:
            raise AssertionError(f"no USR1 at {rank}\n{self.log(task)}\n{self._cluster.logs()}") from None
        hold.unlink()
        os.kill(rank, signal.SIGCONT)

    def wait(self, task: str = "") -> dict[str, str]:
        """SLURM's record of the job after its final end."""
        wait_until(lambda: self._ended(task), _PATIENCE, every=0.2)
        return self._facts(task)

    def rank(self, variable: str) -> int:
        """The process of pretrain_gpt.py in this job that has this variable in its environment.

        One that it has just forked, to start another program, is still like it.
        """
        found = {
            int(process.name)
            for process in Path("/proc").glob("[0-9]*")
            if _has(process, f"SLURM_JOB_ID={self.id}", variable)
        }
        (first,) = (each for each in found if not found & {_parent(each)})
        return first

    def _facts(self, task: str) -> dict[str, str]:
        shown = self._cluster.ask("scontrol", "show", "job", self.id + (task and f"_{task}"))
        return dict(re.findall(r"(\w+)=(\S*)", shown))

    def _ended(self, task: str) -> bool:
        return self._facts(task)["JobState"] in _ENDED


def _pending(process_id: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{process_id}/status").read_text()
    return bool(int(re.search(r"ShdPnd:\s*(\w+)", status)[1], 16) >> (number - 1) & 1)


def _parent(process_id: int) -> int:
    try:
        status = Path(f"/proc/{process_id}/status").read_text()
    except OSError:  # it has just ended
        return process_id
    return int(re.search(r"PPid:\s*(\d+)", status)[1])


def _has(process: Path, *variables: str) -> bool:
    try:
        environ = set((process / "environ").read_text(errors="replace").split("\0"))
        return set(variables) <= environ and b"pretrain_gpt.py" in (process / "cmdline").read_bytes()
    except OSError:  # it has just ended
        return False
