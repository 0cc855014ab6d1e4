"""The report of a sweep: what its keys change, over all of its cells."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from margrpo.checkpoints import write_atomic
from margrpo.config import Config
from margrpo.metrics.statistics import t_interval
from pipeline.report import numbers, provenance
from pipeline.report.lead import Lead
from pipeline.report.render import Block, Document, Facts, Picture, Section, render
from pipeline.report.sweeps import (
    Point,
    differing_keys,
    draw_series,
    find_series,
    flatten,
    series_table,
    switches_table,
)
from pipeline.report.tables import Table


@dataclass(frozen=True)
class SweptCell:
    """One finished cell.

    Attributes:
        variant, seed: its run. config: its whole params. reward: held-out reward of the last checkpoint.
    """

    variant: str
    seed: int
    config: Config
    reward: float


def build_sweep(name: str, cells: Sequence[SweptCell], root: Path, folder: Path) -> None:
    """Write report.html (self-contained), report.md and metrics.json of a sweep into a folder.

    Args:
        cells: those that finished; cells that differ in the seed alone are seeds of one point.
        root: the project, for the provenance.
    """
    points = group(cells)
    config = cells[0].config if cells else None
    level = config.report.level if config else 0.95
    samplers = config.evaluation.samplers if config else ["sde"]
    metric = f"{'SDE' if 'sde' in samplers else samplers[0].upper()} reward"
    means = {point.label: t_interval(list(point.rewards.values()), level) for point in points}
    with tempfile.TemporaryDirectory() as scratch:
        drawn = Path(scratch)
        series = find_series(points)
        blocks: list[Block] = [series_table(series, level, metric)] if series else []
        if draw_series(series, level, metric, drawn / "switches.png"):
            caption = (
                "Small dots: seeds. Large dot and line: mean and t-interval. The panels share their axis."
            )
            blocks.append(Picture("switches.png", f"{metric} over the values of single keys", caption))
        rows = tuple((label, str(interval.n), numbers.spread(interval)) for label, interval in means.items())
        note = f"Mean over seeds ± half width of the {100 * level:.3g} % t-interval (one seed: no interval)."
        sections = [Section("Cells", "Cells", (Table("Cells", ("cell", "seeds", metric), rows, note),))]
        sections += [Section("What single keys change", "Keys", tuple(blocks))] if blocks else []
        if differing_keys(points):
            sections.append(Section("What the cells differ in", "Params", (switches_table(points),)))
        facts = provenance.describe_machine(root)
        sections.append(Section("Provenance", "Provenance", (Facts(tuple(facts)),)))
        best = max(means, key=lambda label: means[label].mean, default=None)
        answer = (
            "No cell has finished."
            if best is None
            else (f"Highest mean {metric}: {best} with {numbers.spread(means[best])}.")
        )
        lead = Lead(answer, (("Basis", f"{len(cells)} cells, {len(points)} settings"),))
        html, markdown = render(Document(f"Sweep {name}", "", lead, None, tuple(sections)), drawn)
    rewards = {label: interval.mean for label, interval in means.items()}
    content = {
        "report.html": html,
        "report.md": markdown,
        "metrics.json": json.dumps({"reward": rewards}) + "\n",
    }
    for file, text in content.items():
        write_atomic(folder / file, text.encode())


def group(cells: Sequence[SweptCell]) -> list[Point]:
    """Return a point per setting of the params, with the rewards of its seeds."""
    found: dict[str, tuple[SweptCell, dict[str, Any], dict[int, float]]] = {}
    for cell in cells:
        values = {"variant": cell.variant, **_values(cell)}
        key = json.dumps(values, sort_keys=True)
        found.setdefault(key, (cell, values, {}))[2][cell.seed] = cell.reward
    points = [Point(cell.variant, values, rewards) for cell, values, rewards in found.values()]
    keys = [key for key in differing_keys(points) if key != "variant"]
    return [Point(_label(point, keys, points), _without(point), point.rewards) for point in points]


def _values(cell: SweptCell) -> dict[str, Any]:
    """Return what the result of a cell depends on, by dotted key; the switches of its variant without a prefix."""
    apart = {"study", "variants", "report", "tracking", "profiles", "objective"}
    return flatten(cell.config.model_dump(exclude=apart)) | flatten(
        cell.config.objective_of(cell.variant).model_dump()
    )


def _label(point: Point, keys: Sequence[str], points: Sequence[Point]) -> str:
    """Return the variant, and the values in which points of the same variant differ."""
    same = [other for other in points if other.label == point.label]
    own = [key for key in keys if len({json.dumps(other.values.get(key)) for other in same}) > 1]
    parts = [f"{key.rpartition('.')[2]}={json.dumps(point.values.get(key))}" for key in own]
    return " ".join([point.label, *parts])


def _without(point: Point) -> Mapping[str, Any]:
    """Return the values without the variant's name: its switches say it."""
    return {key: value for key, value in point.values.items() if key != "variant"}
