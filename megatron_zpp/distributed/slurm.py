"""Translates the variables that SLURM gives to a task of srun into torchrun's: arithmetic on strings."""

import re
from collections.abc import Mapping

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
RANKS_PORT = "ZPP_MASTER_PORT"  # replaces torchrun's MASTER_PORT; set by commands/torchrun.py, which says why
_NOT_SRUNS = 0xFFFFFFF0  # step ids from here on are reserved: the shell of salloc, the batch script

# Below the ports that Linux and Kubernetes assign (32768, 30000) and torchrun's 29500. The number of ports is
# prime and a job takes a stride of them, so that two jobs share a first port only if their ids differ by a
# multiple of it. The steps of a job, one per restart, have different ports.
_FIRST_PORT, _PORTS, _STRIDE = 10000, 19489, 31

_NUMBERS = r"\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\]"
_HOST = re.compile(rf"(?:[^\[\],\s]|{_NUMBERS})+")
_TASKS = re.compile(r"([1-9]\d{0,5})(?:\(x([1-9]\d{0,5})\))?")


def launcher_variables(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return `environment`, with torchrun's variables added if only SLURM's are set.

    Torchrun's variables take precedence, also if srun started torchrun, but for a port in RANKS_PORT. A
    process that srun did not start is a single rank: in the shell of salloc or a batch script, SLURM's
    variables describe the job, not the process. MASTER_ADDR and MASTER_PORT are kept if set. Raises
    ValueError if SLURM's variables are missing or malformed, if nodes have different numbers of tasks, if
    ranks are not numbered node by node, or if mpirun started them.
    """
    if any(name in environment for name in TORCHRUN_VARIABLES):
        port = environment.get(RANKS_PORT)
        return {**environment, "MASTER_PORT": port} if port else environment
    # Only a process that srun has started has a step and a rank.
    in_step = "SLURM_PROCID" in environment and environment.get("SLURM_STEP_ID")
    task = in_step and _number(environment, "SLURM_STEP_ID") < _NOT_SRUNS
    of_mpi = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")[: 1 if task else 2]  # srun may set the second too
    if started := [name for name in of_mpi if environment.get(name, "1") != "1"]:
        raise ValueError(
            f"{started[0]} {environment[started[0]]}: mpirun does not say all that ranks need; start with "
            f"torchrun or srun, or set {', '.join(TORCHRUN_VARIABLES)}, MASTER_ADDR and MASTER_PORT"
        )
    if not task:
        return environment
    if size := environment.get("SLURM_HET_SIZE"):
        raise ValueError(
            f"SLURM_HET_SIZE {size}: heterogeneous jobs number the ranks of each component by itself; submit "
            "one component, with the same number of tasks on each node"
        )
    rank = _number(environment, "SLURM_PROCID")
    world_size = _number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    local_rank, node = _number(environment, "SLURM_LOCALID"), _number(environment, "SLURM_NODEID")
    name, layout = _first_of(environment, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    local_world_size = _tasks_per_node(name, layout, world_size)
    expected = node * local_world_size + local_rank
    if rank != expected:
        raise ValueError(
            f"SLURM_PROCID {rank}: must be {expected}, as task {local_rank} of node {node}, which has "
            f"{local_world_size} tasks like the others; start with srun --distribution=block"
        )
    values = (rank, world_size, local_rank, local_world_size)
    said = dict(zip(TORCHRUN_VARIABLES, map(str, values), strict=True))
    return {**rendezvous_endpoint(environment), **environment, **said}


def rendezvous_endpoint(environment: Mapping[str, str]) -> dict[str, str]:
    """Return MASTER_ADDR and MASTER_PORT, equal on all tasks of a step: its first node and the step's port.

    Values that are set are kept. Raises ValueError if SLURM's variables are missing or malformed.
    """
    address, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if not address:
        address = first_host(*_first_of(environment, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"))
    if not port:
        port = str(port_of(_number(environment, "SLURM_JOB_ID"), _number(environment, "SLURM_STEP_ID")))
    return {"MASTER_ADDR": address, "MASTER_PORT": port}


def ranks_port(environment: Mapping[str, str]) -> str:
    """A second port of a step: of the ranks' store, where torchrun has a store of its own."""
    job, step = _number(environment, "SLURM_JOB_ID"), _number(environment, "SLURM_STEP_ID")
    return str(port_of(job, step, second=True))


def port_of(job: int, step: int, *, second: bool = False) -> int:
    """Return the port of the rendezvous of a step, or its second one, from 10000 to 29488."""
    return _FIRST_PORT + (job * _STRIDE + step + second * (_PORTS // 2)) % _PORTS


def first_host(name: str, hosts: str) -> str:
    """The first of SLURM's host list, e.g. `n001` of `n[001-003,7],m2`. Raises ValueError."""
    first = _HOST.match(hosts)
    if first is None or hosts[first.end() :][:1] not in ("", ","):
        raise ValueError(f"{name} {hosts!r}: must be a host list such as n[001-003,7],m2")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])


def _tasks_per_node(name: str, layout: str, tasks: int) -> int:
    """Return 4 for `4(x16)`. Raises ValueError unless it is `tasks` in total."""
    groups = [_TASKS.fullmatch(part) for part in layout.split(",")]
    if not all(groups):
        raise ValueError(f"{name} {layout!r}: must be tasks per node, such as 4(x16)")
    counts = [(int(group[1]), int(group[2] or 1)) for group in groups if group]
    if len({count for count, _ in counts}) > 1:
        raise ValueError(
            f"{name} {layout}: all nodes must have the same number of tasks; set it with --ntasks-per-node"
        )
    total = sum(count * nodes for count, nodes in counts)
    if total != tasks:
        raise ValueError(f"{name} {layout}: must be the {tasks} tasks of this step; start with srun")
    return counts[0][0]


def _first_of(environment: Mapping[str, str], *names: str) -> tuple[str, str]:
    """Return name and value of the first variable that is set; srun's come before sbatch's."""
    for name in names:
        if environment.get(name):
            return name, environment[name]
    raise ValueError(f"{names[0]} (not set): SLURM_PROCID is set; start with srun, which sets both")


def _number(environment: Mapping[str, str], *names: str) -> int:
    name, text = _first_of(environment, *names)
    if not text.isdecimal() or len(text) > 10:
        raise ValueError(f"{name} {text!r}: must be a whole number")
    return int(text)
