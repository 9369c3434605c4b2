"""What a launch script hands to the program is caught; the page of public scripts says what was measured."""

import json
import re
from pathlib import Path

from benchmarks.common import RESULTS
from benchmarks.public_scripts import SCRIPTS, placeholders, recorded
from tests.support import ROOT

SCRIPT = r"""
source $six_ALL_CCFRWORK/start
cd /nowhere/code
HOSTS=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
N=$(nvidia-smi | wc -l)
CMD="`pwd`/pretrain_gpt.py --vocab-file <Specify path> --nodes $SLURM_NNODES --gpus $N --first $1"
srun --jobid $SLURM_JOBID bash -c "python -m torch.distributed.run --rank \$SLURM_PROCID $CMD" &>> /no/log
"""


def test_a_script_runs_up_to_the_program_that_it_starts(tmp_path: Path) -> None:
    script = tmp_path / "run.slurm"
    script.write_text(SCRIPT)
    program, words, directory = recorded(script, tmp_path, 4, 8, ["x"])
    assert (program, directory) == ("pretrain_gpt.py", str(tmp_path))
    assert words == ["--vocab-file", "given", "--nodes", "4", "--gpus", "8", "--first", "x"]
    line = ["--data-path", "0.5", "theirs", "--load", "theirs", "--lr", "1"]
    files = [tmp_path / name for name in ("data", "checkpoints")]
    assert [*placeholders(line, tmp_path)] == [
        *("--data-path", "0.5", str(files[0]), "--load", str(files[1]), "--lr", "1")
    ]


def test_the_page_has_the_outcome_of_every_script() -> None:
    figures = json.loads((RESULTS / "public_scripts.json").read_text())["figures"]
    page = (ROOT / "docs/guide/public_scripts.md").read_text()
    fates = figures["scripts"]
    assert [line.split()[0] for line in SCRIPTS.read_text().splitlines()] == [*fates]
    told = re.findall(r"^\| `([^`]+)` \| \d+ × \d+ \| (plans|refused)", page, flags=re.MULTILINE)
    assert told == [(path.partition("/")[2], fate.partition(":")[0]) for path, fate in fates.items()]
    assert f"{figures['plan']} of {figures['of']} public scripts" in page
