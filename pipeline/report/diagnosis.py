"""Gradient noise of the variants, and maps of what their estimator sees: both at the base policy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import NullFormatter

from margrpo.errors import MargrpoError
from margrpo.maps import TokenMaps, load_maps
from pipeline.report import numbers
from pipeline.report.style import BASE, COLORS, STYLE, save
from pipeline.report.tables import Table

REFERENCE = "frozen_head_committed"
_COLUMNS = ("variant", "mean_norm", "trace", "signal_to_noise", "cosine")
_HEAT = "YlOrRd"
_KNOWN = "#2f6f9f"


def read_noise(root: Path) -> pd.DataFrame | None:
    """Return reports/diagnose/noise.csv, None where it was not measured.

    Raises:
        MargrpoError: the file cannot be read.
    """
    path = root / "reports/diagnose/noise.csv"
    if not path.is_file():
        return None
    try:
        frame = pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise MargrpoError(
            f"report: cannot use {path}: {error}; delete it and run `dvc repro` again"
        ) from error
    if frame.empty or not set(_COLUMNS) <= set(frame.columns):
        return None
    return frame


def read_maps(root: Path) -> tuple[TokenMaps, dict[str, Any]] | None:
    """Return reports/diagnose/maps.safetensors, None where no maps were made."""
    path = root / "reports/diagnose/maps.safetensors"
    if not path.is_file():
        return None
    maps, facts = load_maps(path)
    return None if maps is None else (maps, facts)


def noise_table(noise: pd.DataFrame, gradients: int | None) -> Table:
    """Return signal and noise of the backbone gradient, and the variance relative to the causal estimate's.

    The projection on the signal is left out: with a handful of gradients it is noise itself.
    """
    measured = noise[list(_COLUMNS[1:])].to_numpy(dtype=float)
    names = [str(name) for name in noise["variant"]]
    base = dict(zip(names, measured[:, 1], strict=True)).get(REFERENCE, math.nan)
    rows = []
    for name, (norm, trace, ratio, cosine) in zip(names, measured.tolist(), strict=True):
        share = trace / base if base > 0 else math.nan
        rows.append((name, *(_number(value) for value in (norm, trace, share, ratio, cosine))))
    return Table(
        "Gradient noise at the base policy",
        ("variant", "norm of mean", "variance", "× control", "signal-to-noise", "cosine"),
        tuple(rows),
        f"{gradients or 'Several'} independent backbone gradients per variant at the untrained policy, the same "
        f"prompts and noise for all. Variance: trace of the covariance of one gradient; × control: relative to "
        f"{REFERENCE}. Signal-to-noise: |mean|² / (variance / m) of m gradients, about 1 where they show no signal. "
        "Cosine: mean between two of the gradients. Few gradients measure the variance, hardly the signal: "
        "`margrpo diagnose --updates 32` measures that too.",
    )


def _number(value: float) -> str:
    if value < 0:
        return "−" + numbers.significant(-value, 2)
    return numbers.significant(value, 2) if math.isfinite(value) else numbers.MISSING


def draw_noise(noise: pd.DataFrame, path: Path) -> None:
    """Draw the variance of a gradient (logarithmic) beside the signal-to-noise ratio of the mean."""
    names = list(noise["variant"])
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.8, 1.2 + 0.3 * len(names)), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        rows = np.arange(len(names))
        left.scatter(noise["trace"], rows, s=40, color=COLORS[0])
        if (noise["trace"] > 0).any():
            left.set_xscale("log")
            left.xaxis.set_minor_formatter(NullFormatter())
        left.set_xlabel("variance of one gradient")
        right.axvline(1, color=BASE, linewidth=1, linestyle="--")
        right.scatter(noise["signal_to_noise"], rows, s=40, color=COLORS[1])
        right.set_xlim(left=0)
        right.set_xlabel("signal-to-noise (dashed: no signal)")
        left.set_yticks(rows, names)
        left.set_ylim(len(names) - 0.4, -0.6)
        save(figure, path)


def maps_note(facts: dict[str, Any]) -> str:
    """Return what the figure of the maps shows."""
    fraction, threshold = facts["uncertain_fraction"], facts["consistency"]
    return (
        f"One rollout of the base policy per prompt, seen by {facts['variant']} at its AR steps. Color of a token that "
        f"is still open: its uncertainty, the std over {facts['trajectories']} fresh final latents under the step's "
        "own condition, mean over channels. A dot: the token enters the policy term; a cross: consistency drops it, "
        f"since its cosine to the final token did not rise by more than {threshold:g}. Blue frame: written at this "
        "step; tokens written before show the image. In the finished image, orange frames mark the "
        f"{100 * fraction:.0f} % most uncertain tokens under the condition that wrote them: those that get the "
        "multi-trajectory estimate."
    )


def draw_maps(maps: TokenMaps, facts: dict[str, Any], path: Path) -> None:
    """Draw a row per image: the finished image, then what the estimator sees at each mapped AR step."""
    images, steps = len(maps.images), len(maps.steps)
    side = math.isqrt(maps.committed.shape[1])
    if side * side != maps.committed.shape[1]:
        raise MargrpoError(f"report: maps of {maps.committed.shape[1]} tokens; allowed: a square number")
    top = float(np.nanmax(maps.uncertainty.numpy()))
    with matplotlib.rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(1.35 * (steps + 1) + 0.9, 1.62 * images + 0.6), layout="constrained")
        panels = figure.subplots(images, steps + 1, squeeze=False)
        for row in range(images):
            picture = maps.images[row].movedim(0, -1).numpy()
            for column, axes in enumerate(panels[row]):
                axes.imshow(picture, extent=(0, side, side, 0), interpolation="nearest")
                axes.set(xticks=[], yticks=[], xlim=(0, side), ylim=(side, 0))
                axes.spines[:].set_visible(True)
                if column == 0:
                    _frame(axes, maps.chosen[row].numpy(), side, "#D55E00")
                else:
                    _overlay(axes, maps, row, column - 1, side, top)
                if row == 0:
                    title = "finished" if column == 0 else f"AR step {int(maps.steps[column - 1]) + 1}"
                    axes.set_title(title, fontsize=8)
            panels[row, 0].set_xlabel(_short(facts["prompts"][row]), fontsize=7, loc="left")
        scale = matplotlib.cm.ScalarMappable(matplotlib.colors.Normalize(0, top), _HEAT)
        bar = figure.colorbar(scale, ax=panels, shrink=0.6, pad=0.01, aspect=30)
        bar.set_label("uncertainty of an open token", fontsize=8)
        figure.legend(handles=_legend(), loc="outside lower center", ncols=4, fontsize=8)
        save(figure, path)


def _overlay(axes: Axes, maps: TokenMaps, image: int, column: int, side: int, top: float) -> None:
    step = int(maps.steps[column])
    heat = maps.uncertainty[column, image].numpy().reshape(side, side)
    # Masked where the token is known: there the picture below shows.
    axes.imshow(np.ma.masked_invalid(heat), cmap=_HEAT, vmin=0, vmax=top, extent=(0, side, side, 0))
    known = maps.committed[image].numpy() < step
    kept = maps.kept[column, image].numpy()
    x, y = np.arange(side * side) % side + 0.5, np.arange(side * side) // side + 0.5
    size = (30 / side) ** 2
    axes.scatter(x[~known & kept], y[~known & kept], s=size / 3, color="#1d2126", linewidths=0)
    dropped = ~known & ~kept
    axes.scatter(x[dropped], y[dropped], s=size, color="#1d2126", marker="x", linewidths=0.9)
    _frame(axes, maps.committed[image].numpy() == step, side, _KNOWN)


def _frame(axes: Axes, chosen: Any, side: int, color: str) -> None:
    for token in np.flatnonzero(chosen):
        corner = (token % side + 0.06, token // side + 0.06)
        axes.add_patch(Rectangle(corner, 0.88, 0.88, fill=False, edgecolor=color, linewidth=1.6))


def _legend() -> list[Any]:
    ink: Any = {"color": "#1d2126", "linestyle": ""}
    return [
        Line2D([], [], marker=".", label="kept", **ink),
        Line2D([], [], marker="x", markersize=4, label="dropped by consistency", **ink),
        Patch(fill=False, edgecolor=_KNOWN, linewidth=1.6, label="written at this step"),
        Patch(fill=False, edgecolor="#D55E00", linewidth=1.6, label="most uncertain"),
    ]


def _short(text: str) -> str:
    # A dollar sign would start a formula.
    return (text if len(text) <= 42 else text[:41].rstrip() + "…").replace("$", r"\$")
