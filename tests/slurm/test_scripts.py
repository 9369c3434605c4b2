"""What the scripts of launch/slurm refuse, and what they give to srun; no SLURM is needed for that."""

import subprocess
from pathlib import Path

import pytest

from megatron_zpp.config.root import parse_args
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.exchange.route import check_routes
from tests.support import ROOT, executed

SCRIPTS = sorted(path.name for path in (ROOT / "launch" / "slurm").glob("*.sbatch"))
SAVED = ("--save", "there", "--load=there")
CROWDED = {"SLURM_NTASKS_PER_NODE": "8", "SLURM_GPUS_ON_NODE": "4"}
JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "ZPP_ROOT": str(ROOT), "PYTHON": "python3"}


def script(
    directory: Path, name: str, *flags: str, srun: str | None = None, **variables: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run a script as a job would, with a stand-in for srun; return the result and the arguments of srun."""
    given = directory / "given"
    (directory / "srun").write_text(srun or f"#!/bin/sh\nprintf '%s\\n' \"$@\" >{given}\n")
    (directory / "srun").chmod(0o755)
    path = f"{directory}:/usr/local/bin:/usr/bin:/bin"
    argv = ("bash", ROOT / "launch" / "slurm" / name, *flags)
    done = executed(*argv, cwd=directory, PATH=path, **variables)
    return done, given.read_text().splitlines() if given.exists() else []


@pytest.mark.parametrize("name", SCRIPTS)
def test_outside_of_a_job_it_says_how_to_submit_it(name: str, tmp_path: Path) -> None:
    done, given = script(tmp_path, name, *SAVED)
    assert (done.returncode, done.stderr.count("\n"), given) == (2, 1, [])
    assert "submit it: sbatch" in done.stderr


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_is_requeued_and_told_of_its_time_limit(name: str) -> None:
    text = (ROOT / "launch" / "slurm" / name).read_text()
    for line in ("--requeue", "--open-mode=append", "--signal=B:USR1@"):
        assert f"#SBATCH {line}" in text
    assert ("%A_%a" if "--array" in text else "%j") in text  # logs of two jobs are two files


@pytest.mark.parametrize(
    ("name", "flags", "variables", "said"),
    [
        ("pretrain_gpt", (), {}, "MAX_REQUEUES 100: needs --save DIRECTORY and a --load equal to it"),
        ("pretrain_gpt", ("--save", "a", "--load", "b"), {}, "MAX_REQUEUES 100: needs --save DIRECTORY"),
        ("pretrain_gpt", (*SAVED, "--finetune"), {}, "--finetune: a second start would not go on"),
        ("pretrain_gpt", (*SAVED, "--config=run.yaml"), {}, "finetune: true in --config run.yaml: a second"),
        ("pretrain_gpt", ("--save", "a"), {"MAX_RESTARTS": "0"}, "MAX_RESTARTS 0, MAX_REQUEUES 100: needs"),
        ("pretrain_gpt", SAVED, {"MAX_RESTARTS": "many"}, "MAX_RESTARTS many: must be a whole number"),
        ("pretrain_gpt", SAVED, {"MAX_REQUEUES": "-1"}, "MAX_REQUEUES -1: must be a whole number"),
        ("pretrain_gpt", SAVED, {"PYTHON": "nopython"}, "PYTHON nopython: not found"),
        ("pretrain_gpt", SAVED, {"ZPP_ENVIRONMENT": "gone.sh"}, "ZPP_ENVIRONMENT gone.sh: cannot be read"),
        ("pretrain_gpt", SAVED, {"ZPP_ROOT": "/nowhere"}, "ZPP_ROOT: set it to the repository"),
        ("pretrain_gpt", SAVED, CROWDED, "--ntasks-per-node 8: must be at most the 4 GPUs of a node"),
        ("pretrain_gpt_torchrun", SAVED, {}, "RANKS_PER_NODE (not set): must be a whole number"),
        ("pretrain_gpt_torchrun", SAVED, {"RANKS_PER_NODE": "0"}, "RANKS_PER_NODE 0: must be"),
        ("sweep", ("points",), {}, "usage: sbatch --array=1-LINES"),
        ("sweep", ("gone", "runs"), {"SLURM_ARRAY_TASK_ID": "1"}, "POINTS gone: cannot be read"),
        ("sweep", ("points", "runs"), {}, "--array: task none must be the number of a line of points"),
        ("sweep", ("points", "runs"), {"SLURM_ARRAY_TASK_ID": "0"}, "task 0 must be the number of a line"),
        ("sweep", ("points", "runs"), {"SLURM_ARRAY_TASK_ID": "3"}, "task 3, but points has 2 lines"),
        ("sweep", ("points", "runs"), {"SLURM_ARRAY_TASK_ID": "2"}, "POINTS points: line 2 is empty"),
    ],
)
def test_mistakes_are_refused_in_one_line(
    name: str, flags: tuple[str, ...], variables: dict[str, str], said: str, tmp_path: Path
) -> None:
    (tmp_path / "points").write_text("--lr 1e-3\n\n")
    (tmp_path / "run.yaml").write_text("checkpoint:\n  finetune: true\n")
    done, given = script(tmp_path, f"{name}.sbatch", *flags, **JOB | variables)
    assert (done.returncode, done.stderr.count("\n"), given) == (2, 1, []), done.stderr
    assert said in done.stderr


def test_flags_reach_the_program_as_they_are(tmp_path: Path) -> None:
    """They follow the site's arguments of srun and of the container, which the site's file sets."""
    site = tmp_path / "site of ours.sh"
    site.write_text(
        "srun_arguments=(--container-image 'an image')\ncontainer=(apptainer exec --nv our.sif)\n"
        "false\nexport SITE=$UNSET_BY_US\nPYTHON=python-of-the-container\n"
    )
    flags = (*SAVED, "--data-path", "two words", "$HOME;*")
    extra = {**JOB, "ZPP_ENVIRONMENT": str(site), "SLURM_CPUS_PER_TASK": "6"}
    del extra["PYTHON"]
    done, given = script(tmp_path, "pretrain_gpt.sbatch", *flags, **extra)
    assert done.returncode == 0, done.stderr
    behind = ["--container-image", "an image", "apptainer", "exec", "--nv", "our.sif"]
    behind += ["python-of-the-container", f"{ROOT}/pretrain_gpt.py", *flags]
    assert given[-len(behind) :] == behind
    assert "--cpus-per-task=6" in given  # which srun does not take over from sbatch by itself


def test_the_step_gets_a_secret_of_the_job_by_its_environment(tmp_path: Path) -> None:
    """Another one for each job, unless the site's file sets one, exported or not."""
    site = tmp_path / "site.sh"
    site.write_text(f"MEGATRON_ZPP_SECRET={'s' * 40}\n")
    srun = f'#!/bin/sh\necho "$MEGATRON_ZPP_SECRET" >>{tmp_path}/secrets\n'
    for extra in ({}, {}, {"ZPP_ENVIRONMENT": str(site)}):
        done, _ = script(tmp_path, "pretrain_gpt.sbatch", *SAVED, srun=srun, **JOB, **extra)
        assert (done.returncode, done.stderr) == (0, "")
    one, other, of_site = (tmp_path / "secrets").read_text().splitlines()
    assert one != other
    assert {len(one), len(other)} == {64}
    assert of_site == "s" * 40


def test_ranks_are_not_those_of_the_process_that_submitted_the_job(tmp_path: Path) -> None:
    srun = '#!/bin/sh\n[ -z "$RANK$WORLD_SIZE$LOCAL_RANK$LOCAL_WORLD_SIZE" ]\n'
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    done, _ = script(tmp_path, "pretrain_gpt.sbatch", *SAVED, srun=srun, MAX_RESTARTS="0", **JOB, **alone)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_signal_while_the_step_is_started_reaches_it(tmp_path: Path) -> None:
    """It comes when the script does not know srun's process yet. TERM asks for a save without a requeue."""
    moment = tmp_path / "moment.sh"
    moment.write_text("set -T\ntrap '[[ $BASH_COMMAND != *{step?@* ]] || kill -TERM $$' DEBUG\n")
    (tmp_path / "sleep").write_text(  # instead of the ten seconds for which srun drops signals
        "#!/bin/sh\nwhile [ ! -e ready ]; do /bin/sleep 0.1; done\n"
    )
    (tmp_path / "sleep").chmod(0o755)
    srun = "#!/bin/sh\ntrap 'exit 75' USR1\n: >ready\nfor i in 1 2 3 4 5 6 7 8 9; do /bin/sleep 1; done\n"
    done, _ = script(tmp_path, "pretrain_gpt.sbatch", *SAVED, srun=srun, BASH_ENV=str(moment), **JOB)
    assert (done.returncode, done.stderr) == (75, "")


def test_the_18b_model_fits_its_nodes(tmp_path: Path) -> None:
    """4 nodes of 16: its flags make one configuration that 64 ranks accept, of 18 billion parameters."""
    data = "--mock-data --tokenizer-type NullTokenizer --vocab-size 50256 --train-iters 10 --lr 1e-4".split()
    done, given = script(tmp_path, "zeropp_18b.sbatch", *data, *SAVED, **JOB)
    assert done.returncode == 0, done.stderr
    config = parse_args(given[given.index(f"{ROOT}/pretrain_gpt.py") + 1 :], "pretrain_gpt.py")
    check_routes(config.zero, Topology(17, 64, 1, 16).mesh())
    assert config.zero.describe() == "ZeRO stage 3 + qwZ int8 + hpZ 16 + qgZ int4"
    assert 12 * config.model.num_layers * config.model.hidden_size**2 == pytest.approx(18e9, rel=0.01)
    text = (ROOT / "launch" / "slurm" / "zeropp_18b.sbatch").read_text()
    for line in ("--nodes=4", "--ntasks-per-node=16", "--gpus-per-node=16"):
        assert f"#SBATCH {line}\n" in text
