"""How every figure looks: matplotlib on white, the same bytes for the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

DPI = 144
# Okabe and Ito's palette without yellow: told apart by color-blind readers, readable on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = "osD^vPX"
BASE = "#767676"
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "figure.facecolor": "white",
}


def band(axes: Axes, frame: pd.DataFrame, label: str, index: int, logarithmic: bool) -> None:
    """Draw columns (seeds) over their index (updates): the mean as a line, lowest to highest as a band.

    Nothing is drawn where no value is finite (on a logarithmic axis: positive).
    """
    values = frame.to_numpy(dtype=float)
    values = np.where(np.isfinite(values), values, np.nan)
    if logarithmic:
        # An exact 0 (the first update's KL) has no place on a logarithmic axis.
        values = np.where(values > 0, values, np.nan)
    kept = ~np.isnan(values).all(axis=1)
    updates, values = frame.index.to_numpy()[kept], values[kept]
    if not len(updates):
        return
    color = COLORS[index % len(COLORS)]
    marker = "o" if len(updates) <= 12 else None
    dash = "-" if index < len(COLORS) else "--"
    axes.plot(
        updates,
        np.nanmean(values, axis=1),
        dash,
        color=color,
        linewidth=1.5,
        label=label,
        marker=marker,
        markersize=3,
    )
    axes.fill_between(
        updates, np.nanmin(values, axis=1), np.nanmax(values, axis=1), color=color, alpha=0.16, linewidth=0
    )


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG."""
    # The default metadata name the version of matplotlib: they would change the bytes, not the picture.
    figure.savefig(path, dpi=DPI, format="png", metadata={"Software": None})
