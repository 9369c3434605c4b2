"""Draws the gaps of a campaign over the iterations of its runs, each with its 95% band."""

import json
from pathlib import Path
from typing import Any

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "images"
PANELS: dict[str, tuple[str, ...]] = {
    "all of ZeRO++": ("today", "four bits everywhere behind int8"),
    "weights alone": ("int8 weights", "delta4", "delta2"),
    "gradients alone": ("int4 gradients", "rotated4", "rotated2"),
    "matrices under Muon, states in each node": (
        "baseline, nudged",
        "sums4",
        "sums4 feedback",
        "sums4 feedback of the momentum",
    ),
    "matrices under Muon, states over all nodes": (
        "baseline, nudged",
        "four bits",
        "four bits feedback",
        "four bits feedback of the momentum",
    ),
    "not taken": ("four bits everywhere behind int4", "rotated2 feedback least squares"),
}
_SKIPPED = 0.2  # of the iterations: losses fall so fast there that their ratio says little


def draw(result: Path) -> Path:
    """Writes a picture in docs/images from a campaign's result of the same name; returns its path."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figures = json.loads(result.read_text())["figures"]
    settings = figures["settings"]
    panels = {title: names for title, names in PANELS.items() if any(map(figures["rungs"].get, names))}
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(5.5 * columns, 3.6 * rows),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, (title, names) in zip(axes.flat, panels.items(), strict=False):
        axis.axhline(0, color="gray", linewidth=0.8)
        for color, name in zip(plt.cm.tab10.colors, names, strict=False):
            if name in figures["rungs"]:
                _line(axis, name, figures["rungs"][name], settings["steps"], color)
        axis.set_title(title)
        axis.legend(fontsize=7, loc="upper right")
    figure.supxlabel("iteration")
    figure.supylabel("training loss above the baseline's, percent:\nmean of the pairs and its 95% interval")
    path = PICTURES / f"{result.stem}.png"
    figure.savefig(path, dpi=110)
    return path


def _line(axis: Any, name: str, row: dict[str, Any], steps: int, color: Any) -> None:
    points = [point for point in row["gap_of_training_loss"] if point[0] > _SKIPPED * steps]
    iterations, means, half_widths = zip(*points, strict=True)
    label = f"{name} ({row['bytes_per_parameter_in_layers']:.2f} bytes, {row['pairs']} pairs)"
    axis.plot(iterations, means, color=color, linewidth=1.4, label=label)
    if None not in half_widths:
        low, high = (
            [mean + sign * half for mean, half in zip(means, half_widths, strict=True)] for sign in (-1, 1)
        )
        axis.fill_between(iterations, low, high, color=color, alpha=0.2, linewidth=0)
