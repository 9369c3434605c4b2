"""Draws the gaps of a campaign over the iterations of its runs, each with its 95% band."""

import json
from pathlib import Path

import numpy as np

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "images"
_SKIPPED = 0.2  # of the iterations: losses fall so fast there that their ratio says little


def draw(result: Path) -> Path:
    """Writes a picture in docs/images from a campaign's result of the same name; returns its path."""
    from matplotlib.figure import Figure

    figures = json.loads(result.read_text())["figures"]
    skipped = _SKIPPED * figures["settings"]["steps"]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.axhline(0, color="gray", linewidth=0.8)
    for name, row in list(figures["rungs"].items())[1:]:  # behind the baseline
        points = [point for point in row["gap_of_training_loss"] if point[0] > skipped]
        iterations, means, half_widths = zip(*points, strict=True)
        label = f"{name} ({row['bytes_per_parameter_in_layers']:.2f} bytes, {row['pairs']} pairs)"
        (line,) = axes.plot(iterations, means, linewidth=1.4, label=label)
        if None not in half_widths:
            low, high = (np.array(means) + sign * np.array(half_widths) for sign in (-1, 1))
            axes.fill_between(iterations, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.legend(fontsize=7, loc="upper right")
    axes.set_xlabel("iteration")
    axes.set_ylabel("training loss above the baseline's, percent:\nmean of the pairs and its 95% interval")
    path = PICTURES / f"{result.stem}.png"
    figure.savefig(path, dpi=110)
    return path
