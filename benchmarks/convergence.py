"""Does a cheaper exchange cost loss? Pairs of emulated runs, with and without it.

python benchmarks/convergence.py --size 10m --ladder first --pairs 16 --processes 4
python benchmarks/convergence.py --size 60m --rungs "delta4 rotated4" --pairs 64 --processes 4
python benchmarks/convergence.py --text build/corpus/tokens --rungs "baseline, nudged" today
python benchmarks/convergence.py --list   prints the rungs, their bytes and the ladders

One process trains as K nodes × L ranks would: the same codes, blocks, rotations and order of sums. Runs of
one seed have the same initial weights and the same samples. A run sees no sample twice, be it of a synthetic
language or of real text (--text), and all runs are evaluated on the same held-out samples. The gap of a rung
is the final loss above that of the baseline of the same seed, in percent: its mean over the pairs and the 95%
interval of the mean (Student's t). Where that interval holds zero no cost was shown.

Each finished run is a line of --runs-file, so the same command resumes a campaign that was stopped. The exit
status is 75 where --limit-seconds ended the call, and 0 where all pairs are there. A seed is begun only if
all of its runs can end in time, so calls end with whole pairs. A result is only extended: a call whose
--runs-file lacks some of its pairs is refused, and needs another --name.

python benchmarks/convergence.py --plot RESULT.json   draws the gap of the training loss over a run

--descend tunes optimizers by coordinate descent (emulation/descent.py), without codes, and finds with what
share of AdamW's tokens Muon has its loss. --tuned takes the best settings that it has found, for pairs or as
the start of the searches of another size:

python benchmarks/convergence.py --descend adamw muon --text TOKENS --entries 4096 --name tuned_10m
python benchmarks/convergence.py --tuned RESULT.json --ladder muon --text TOKENS --entries 4096

Islands (emulation/islands.py) are rungs with settings of their own. --descend islands tunes the outer
optimizer for the inner one of --optimizer, and its result goes to --tuned beside that of the inner one:

python benchmarks/convergence.py --descend islands --optimizer muon --tuned tuned.json --name outer
python benchmarks/convergence.py --ladder islands --optimizer muon --tuned tuned.json outer.json
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

from benchmarks.common import STOPPED, program_parser, save_result
from benchmarks.emulation.descent import SEARCHES, Comparison
from benchmarks.emulation.rungs import BASELINE, GATE_PAIRS, ISLANDS, LADDERS, RUNGS, Rung
from benchmarks.emulation.text import Text, coarser
from benchmarks.paired_runs import Job, PairedRuns, Run, campaign_arguments, gap_cells, gaps_of
from benchmarks.paired_runs import key_of as key_of_all

# By size: steps, samples of a micro-batch, samples and times of the evaluation, share of the warm-up. With a
# warm-up of 25 steps 1M became unstable at its end, and pairs scattered by 0.3%; with 100 by 0.01%.
DEFAULTS = {
    "tiny": (40, 2, 64, 2, 0.2),
    "1m": (500, 2, 512, 2, 0.2),
    "10m": (600, 4, 512, 4, 0.15),
    "30m": (1000, 4, 512, 4, 0.1),
    "60m": (1200, 4, 512, 4, 0.1),
    "125m": (5000, 4, 512, 4, 0.1),
}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line, checked."""
    parser = program_parser(__doc__)
    parser.add_argument("--size", choices=list(DEFAULTS), default="10m", help="parameters")
    parser.add_argument("--rungs", nargs="+", default=[], help="names from --list")
    parser.add_argument("--ladder", nargs="+", default=[], choices=list(LADDERS), help="several rungs")
    parser.add_argument(
        "--text", type=Path, help="a folder of corpus/make_tokens.py, whose vocabulary the model then has"
    )
    parser.add_argument(
        "--entries", type=int, help="tokens of --text are split into so many of its vocabulary"
    )
    parser.add_argument("--descend", nargs="+", default=[], choices=list(SEARCHES), metavar="OPTIMIZER")
    parser.add_argument("--tolerance", type=float, default=0.1, help="percent by which a step must help")
    parser.add_argument(
        "--shares", nargs="*", type=float, default=[0.5, 0.6, 0.75], help="of the steps, tried with Muon"
    )
    parser.add_argument("--tuned", nargs="+", type=Path, default=[], metavar="RESULT", help="of --descend")
    parser.add_argument(
        "--optimizer",
        choices=["adamw", "muon"],
        default="muon",
        help="of --tuned: for pairs, or inside islands",
    )
    campaign_arguments(parser)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs of forward and backward")
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], help="default: cuda if there is a GPU; bf16 there, else fp32"
    )
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--plot", type=Path, metavar="RESULT", help="draw the curves of a result and exit")
    options = parser.parse_args(argv)
    for name in options.rungs:
        if name not in (*RUNGS, *ISLANDS):
            parser.error(f"--rungs {name!r}: not one of {', '.join((*RUNGS, *ISLANDS))}")
    for flag in ("pairs", "processes", "nodes", "ranks_per_node", "micro_batches"):
        if getattr(options, flag) < 1:
            parser.error(f"--{flag.replace('_', '-')} must be at least 1, got {getattr(options, flag)}")
    names = [*options.rungs, *(name for ladder in options.ladder for name in LADDERS[ladder])]
    options.rungs = list(dict.fromkeys([BASELINE, *(names or LADDERS["first"])]))
    return options


def main(argv: Sequence[str]) -> int:
    """Runs what is missing and writes the table; returns the exit status."""
    options = parse(argv)
    if options.list:
        print_rungs()
        return 0
    if options.text and options.entries:
        options.text = coarser(options.text, options.entries)
    if options.plot:
        from benchmarks.emulation.picture import draw

        print(f"written to {draw(options.plot)}")
        return 0
    options.device = options.device or default_device()
    on_text = "_text" if options.text else ""
    kind = "descent" if options.descend else "emulation"
    options.name = options.name or f"{kind}_{options.size}{on_text}_{options.device}"
    options.runs_file = options.runs_file or Path("build") / "emulation" / f"{options.name}.jsonl"
    settings = run_settings(options)
    campaign = PairedRuns(
        options=options,
        settings=settings,
        key=lambda name, seed: key_of(*named(settings, name), seed),
        run=partial(_run, settings, options.device, options.text),
        prepare=_fix_order_of_sums,
    )
    if options.descend:
        return tune(campaign, settings, options)
    return campaign.complete(
        options.rungs, (*RUNGS, *ISLANDS), "rungs", partial(figures_of_rung, settings), table
    )


def tune(campaign: PairedRuns, settings: dict[str, Any], options: argparse.Namespace) -> int:
    """Runs the searches of --descend, and writes where they are; returns the exit status."""
    comparison = Comparison(
        options.descend,
        steps=settings["steps"],
        tolerance=options.tolerance / 100,
        seeds=options.pairs,
        shares=options.shares,
        starts=_starts(settings, options),
    )
    done = campaign.finished(lambda name: name.startswith("{"))
    finished = campaign.run_missing(lambda: comparison.wanted(done), done)
    figures = {"settings": settings, **comparison.figures(done)}
    print(json.dumps(figures, indent=1))
    print(f"written to {save_result(options.name, figures, options.output)}")
    return 0 if finished else STOPPED


def _starts(settings: dict[str, Any], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Where searches begin: at --tuned, and that of islands with the rate that the inner optimizer has."""
    found = tuned_settings(options.tuned)
    return {"islands": {"lr": settings["lr"]}, **found} if options.tuned else found


def tuned_settings(results: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """By optimizer: the best settings of results of --descend."""
    figures: dict[str, Any] = {}
    for result in results:
        figures |= json.loads(result.read_text())["figures"]
    return {optimizer: figures[optimizer]["settings"] for optimizer in SEARCHES if optimizer in figures}


def named(settings: dict[str, Any], name: str) -> tuple[dict[str, Any], Rung]:
    """The settings and the rung of a run: the name of a rung, or of islands, or settings as JSON."""
    settings = dict(settings)
    outer = settings.pop("outer", {})
    if name in RUNGS:
        return settings, RUNGS[name]
    if name not in ISLANDS:
        return {**settings, **json.loads(name)}, RUNGS[BASELINE]
    islands = outer.get("islands", {}) | ISLANDS[name]
    return {**settings, **outer, "islands": islands}, RUNGS[BASELINE]


def default_device() -> str:
    """A GPU where there is one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def run_settings(options: argparse.Namespace) -> dict[str, Any]:
    """What decides the bits of every run, but for its rung and seed."""
    steps, size, samples, evaluations, warmup = DEFAULTS[options.size]
    on_gpu = options.device == "cuda"
    text = {"text": Text.described(options.text)} if options.text else {}
    tuned: dict[str, Any] = {}
    if options.tuned and options.descend in ([], ["islands"]):
        found = tuned_settings(options.tuned)
        tuned = found[options.optimizer]
        if "islands" in found:
            tuned = {**tuned, "outer": found["islands"]}
    return {
        **text,
        "size": options.size,
        "nodes": options.nodes,
        "ranks_per_node": options.ranks_per_node,
        "micro_batches": options.micro_batches,
        "micro_batch_size": options.micro_batch_size or size,
        "steps": options.steps or steps,
        "lr": options.lr,
        "min_lr": 0.0,  # ends runs where noise is least
        "warmup_fraction": warmup,
        "precision": "bf16" if on_gpu else "fp32",
        "attention": "flash" if on_gpu else "auto",
        "eval_samples": samples,
        "evaluations": evaluations,
        **({"graphs": True} if options.graphs else {}),
        **tuned,
    }


def key_of(settings: dict[str, Any], rung: Rung, seed: int) -> str:
    """Names a run by all that decides its bits.

    Settings of a rung that have their defaults are omitted, so that finished runs outlive new settings.
    """
    differing = {
        field.name: value
        for field in dataclasses.fields(rung)
        if (value := getattr(rung, field.name)) != field.default
    }
    return key_of_all(settings, differing, seed)


def figures_of_rung(
    settings: dict[str, Any], name: str, runs: Sequence[Run], baselines: Sequence[Run]
) -> dict[str, Any]:
    """What a result has of a rung beside the figures of all campaigns."""
    islands = named(settings, name)[0].get("islands")
    return {
        "settings": dataclasses.asdict(RUNGS[name]) if islands is None else islands,
        "bytes_per_parameter": runs[0]["bytes_per_parameter"],
        "bytes_per_parameter_in_layers": runs[0]["bytes_per_parameter_in_layers"],
        "raised_units": sum(run.get("raised_units", 0) for run in runs),  # over all steps
        "reference_lag": mean_lags([run.get("reference_lag", []) for run in runs]),
        "gap_of_training_loss": training_gaps(list(zip(runs, baselines, strict=True))),
    }


def mean_lags(runs: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """(step, mean over the runs of what the reference lacked, as a multiple of the step's update)."""
    return [
        [points[0][0], round(sum(lag for _, lag in points) / len(points), 3)]
        for points in zip(*runs, strict=True)
    ]


def training_gaps(pairs: Sequence[tuple[Run, Run]]) -> list[list[float | None]]:
    """(step, mean gap, half-width of its 95% interval), in percent, of the mean loss of 20 steps."""
    rows: list[list[float | None]] = []
    curves = [(run.get("train", []), baseline.get("train", [])) for run, baseline in pairs]
    for points in zip(*(zip(*curve, strict=True) for curve in curves), strict=True):
        gap = gaps_of(*zip(*((loss, of_baseline) for (_, loss), (_, of_baseline) in points), strict=True))
        rows.append([points[0][0][0], gap["mean_percent"], gap["half_width_95_percent"]])
    return rows


def table(figures: dict[str, Any]) -> str:
    """One line per rung."""
    lines = [
        "| rung | bytes per parameter, layers | pairs | mean gap, % | 95% ± | least … most |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in figures["rungs"].items():
        bytes_sent = f"{row['bytes_per_parameter_in_layers']:.3f}"
        lines.append(f"| {name} | {bytes_sent} | {row['pairs']} | {gap_cells(row['gap'])} |")
    optimizer = "AdamW" if figures["settings"].get("muon") is None else "Muon"
    lines += [
        f"{name}: {verdict(row, optimizer)}" for name, row in figures["rungs"].items() if name in ISLANDS
    ]
    return "\n".join(lines)


def verdict(row: dict[str, Any], optimizer: str) -> str:
    """Whether islands pass: the upper end of their gap's interval is within 1.0%, with Muon within 0.5%.

    One island, which saves no exchange, must be better in every pair.
    """
    gap, limit = row["gap"], 0.5 if optimizer == "Muon" else 1.0
    if row["pairs"] < GATE_PAIRS:
        return f"undecided, {row['pairs']} pairs of {GATE_PAIRS}"
    if row["settings"].get("count") == 1:
        better = sum(one < 0 for one in gap["by_seed"])
        passes = "passes" if better == row["pairs"] else "fails"
        return f"{passes}: better in {better} pairs of {row['pairs']}"
    upper = gap["mean_percent"] + gap["half_width_95_percent"]
    passes = "passes" if upper <= limit else "fails"
    return f"{passes}: upper end {upper:+.3f}%, at most {limit}% with {optimizer}"


def print_rungs() -> None:
    """Names, bytes inside layers, and ladders."""
    for name, rung in RUNGS.items():
        print(f"{rung.bytes_per_parameter({'mlp': 1}):7.4f}  {name}")
    for name, rungs in LADDERS.items():
        print(f"--ladder {name}: {', '.join(rungs)}")


def _fix_order_of_sums() -> None:
    from megatron_zpp.train.setup.determinism import fix_order_of_sums

    fix_order_of_sums(os.environ)


def _run(settings: dict[str, Any], device: str, text: Path | None, job: Job) -> dict[str, Any]:
    import torch

    from benchmarks.emulation.emulated_run import RunSettings, train
    from megatron_zpp.ops.library import load_operations

    name, seed = job
    settings, rung = named(settings, name)
    operations = load_operations(device, require_kernels=False, say=lambda line: print(line, file=sys.stderr))
    return train(
        RunSettings(**settings),
        rung,
        seed,
        device=torch.device(device),
        operations=operations,
        text=text,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
