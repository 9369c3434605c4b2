"""Makes the result of the real run from its metrics, and draws its curves.

python benchmarks/real_run/result.py --runs DIR        DIR: --output of run.py; several are one run
python benchmarks/real_run/result.py --plot FILE.png   draws benchmarks/results/real_run.json

The result has the mean training loss of each eight steps, the held-out losses and the step times.
"""

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from the root, not installed

from benchmarks.common import RESULTS, program_parser, save_result

NAMES = {
    "plain": "plain PyTorch, compiled",
    "plain_again": "plain PyTorch, again",
    "plain_bf16": "plain PyTorch, residual in bf16",
    "stage_0": "megatron_zpp, stage 0",
    "wide": "stage 0, residual in fp32",
    "zeropp": "stage 3, delta4 and rotated4, two nodes",
    "fp8": "8-bit matmuls",
    "resumed": "resumed five times on other meshes",
    "muon": "Muon",
}
BASELINE = "stage_0"
LAST = 0.05  # share of the steps whose mean is the final training loss
EVERY = 8  # steps whose losses have one mean
SMOOTHING = 0.85  # of these means


def main() -> None:
    parser = program_parser(__doc__)
    parser.add_argument("--runs", type=Path, nargs="+", help="folders; a variant is taken from the last one")
    parser.add_argument("--name", default="real_run", help="of the result")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    if options.runs:
        metrics = {path.stem: path for folder in options.runs for path in sorted(folder.glob("*.jsonl"))}
        save_result(options.name, figures(options.runs, metrics), options.output)
    if options.plot:
        draw(json.loads((options.output / f"{options.name}.json").read_text())["figures"], options.plot)


def read(path: Path) -> tuple[dict[int, dict[str, Any]], dict[int, float]]:
    """Return the records of the steps and the held-out losses; of a step taken twice, the later one."""
    steps: dict[int, dict[str, Any]] = {}
    held_out: dict[int, float] = {}
    for record in map(json.loads, path.read_text().splitlines()):
        if "lm_loss" in record:
            steps[record["iteration"]] = record
        elif "valid_loss" in record:
            held_out[record["iteration"]] = record["valid_loss"]
    return dict(sorted(steps.items())), dict(sorted(held_out.items()))


def figures(folders: Sequence[Path], metrics: dict[str, Path]) -> dict[str, Any]:
    """Return the settings of the runs, and the curves and final losses of each."""
    runs = {}
    for name, path in metrics.items():
        steps, held_out = read(path)
        losses = [record["lm_loss"] for record in steps.values()]
        last = losses[-max(1, int(LAST * len(losses))) :]
        parts = [losses[first : first + EVERY] for first in range(0, len(losses), EVERY)]
        runs[name] = {
            "steps": len(losses),
            "median_step_ms": round(statistics.median(record["elapsed_ms"] for record in steps.values()), 2),
            "hours": round(sum(record["elapsed_ms"] for record in steps.values()) / 3.6e6, 4),
            "final_training_loss": round(statistics.fmean(last), 5),
            "final_held_out_loss": round(list(held_out.values())[-1], 5) if held_out else None,
            "held_out": {str(step): round(loss, 5) for step, loss in held_out.items()},
            "losses": [round(statistics.fmean(part), 4) for part in parts],
        }
    return {"described": [json.loads((folder / "run.json").read_text()) for folder in folders], "runs": runs}


def held_out(result: dict[str, Any], name: str) -> dict[float, float]:
    """The held-out losses of a run by the millions of tokens that it has seen."""
    million = million_tokens_of_a_step(result)
    losses = result["runs"][name]["held_out"].items()
    return {million * int(step): loss for step, loss in losses if int(step)}


def million_tokens_of_a_step(result: dict[str, Any]) -> float:
    """Those that all runs of a result read."""
    settings = result["described"][0]["settings"]
    return float(settings["million_tokens"]) / float(settings["steps"])


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the training loss and the held-out loss, and how far the latter is from the baseline's."""
    from matplotlib.figure import Figure

    runs = {name: result["runs"][name] for name in NAMES if name in result["runs"]}
    figure = Figure(figsize=(8, 9), layout="constrained")
    above, below, timed = figure.subplots(3, height_ratios=(3, 1.4, 1.8))
    below.sharex(above)
    million = million_tokens_of_a_step(result)
    base = held_out(result, BASELINE) if BASELINE in runs else {}
    for number, (name, run) in enumerate(runs.items()):
        colour = f"C{number}"
        smooth, mean = [], run["losses"][0]
        for loss in run["losses"]:
            mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
            smooth.append(mean)
        seen = [million * EVERY * part for part in range(1, len(smooth) + 1)]
        above.plot(seen, smooth, color=colour, lw=1, label=NAMES[name])
        minutes = [run["median_step_ms"] * EVERY * part / 6e4 for part in range(1, len(smooth) + 1)]
        if name not in ("wide", "resumed"):  # which were not timed beside the others
            timed.plot(minutes, smooth, color=colour, lw=1)
        losses = held_out(result, name)
        above.plot(list(losses), list(losses.values()), "o", ms=3, color=colour)
        gaps = {at: 100 * (loss / base[at] - 1) for at, loss in losses.items() if at in base}
        below.plot(list(gaps), list(gaps.values()), "o-", ms=2, lw=1, color=colour)
    above.set_ylabel("loss: training (lines), held out (dots)")
    top = max(run["losses"][len(run["losses"]) // 40] for run in runs.values())
    above.set_ylim(top=top)
    timed.set(xlabel="minutes, at the median step", ylabel="training loss", ylim=(None, top))
    above.legend(frameon=False)
    below.set_ylabel(f"held out: % above\n{NAMES[BASELINE]}")
    below.set_xlabel("million tokens seen")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
