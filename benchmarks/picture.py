"""Draws the picture of README.md from results: step times between two nodes, and losses on real text.

python benchmarks/picture.py [FILE.png]
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

from benchmarks.common import figures_of, program_parser
from benchmarks.emulation.picture import PICTURES
from benchmarks.real_run.result import NAMES, held_out

PAIR = "zero_speed_1.3b_mbs8_acc1_2x1_default_"  # each result compares two programs on one pair of nodes
BARS = (
    ("h100", "zeropp_4_bits", "megatron_zpp, 4 bits"),
    ("h100", "fsdp2_bf16", "FSDP2, bf16"),
    ("deepspeed", "zeropp_4_bits", "megatron_zpp, 4 bits"),
    ("deepspeed", "deepspeed_qwz_qgz_keep", "DeepSpeed, ZeRO++"),
)


def draw_bars(axes: Any) -> None:
    """The median step of each program, with the range of its rounds; one pair of nodes below the other."""
    for row, (result, contestant, label) in enumerate(BARS):
        measured = figures_of(PAIR + result)["contestants"][contestant]
        rounds, median = measured["rounds_ms"], measured["milliseconds"]
        place = row + row // 2 * 0.5  # a gap between the two pairs
        spread = [[median - min(rounds)], [max(rounds) - median]]
        colour = "C0" if contestant.startswith("zeropp") else "C7"
        axes.barh(place, median, xerr=spread, color=colour, ecolor="0.2", height=0.8)
        axes.text(max(rounds) + 15, place, f"{label}: {median:.0f}", va="center")
    axes.invert_yaxis()
    axes.set_xlim(right=1150)
    axes.set_yticks([])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel("ms per step")
    axes.set_title("1.3B between two nodes of one H100,\ndefault sockets", fontsize="medium")


def draw_losses(axes: Any) -> None:
    """Held-out losses of all variants of the real run."""
    result = figures_of("real_run")
    for name, label in NAMES.items():
        if name in result["runs"]:
            losses = held_out(result, name)
            axes.plot(list(losses), list(losses.values()), lw=1, label=label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("million tokens seen")
    axes.set_ylabel("held-out loss")
    axes.set_title("GPT-2 124M on real text", fontsize="medium")
    axes.legend(frameon=False, fontsize="small")


def main() -> None:
    parser = program_parser(__doc__)
    parser.add_argument("file", type=Path, nargs="?", default=PICTURES / "results.png")
    options = parser.parse_args()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_bars(left)
    draw_losses(right)
    figure.savefig(options.file, dpi=110)


if __name__ == "__main__":
    main()
