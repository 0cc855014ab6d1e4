"""The figures of results: rewards, effects, curves, reward against diversity."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from margrpo.metrics.statistics import t_interval
from pipeline.report.data import StudyData, reward
from pipeline.report.lead import Effect
from pipeline.report.style import BASE, COLORS, MARKERS, STYLE, band, save

# Curves of nine variants in one panel cannot be followed: three a panel, axes shared.
_PANELS = 3
_SMOOTHING = 5
_LABEL = 84  # characters of a comparison that fit into the figure of effects


@dataclass(frozen=True)
class Curve:
    """A column of metrics.csv as a figure."""

    column: str
    title: str
    caption: str
    logarithmic: bool = False
    smoothed: bool = False


CURVES = {
    "reward": Curve("reward", "Training reward", "Mean reward of an update's images.", smoothed=True),
    "validation_reward": Curve(
        "validation/reward",
        "Validation reward",
        "SDE samples of the validation prompts from fixed noise; the highest point is the “best” checkpoint.",
    ),
    "kl": Curve("kl", "KL to the base", "On the states an update scores; logarithmic.", logarithmic=True),
    "grad_norm": Curve(
        "grad_norm",
        "Gradient norm",
        "Of the trained parameters, before clipping; logarithmic.",
        logarithmic=True,
    ),
    "diversity": Curve(
        "diversity",
        "Diversity",
        "Mean absolute pixel difference between the images of a group in training.",
        smoothed=True,
    ),
}


def draw_headline(study: StudyData, path: Path) -> None:
    """Draw the primary metric of every variant: a dot per seed, mean with t-interval, base as a line."""
    measure = reward("last", study.sampler)
    variants = study.variants
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.8, 1.3 + 0.36 * len(variants)), layout="constrained")
        axes = figure.subplots()
        base = measure(study.base)
        if math.isfinite(base):
            axes.axvline(base, color=BASE, linestyle="--", linewidth=1)
            axes.text(base, 1.01, "base", color=BASE, ha="center", transform=axes.get_xaxis_transform())
        for row, variant in enumerate(variants):
            values = list(study.by_seed(variant, measure).values())
            if not values:
                continue
            interval = t_interval(values, study.config.report.level)
            axes.scatter(values, [row] * len(values), s=14, color=COLORS[0], alpha=0.45, linewidths=0)
            if math.isfinite(interval.low):
                axes.plot([interval.low, interval.high], [row, row], color=COLORS[0], linewidth=1.6)
            axes.scatter([interval.mean], [row], s=42, color=COLORS[0], zorder=3)
        axes.set_yticks(range(len(variants)), variants)
        axes.set_ylim(max(len(variants), 1) - 0.4, -0.6)
        axes.grid(False, axis="y")
        axes.set_xlabel(f"held-out {study.sampler.upper()} reward after the last update")
        save(figure, path)


def draw_effects(effects: list[Effect], level: float, path: Path) -> None:
    """Draw the declared comparisons as a forest: effect with interval, filled where it is decided after Holm."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.8, 0.9 + 0.5 * max(len(effects), 1)), layout="constrained")
        axes = figure.subplots()
        axes.axvline(0, color=BASE, linewidth=1)
        across = axes.get_yaxis_transform()
        for row, effect in enumerate(effects):
            interval, color = effect.interval, COLORS[0] if effect.verdict == "open" else COLORS[1]
            if math.isfinite(interval.low):
                axes.plot([interval.low, interval.high], [row, row], color=color, linewidth=1.8)
            face = "white" if effect.verdict == "open" else color
            axes.scatter([interval.mean], [row], s=44, color=face, edgecolors=color, linewidths=1.6, zorder=3)
            label = effect.name if effect.name == effect.pair else f"{effect.name} ({effect.pair})"
            label = label if len(label) <= _LABEL else f"{label[: _LABEL - 1]}…"
            axes.text(0, row - 0.36, label, transform=across, fontsize=8, va="center")
            weight = "normal" if effect.verdict == "open" else "bold"
            axes.text(1, row - 0.36, effect.verdict, transform=across, ha="right", va="center", weight=weight)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.set_ylim(max(len(effects), 1) - 0.6, -0.7)
        axes.grid(False, axis="y")
        axes.set_xlabel(f"difference in held-out reward, {100 * level:.3g} % interval over seeds")
        save(figure, path)


def draw_curve(study: StudyData, name: str, path: Path) -> bool:
    """Draw one column of metrics.csv over updates, mean over seeds and band from lowest to highest seed.

    Returns False, and draws nothing, where no run logged the column.
    """
    curve = CURVES[name]
    frames = {variant: _seeds(study, variant, curve.column, curve.smoothed) for variant in study.variants}
    frames = {variant: frame for variant, frame in frames.items() if not frame.empty}
    if not frames:
        return False
    groups = _groups(list(study.variants))
    with matplotlib.rc_context(STYLE):
        figure = Figure(
            figsize=(3.4 * len(groups) + (0.8 if len(groups) > 1 else 3.0), 2.9), layout="constrained"
        )
        panels = figure.subplots(1, len(groups), sharex=True, sharey=True, squeeze=False)[0]
        for axes, group in zip(panels, groups, strict=True):
            for index, variant in enumerate(group):
                if variant in frames:
                    band(axes, frames[variant], variant, index, curve.logarithmic)
            if curve.logarithmic and axes.lines:
                axes.set_yscale("log")
            axes.set_xlabel("update")
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            if axes.lines:
                axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=1, fontsize=8, borderaxespad=0.2)
        panels[0].set_ylabel(curve.title + (f"\n(mean of {_SMOOTHING} updates)" if curve.smoothed else ""))
        save(figure, path)
    return True


def draw_scatter(study: StudyData, path: Path) -> None:
    """Draw reward against diversity, a point per run: a reward bought with diversity lies to the left."""
    of_reward, of_diversity = reward("last", study.sampler), reward("last", study.sampler, "diversity")
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.8, 4.4 + 0.2 * math.ceil(len(study.variants) / 3)), layout="constrained")
        axes = figure.subplots()
        for index, variant in enumerate(study.variants):
            runs = study.of(variant)
            axes.scatter(
                [of_diversity(run) for run in runs],
                [of_reward(run) for run in runs],
                s=34,
                color=COLORS[index % len(COLORS)],
                marker=MARKERS[(index + index // len(COLORS)) % len(MARKERS)],
                label=variant,
                alpha=0.85,
                linewidths=0,
            )
        axes.scatter(
            [of_diversity(study.base)], [of_reward(study.base)], s=130, color=BASE, marker="*", label="base"
        )
        axes.set_xlabel("diversity: mean absolute pixel difference between images of a prompt")
        axes.set_ylabel(f"held-out {study.sampler.upper()} reward")
        figure.legend(loc="outside lower center", ncols=3, fontsize=8)
        save(figure, path)


def _groups(variants: list[str]) -> list[list[str]]:
    columns = min(_PANELS, len(variants), max(1, math.ceil(len(variants) / _PANELS)))
    size = math.ceil(len(variants) / columns)
    return [variants[start : start + size] for start in range(0, len(variants), size)]


def _seeds(study: StudyData, variant: str, column: str, smoothed: bool) -> pd.DataFrame:
    """Return update x seed of a logged column; updates without a value are left out."""
    series = {
        run.seed: run.metrics.set_index("update")[column].astype(float)
        for run in study.of(variant)
        if column in run.metrics
    }
    frame = pd.DataFrame(series).replace([np.inf, -np.inf], np.nan).dropna(how="all")
    return smooth(frame) if smoothed else frame


def smooth(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the mean of each value and those before it, five in all."""
    return frame.rolling(_SMOOTHING, min_periods=1).mean()
