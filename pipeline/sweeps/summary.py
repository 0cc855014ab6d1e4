"""What a sweep leaves behind: artifacts in Prefect, a parent run in MLflow, a table on the terminal."""

from __future__ import annotations

import base64
import io
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact

from pipeline import jobs
from pipeline.report import SweptCell, build_sweep
from pipeline.sweeps import curves
from pipeline.sweeps.cells import Result, read_result
from pipeline.sweeps.plan import Cell, Plan
from pipeline.sweeps.snapshot import Snapshot

_SHOWN = 12  # curves in the picture


@dataclass(frozen=True)
class Row:
    """A cell with what became of it: a result, or why there is none; `run_id`: of its MLflow run."""

    cell: Cell
    result: Result | None
    why: str
    run_id: str


def slug(text: str) -> str:
    """Return a text as a key of Prefect's artifacts: small letters, digits, dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


@dataclass
class Parent:
    """The sweep's run in MLflow: the id that its cells find it by, and what is shipped at the end."""

    id: str
    status: Literal["FINISHED", "FAILED", "KILLED"] = "KILLED"
    files: dict[str, Path] = field(default_factory=dict)


@contextmanager
def tracked(plan: Plan) -> Iterator[Parent]:
    """Keep the sweep's parent run in MLflow open; the same cells again have the same parent."""
    parent = Parent(jobs.digest([plan.sweep.name, sorted(cell.name for cell in plan.cells)]))
    with tempfile.TemporaryDirectory() as folder:
        parent.files = {name: Path(folder) / name for name in ("report.html", "metrics.json")}
        job = jobs.announce(jobs.make_sweep(plan.cells[0].config, plan.sweep.name, parent.id))
        try:
            yield parent
        finally:
            jobs.finish(job, parent.status, parent.files)


def publish(plan: Plan, snapshot: Snapshot, failed: Mapping[str, str], parent: Parent) -> None:
    """Create what a sweep that has ended leaves: its report, table, curves, and links to MLflow."""
    experiment, found = curves.find_runs(plan, [cell.name for cell in plan.cells if cell.label not in failed])
    rows = [_row(cell, snapshot, failed.get(cell.label), found.get(cell.name, "")) for cell in plan.cells]
    swept = [
        SweptCell(row.cell.preset, row.cell.seed, row.cell.config, row.result.reward)
        for row in rows
        if row.result
    ]
    build_sweep(plan.sweep.name, swept, snapshot.project, parent.files["report.html"].parent)
    parent.status = "FAILED" if failed else "FINISHED"
    runs = [row.run_id for row in rows if row.run_id]
    address = curves.ui_address(plan) if runs else ""
    link = curves.compare_link(address, experiment, runs) if address else ""
    reward = curves.reward_link(address, experiment, runs) if address else ""
    links = {run: curves.run_link(address, experiment, run) for run in runs if address}
    key = f"sweep-{slug(plan.sweep.name)}"
    described = f"Sweep {plan.sweep.name}: {len(rows) - len(failed)} of {len(rows)} cells are complete"
    create_table_artifact(_table(rows), key=f"{key}-cells", description=described)
    create_markdown_artifact(_markdown(plan, rows, links, link, reward), key=key, description=described)
    if link:
        text = f"Compare the {len(runs)} runs in MLflow"
        create_link_artifact(
            link, text, key=f"{key}-compare", description=f"Curves of sweep {plan.sweep.name}"
        )
    print(_text(rows, link), flush=True)


def _row(cell: Cell, snapshot: Snapshot, why: str | None, run_id: str) -> Row:
    return Row(cell, read_result(snapshot, cell) if why is None else None, why or "", run_id)


def _table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rows of Prefect's table."""
    return [
        {
            "cell": row.cell.label,
            "state": "failed" if row.result is None else "complete",
            "reward": "" if row.result is None else f"{row.result.reward:.4f}",
            "delta to base": "" if row.result is None else _interval(row.result),
            "MLflow run": row.run_id,
            "take over with": "" if row.result is None else f"dvc exp apply {row.cell.name}",
            "why": row.why,
        }
        for row in rows
    ]


def _interval(result: Result) -> str:
    delta = result.delta
    return f"{delta.mean:+.4f} [{delta.low:+.4f}, {delta.high:+.4f}]"


def _markdown(plan: Plan, rows: Sequence[Row], links: Mapping[str, str], link: str, reward: str) -> str:
    """Return the page of a sweep: failures, table, curves, where to go on."""
    level = f"{100 * plan.cells[0].config.report.level:.3g} %"
    lines = [f"# Sweep {plan.sweep.name}", ""]
    lines += [f"**[Compare the runs in MLflow]({link})**, [reward by update]({reward})", ""] if link else []
    lines += ["| cell | reward | delta to base | MLflow | experiment |", "|---|---|---|---|---|"]
    for row in rows:
        run = f"[run]({links[row.run_id]})" if row.run_id in links else row.run_id
        numbers = (
            ("failed", row.why) if row.result is None else (f"{row.result.reward:.4f}", _interval(row.result))
        )
        experiment = "" if row.result is None else f"`{row.cell.name}`"
        lines.append(
            " | ".join(
                ["", row.cell.label, *(_escape(text) for text in numbers), run, experiment, ""]
            ).strip()
        )
    lines += [
        "",
        f"Reward: held-out mean of the last checkpoint. Delta: minus the base policy on the same prompts, with its "
        f"{level} bootstrap interval over prompts; another training seed is not in it.",
        "",
        "Take a cell over into the workspace: `dvc exp apply EXPERIMENT`; list all: `dvc exp show`.",
    ]
    drawn = [row for row in rows if row.result is not None]
    if drawn:
        picture = base64.b64encode(draw_curves(drawn[:_SHOWN])).decode()
        lines += ["", f"![Training reward by update](data:image/png;base64,{picture})"]
        lines += ["", f"The first {_SHOWN} of {len(drawn)} cells."] if len(drawn) > _SHOWN else []
    return "\n".join(lines)


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _text(rows: Sequence[Row], link: str) -> str:
    """Return the table for a terminal."""
    width = max(len(row.cell.label) for row in rows)
    lines = []
    for row in rows:
        found = row.result
        text = f"reward {found.reward:.4f}  delta {_interval(found)}" if found else f"failed: {row.why}"
        lines.append(f"  {row.cell.label:{width}}  {text}{f'  {row.cell.name}' if found else ''}")
    return "\n".join(["margrpo: cells of the sweep", *lines, *([f"  curves: {link}"] if link else [])])


def draw_curves(rows: Sequence[Row]) -> bytes:
    """Return a PNG of the training reward of cells by update."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for row in rows:
        assert row.result is not None
        updates, rewards = zip(*row.result.curve, strict=True)
        axes.plot(
            updates, rewards, marker="." if len(updates) < 20 else "", linewidth=1.4, label=row.cell.label
        )
    axes.set_xlabel("update")
    axes.set_ylabel("training reward")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="best")
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()
