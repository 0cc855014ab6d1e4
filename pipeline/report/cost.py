"""What the variants cost: CPU and wall time of an update, and where it goes."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from margrpo.metrics.statistics import t_interval
from pipeline.report import numbers
from pipeline.report.data import StudyData, TrainedRun
from pipeline.report.style import COLORS, STYLE, save
from pipeline.report.tables import Table

# Columns of timing.csv: the phases of an update.
_PHASES = {
    "rollout_s": "rollout",
    "reward_s": "reward",
    "update_s": "gradient step",
    "validation_s": "validation",
}
_REFERENCES = ("frozen_head", "frozen_head_committed")


def cost_table(study: StudyData) -> Table:
    """Return core-seconds an update, how many times the reference's, and the seconds of each phase."""
    level = study.config.report.level
    reference = next((name for name in (*_REFERENCES, *study.variants) if name in study.variants), None)
    base = math.nan if reference is None else _mean([_core_seconds(run) for run in study.of(reference)])
    rows = []
    for variant in study.variants:
        runs = study.of(variant)
        values = [value for run in runs if math.isfinite(value := _core_seconds(run))]
        mean = _mean(values)
        each = numbers.spread_significant(t_interval(values, level)) if values else numbers.MISSING
        total = numbers.plain(sum(run.core_seconds() for run in runs), 0)
        times = numbers.significant(mean / base, 3) if base > 0 else numbers.MISSING
        phases = [numbers.significant(_mean([_phase(run, column) for run in runs]), 2) for column in _PHASES]
        rows.append((variant, str(len(runs)), each, times, *phases, total))
    whole = sum(run.core_seconds() for run in study.runs)
    return Table(
        "Cost of training",
        (
            "variant",
            "runs",
            "core-s/update",
            f"× {reference or 'reference'}",
            *(f"{name} s" for name in _PHASES.values()),
            "core-s, all runs",
        ),
        tuple(rows),
        "Core-seconds: CPU time of the training process divided by updates (± half width of the "
        f"{100 * level:.3g} % t-interval over seeds). Phases: wall seconds an update, validation spread over all "
        f"updates; they grow with what else the machine does. Training of the study: {whole:,.0f} core-seconds.",
    )


def draw_cost(study: StudyData, path: Path) -> bool:
    """Draw the phases of an update as stacked bars; False, and nothing drawn, where they were not logged."""
    found = {
        variant: {column: _mean([_phase(run, column) for run in study.of(variant)]) for column in _PHASES}
        for variant in study.variants
    }
    if not any(math.isfinite(value) for phases in found.values() for value in phases.values()):
        return False
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.8, 1.3 + 0.3 * len(found)), layout="constrained")
        axes = figure.subplots()
        left = [0.0] * len(found)
        for index, (column, name) in enumerate(_PHASES.items()):
            widths = [value if math.isfinite(value := phases[column]) else 0.0 for phases in found.values()]
            axes.barh(range(len(found)), widths, left=left, height=0.62, color=COLORS[index], label=name)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axes.set_yticks(range(len(found)), list(found))
        axes.set_ylim(len(found) - 0.4, -0.6)
        axes.grid(False, axis="y")
        axes.set_xlabel("wall seconds an update")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, fontsize=8, borderaxespad=0.2)
        save(figure, path)
    return True


def _core_seconds(run: TrainedRun) -> float:
    return run.core_seconds() / run.updates()


def _phase(run: TrainedRun, column: str) -> float:
    if column not in run.timing:
        return math.nan
    return float(run.timing[column].sum() / run.updates())


def _mean(values: list[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan
