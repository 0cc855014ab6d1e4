"""`margrpo sweep`: the form of the sweep filled in on the command line."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from margrpo.errors import ConfigError, MargrpoError
from margrpo.params import parse_value
from pipeline import jobs, paths
from pipeline.reproduce import prepare_prefect
from pipeline.sweeps.form import PLAIN, read_form
from pipeline.sweeps.plan import make_plan
from pipeline.sweeps.snapshot import code_digest, take


def sweep(project: Path, values: dict[str, Any], seeds: str, grid: Sequence[str], plan_only: bool) -> None:
    """Run a sweep in this process, or print its cells.

    Args:
        values: fields of the form. seeds: separated by commas. grid: `key=value,value`.

    Raises:
        MargrpoError: anything wrong with the values, the params or the project, before anything starts; or
            cells failed.
    """
    os.environ["MARGRPO_HOME"] = str(project)
    points = dict(_read_grid(item) for item in grid)
    profile = values["profile"] or PLAIN
    form = read_form({**values, "profile": profile, "seeds": _read_list("--seeds", seeds), "grid": points})
    if not (project / "dvc.yaml").is_file():
        raise MargrpoError(f"{project}: no dvc.yaml here; run this in the folder of the project")
    snapshot = take(project)
    plan = make_plan(form, project / paths.PARAMS, code_digest(snapshot))
    if plan_only:
        for note in plan.notes:
            print(f"margrpo: {note}")
        for cell in plan.cells:
            print(f"{cell.name}{'  (made)' if snapshot.has(cell.name) else ''}")
        return
    if jobs.pending():  # left by an outage or a killed run
        jobs.ensure_follower()
    prepare_prefect(project)
    from pipeline.sweeps.flow import ablation_sweep

    state = ablation_sweep(form, return_state=True)
    if state.is_crashed() and "interrupt" in (state.message or ""):
        raise KeyboardInterrupt
    if not state.is_completed():
        raise MargrpoError(
            f"{state.message}; after the cause is gone, the same command makes what is missing"
        )
    print(f"margrpo: {state.message}\n  all experiments: dvc exp show", flush=True)


def _read_grid(item: str) -> tuple[str, list[Any]]:
    key, separator, text = item.partition("=")
    if not separator or not key or not text:
        raise ConfigError.of("--grid", item, "allowed: key=value,value with a key of params.yaml or a switch")
    return key, _read_list(f"--grid {key}", text)


def _read_list(key: str, text: str) -> list[Any]:
    found = parse_value(text if text.startswith("[") else f"[{text}]", key)
    if not isinstance(found, list):
        raise ConfigError.of(key, text, "allowed: values separated by commas")
    return found
