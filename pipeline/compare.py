"""`margrpo compare`: runs of MLflow side by side, as a table and as curves."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from margrpo.config import Config
from margrpo.errors import MargrpoError
from margrpo.metrics.statistics import paired_t, t_interval
from pipeline import paths
from pipeline.report import numbers
from pipeline.report.figures import CURVES, smooth
from pipeline.store import Store, quiet

if TYPE_CHECKING:
    from mlflow.entities import Run

_RESULTS = {
    "SDE": "eval/last/sde/reward",
    "ODE": "eval/last/ode/reward",
    "unseen": "eval/last/sde/reward_unseen",
}
_SHOWN_PARAMS = 12


@dataclass(frozen=True)
class Line:
    """One line of the comparison: a run, or the runs of a variant by seed."""

    label: str
    runs: dict[int, Run]

    def values(self, metric: str) -> dict[int, float]:
        """Return seed -> latest value of a metric, where there is one."""
        found = {seed: run.data.metrics.get(metric, math.nan) for seed, run in self.runs.items()}
        return {seed: value for seed, value in found.items() if math.isfinite(value)}


def compare(config: Config, names: Sequence[str], within: str | None, out: Path) -> str:
    """Write the curves of runs as a PNG and return a table of them.

    Args:
        names: run names, run ids, or variants (the newest run of each seed).
        within: name or id of a study or sweep to look in; None: everywhere.

    Raises:
        MargrpoError: there is no such run, study or store; nothing is written.
    """
    quiet()
    import mlflow.exceptions

    if out.suffix.lower() != ".png":
        raise MargrpoError(f"--out: {out}; allowed: a file that ends in .png")
    try:
        store = _open(config)
        parent = None if within is None else _parent(store, within)
        lines = [resolve(store, name, parent) for name in dict.fromkeys(names)]
        curves = {
            name: [_histories(store, line, curve.column) for line in lines] for name, curve in CURVES.items()
        }
    except mlflow.exceptions.MlflowException as error:
        raise MargrpoError(f"MLflow: {' '.join(str(error).split())[:300]}") from error
    picture = _draw([line.label for line in lines], curves)
    from margrpo.checkpoints import write_atomic

    write_atomic(out, picture)
    table = _table(config, lines, curves["grad_norm"])
    return "\n".join([table, *_origins(store, lines), *_differences(lines), f"curves: {out}"])


def resolve(store: Store, name: str, parent: str | None = None) -> Line:
    """Return the run or the runs that a name, an id or a variant means.

    A name stands for its newest finished run; a variant for one run of each seed, all of the newest study or
    sweep that has it.

    Raises:
        MargrpoError: there is none; says which there are.
    """
    if re.fullmatch("[0-9a-f]{32}", name):
        run = store.client.get_run(name)
        return Line(f"{run.info.run_name} ({name[:8]})", {_seed(run): run})

    def inside(runs: list[Run]) -> list[Run]:
        cells = [run for run in runs if "margrpo.cell" in run.data.tags]
        kept = [run for run in cells if parent in (None, run.data.tags.get("mlflow.parentRunId"))]
        return sorted(
            kept, key=lambda run: run.info.status != "FINISHED"
        )  # stable: newest first among equals

    named = inside(store.named(name))
    if named:
        return Line(name, {_seed(named[0]): named[0]})
    found = inside(store.find({"variant": name}))
    if not found:
        known = sorted({run.info.run_name for run in inside(store.find({}))})
        listed = ", ".join(known[:20]) + (", ..." if len(known) > 20 else "")
        raise MargrpoError(
            f"RUN: {name}; allowed: a run id, a variant, or a name: {listed or 'there are no runs'}"
        )
    home = max(found, key=lambda run: run.info.start_time).data.tags.get("mlflow.parentRunId")
    seeds: dict[int, Run] = {}
    for run in found:
        if run.data.tags.get("mlflow.parentRunId") == home:
            seeds.setdefault(_seed(run), run)
    return Line(name, dict(sorted(seeds.items())))


def _seed(run: Run) -> int:
    return int(run.data.tags.get("seed", 0))


def _open(config: Config) -> Store:
    from mlflow import MlflowClient

    file = paths.home() / "mlflow.db"
    if config.tracking.uri is None and not file.is_file():
        raise MargrpoError(f"{file}: there is no such store; `make repro` makes it, or set tracking.uri")
    client = MlflowClient(config.tracking.uri or f"sqlite:///{file}")
    found = client.get_experiment_by_name(config.tracking.experiment)
    if found is None:
        known = ", ".join(experiment.name for experiment in client.search_experiments())
        raise MargrpoError(f"tracking.experiment: {config.tracking.experiment}; allowed: {known}")
    return Store(client, str(found.experiment_id))


def _parent(store: Store, name: str) -> str:
    parents = [run for tag in ("study", "sweep") for run in store.find({tag: name}) if _is_parent(run)]
    if re.fullmatch("[0-9a-f]{32}", name):
        return name
    if not parents:
        known = sorted({run.info.run_name for run in store.find({}) if _is_parent(run)})
        raise MargrpoError(
            f"--within: {name}; allowed: {', '.join(known) or 'there is no study'}, or a run id"
        )
    return str(max(parents, key=lambda run: run.info.start_time).info.run_id)


def _is_parent(run: Run) -> bool:
    return "margrpo.study" in run.data.tags or "margrpo.sweep" in run.data.tags


def _histories(store: Store, line: Line, metric: str) -> pd.DataFrame:
    """Return update x seed of a metric."""
    series = {}
    for seed, run in line.runs.items():
        points = store.client.get_metric_history(run.info.run_id, metric)
        series[seed] = pd.Series({point.step: point.value for point in points}, dtype=float)
    return pd.DataFrame(series).sort_index()


def _table(config: Config, lines: list[Line], norms: list[pd.DataFrame]) -> str:
    """Return a row per line: mean over seeds with the half width of its interval, and the gain on the first line."""
    level = config.report.level
    shown = {label: key for label, key in _RESULTS.items() if any(line.values(key) for line in lines)}
    shown["validation"] = "validation/reward"
    shown["training"] = "reward"
    key = next(iter(shown.values()))
    rows = []
    for line, norm in zip(lines, norms, strict=True):
        row = {"run": line.label, "runs": str(len(line.runs)), "status": _status(line)}
        for label, metric in shown.items():
            values = list(line.values(metric).values())
            row[label] = numbers.spread(t_interval(values, level)) if values else numbers.MISSING
        row["grad norm"] = numbers.significant(float(norm.mean().mean()) if norm.size else math.nan, 2)
        seconds = line.values("time/core_s")
        row["core-s"] = numbers.plain(sum(seconds.values()) / len(seconds) if seconds else math.nan, 1)
        first, own = lines[0].values(key), line.values(key)
        common = first.keys() & own.keys()
        row[f"{next(iter(shown))} - first"] = ""
        if line is not lines[0] and common:
            row[f"{next(iter(shown))} - first"] = numbers.signed(paired_t(own, first, level).interval)
        rows.append(row)
    return pd.DataFrame(rows).to_string(index=False)


def _origins(store: Store, lines: list[Line]) -> list[str]:
    """Return which study or sweep the lines are from: a name may stand for several, of which the newest counts."""
    labels: dict[str, list[str]] = {}
    for line in lines:
        for parent in {run.data.tags.get("mlflow.parentRunId", "") for run in line.runs.values()}:
            labels.setdefault(parent, []).append(line.label)
    texts = []
    for parent, names in labels.items():
        if parent:
            found = store.client.get_run(parent)
            texts.append(f"{', '.join(names)}: of {found.info.run_name} ({parent})")
    return texts


def _status(line: Line) -> str:
    return "+".join(sorted({run.info.status for run in line.runs.values()}))


def _differences(lines: list[Line]) -> list[str]:
    """Return the params in which the lines differ, one text each."""
    params = [next(iter(line.runs.values())).data.params for line in lines]
    keys = sorted({key for given in params for key in given if key not in ("seed", "variant")})
    found = [key for key in keys if len({given.get(key) for given in params}) > 1]
    texts = [f"{key}: {' | '.join(str(given.get(key)) for given in params)}" for key in found[:_SHOWN_PARAMS]]
    return texts + (
        [f"... and {len(found) - _SHOWN_PARAMS} more params"] if len(found) > _SHOWN_PARAMS else []
    )


def _draw(labels: list[str], curves: dict[str, list[pd.DataFrame]]) -> bytes:
    """Return a PNG with a panel per curve that any line has."""
    import io

    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    from pipeline.report.style import DPI, STYLE, band

    drawn = {name: frames for name, frames in curves.items() if any(frame.size for frame in frames)}
    with matplotlib.rc_context(STYLE):
        columns = min(3, max(1, len(drawn)))
        rows = max(1, math.ceil(len(drawn) / columns))
        figure = Figure(
            figsize=(3.6 * columns, 2.6 * rows + 0.3 * math.ceil(len(labels) / 3)), layout="constrained"
        )
        panels = figure.subplots(rows, columns, squeeze=False).flatten()
        for axes in panels[len(drawn) :]:
            axes.set_axis_off()
        for axes, (name, frames) in zip(panels, drawn.items(), strict=False):
            curve = CURVES[name]
            for index, (label, frame) in enumerate(zip(labels, frames, strict=True)):
                band(axes, smooth(frame) if curve.smoothed else frame, label, index, curve.logarithmic)
            axes.set_title(curve.title + (" (mean of 5 updates)" if curve.smoothed else ""), fontsize=9)
            if curve.logarithmic and axes.lines:
                axes.set_yscale("log")
            axes.set_xlabel("update")
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        handles = {
            text: handle
            for axes in panels
            for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        if handles:
            figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=3, fontsize=8)
        buffer = io.BytesIO()
        figure.savefig(buffer, dpi=DPI, format="png", metadata={"Software": None})
    return buffer.getvalue()
