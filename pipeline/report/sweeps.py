"""What single switches do: runs that differ in one key of the params only, value by value."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from margrpo.metrics.statistics import paired_t, t_interval
from pipeline.report import numbers
from pipeline.report.data import StudyData, reward
from pipeline.report.style import COLORS, STYLE, save
from pipeline.report.tables import Table

# How a switch is called in the tables; any other key goes by its own name.
_NAMES = {"trajectories": "S (trajectories)", "uncertain_fraction": "fraction (uncertain_fraction)"}
_NAMES |= {"consistency": "tau (consistency)"}
# Keys that have no meaning, or only one value, where there is one trajectory.
_OF_TRAJECTORIES = ("trajectory_source", "resample_condition", "include_rollout", "rao_blackwell")
_PANELS = 4


@dataclass(frozen=True)
class Point:
    """Runs with equal params but for the seed.

    Attributes:
        label: name of the variant or cell. values: dotted key -> value. rewards: seed -> held-out reward.
    """

    label: str
    values: Mapping[str, Any]
    rewards: Mapping[int, float]


@dataclass(frozen=True)
class Series:
    """Points that differ in one key only, by its value."""

    key: str
    points: tuple[Point, ...]


def points_of(study: StudyData) -> list[Point]:
    """Return a point per variant: its switches, and the primary metric of its seeds."""
    measure = reward("last", study.sampler)
    return [
        Point(
            variant, flatten(study.config.objective_of(variant).model_dump()), study.by_seed(variant, measure)
        )
        for variant in study.variants
    ]


def flatten(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested params with dotted keys."""
    flat: dict[str, Any] = {}
    for name, value in content.items():
        flat |= (
            flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
        )
    return flat


def differing_keys(points: Sequence[Point]) -> list[str]:
    """Return the keys that do not have one value in all points."""
    keys = dict.fromkeys(key for point in points for key in point.values)
    return [key for key in keys if len({_text(point.values.get(key)) for point in points}) > 1]


def find_series(points: Sequence[Point]) -> list[Series]:
    """Return for every key the sets of points that differ in nothing else.

    One trajectory is the value S = 1 of any source of trajectories: what only several have is not compared.
    """
    found = []
    keys = differing_keys(points)
    for key in keys:
        if key in _OF_TRAJECTORIES:
            continue
        groups: dict[tuple[str, ...], list[Point]] = {}
        for point in points:
            groups.setdefault(_others(point, keys, key), []).append(point)
        if key == "trajectories":
            single = [point for point in points if point.values.get(key) == 1]
            rest = [other for other in keys if other not in (*_OF_TRAJECTORIES, key)]
            for members in groups.values():
                if all(point.values.get(key) != 1 for point in members):
                    own = _others(members[0], rest, key)
                    members.extend(point for point in single if _others(point, rest, key) == own)
        for members in groups.values():
            if len({_text(point.values.get(key)) for point in members}) > 1:
                found.append(
                    Series(key, tuple(sorted(members, key=lambda point: _order(point.values.get(key)))))
                )
    return found


def _others(point: Point, keys: Sequence[str], key: str) -> tuple[str, ...]:
    return tuple(_text(point.values.get(other)) for other in keys if other != key)


def _order(value: Any) -> tuple[bool, bool, float, str]:
    number = float(value) if isinstance(value, int | float) else 0.0
    return value is not None, not isinstance(value, int | float), number, _text(value)


def _text(value: Any) -> str:
    return "off" if value is None else value if isinstance(value, str) else json.dumps(value)


def switches_table(points: Sequence[Point]) -> Table:
    """Return the values of the keys that differ, a row per point."""
    keys = differing_keys(points)
    rows = tuple((point.label, *(_text(point.values.get(key)) for key in keys)) for point in points)
    note = "The keys of params.yaml that are not the same everywhere; “off”: null, or without meaning there."
    return Table(
        "What the variants differ in", ("variant", *(key.replace("_", " ") for key in keys)), rows, note
    )


def series_table(series: Sequence[Series], level: float, metric: str) -> Table:
    """Return the series value by value: mean over seeds with interval, difference to the first value."""
    rows = []
    for one in series:
        first = one.points[0]
        for point in one.points:
            common = point.rewards.keys() & first.rewards.keys()
            difference = "reference"
            if point is not first:
                difference = numbers.MISSING
                if common:
                    difference = numbers.signed(paired_t(point.rewards, first.rewards, level).interval)
            mean = numbers.MISSING
            if point.rewards:
                mean = numbers.spread(t_interval(list(point.rewards.values()), level))
            name, value = _NAMES.get(one.key, one.key), _text(point.values.get(one.key))
            rows.append((name, value, point.label, str(len(point.rewards)), mean, difference))
    note = (
        f"Only variants that differ in this one key stand together. {metric}: mean ± half width of the "
        f"{100 * level:.3g} % t-interval over seeds; difference to the first value, paired over common seeds; "
        "not adjusted for the number of rows. S = 1 is the rollout's own trajectory."
    )
    return Table(
        "One switch at a time",
        ("switch", "value", "variant", "seeds", metric, "− first value"),
        tuple(rows),
        note,
    )


def draw_series(series: Sequence[Series], level: float, metric: str, path: Path) -> bool:
    """Draw the metric over the value of the switch, a panel per series; False, and nothing drawn, if there is none."""
    drawn = [one for one in series if sum(bool(point.rewards) for point in one.points) > 1]
    if not drawn:
        return False
    columns = min(_PANELS, len(drawn))
    rows = math.ceil(len(drawn) / columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(0.8 + 2.3 * columns, 2.5 * rows), layout="constrained")
        panels = figure.subplots(rows, columns, sharey=True, squeeze=False).flatten()
        for axes in panels[len(drawn) :]:
            axes.set_axis_off()
        for axes, one in zip(panels, drawn, strict=False):
            for position, point in enumerate(one.points):
                if not point.rewards:
                    continue
                values = list(point.rewards.values())
                interval = t_interval(values, level)
                axes.scatter([position] * len(values), values, s=12, color=COLORS[0], alpha=0.4, linewidths=0)
                if math.isfinite(interval.low):
                    axes.plot(
                        [position, position], [interval.low, interval.high], color=COLORS[0], linewidth=1.5
                    )
                axes.scatter([position], [interval.mean], s=36, color=COLORS[0], zorder=3)
            labels = [f"{_text(point.values.get(one.key))}\n{point.label}" for point in one.points]
            axes.set_xticks(range(len(labels)), labels, fontsize=6.5)
            axes.set_xlim(-0.6, len(labels) - 0.4)
            axes.grid(False, axis="x")
            axes.set_title(_NAMES.get(one.key, one.key), fontsize=9)
        for axes in panels[::columns]:
            axes.set_ylabel(metric)
        save(figure, path)
    return True
