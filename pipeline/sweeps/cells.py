"""One cell in its own clone: what lies there, the command that runs it, how far it is, what came out."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ruamel.yaml import YAML

from margrpo.metrics.statistics import Interval, prompt_bootstrap
from pipeline import paths
from pipeline.sweeps.plan import Cell, hydra
from pipeline.sweeps.snapshot import Snapshot, checkout

TRAINED = 0.9  # of a cell's progress


@dataclass(frozen=True)
class Result:
    """What a finished cell came to.

    Attributes:
        reward: mean held-out reward of the last checkpoint.
        delta: reward minus that of the base policy on the same prompts, with its interval over prompts.
        curve: (update, training reward) of every update.
    """

    reward: float
    delta: Interval
    curve: tuple[tuple[int, float], ...]


def folder_of(project: Path, cell: Cell) -> Path:
    """Return where the clone of a cell lies."""
    return project / ".margrpo" / "cells" / cell.name


def prepare(snapshot: Snapshot, cell: Cell, cache: Path) -> Path:
    """Return a fresh clone of the snapshot with the cell's params, which shares the DVC cache of the project."""
    folder = folder_of(snapshot.project, cell)
    checkout(snapshot, folder)
    rewrite(folder / paths.PARAMS, cell.params)
    local = {"cache": {"dir": cache}, "core": {"site_cache_dir": folder / ".dvc" / "tmp" / "site"}}
    lines = [
        line
        for section, values in local.items()
        for line in (
            f"[{section}]",
            *(f"    {key} = {json.dumps(str(value))}" for key, value in values.items()),
        )
    ]
    (folder / ".dvc" / "config.local").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def command(cell: Cell) -> list[str]:
    """Return the arguments of `dvc` that make the cell's experiment."""
    settings = [part for key, value in cell.changes.items() for part in ("-S", hydra(key, value))]
    return ["exp", "run", "--name", cell.name, *settings]


def rewrite(file: Path, content: Mapping[str, Any]) -> None:
    """Give a YAML file this content; comments and order of what stays are kept."""
    yaml = YAML()
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.width = 4096
    yaml.representer.add_representer(type(None), _represent_null)
    data = yaml.load(file.read_text(encoding="utf-8"))
    _merge(data, content)
    with open(file, "w", encoding="utf-8") as out:
        yaml.dump(data, out)


def _represent_null(representer: Any, _: None) -> Any:
    return representer.represent_scalar("tag:yaml.org,2002:null", "null")


def _merge(old: Any, new: Mapping[str, Any]) -> None:
    for key in [key for key in old if key not in new]:
        del old[key]
    for key, value in new.items():
        if isinstance(value, Mapping) and isinstance(old.get(key), Mapping):
            _merge(old[key], value)
        elif key not in old or old[key] != value:
            old[key] = value


def progress(folder: Path, cell: Cell) -> float:
    """Return how much of a cell is done, 0..1, by what its stages have written."""
    if (folder / paths.EVALUATION / cell.run / "metrics.json").is_file():
        return 0.99
    try:
        rows = (folder / paths.LOGS / cell.run / "metrics.csv").read_bytes().count(b"\n") - 1
    except FileNotFoundError:
        return 0.0
    return TRAINED * min(1.0, max(0, rows) / cell.config.train.updates)


def read_result(snapshot: Snapshot, cell: Cell) -> Result:
    """Return the result of a cell from its experiment in the project.

    Raises:
        MargrpoError: the experiment lacks a file.
    """
    sampler = "sde" if "sde" in cell.config.evaluation.samplers else cell.config.evaluation.samplers[0]

    def text(*path: str) -> str:
        return snapshot.read(cell.name, Path(*path))

    folder = str(paths.EVALUATION)
    measured = json.loads(text(folder, cell.run, "metrics.json"))
    own = _prompt_rewards(text(folder, cell.run, "prompts.csv"), sampler)
    base = _prompt_rewards(text(folder, "base", "prompts.csv"), sampler)
    common = [prompt for prompt in own if prompt in base]
    delta = prompt_bootstrap(
        [own[prompt] for prompt in common],
        [base[prompt] for prompt in common],
        np.random.default_rng(0),
        cell.config.report.level,
        cell.config.report.resamples,
    )
    rows = csv.DictReader(io.StringIO(text(str(paths.LOGS), cell.run, "metrics.csv")))
    curve = tuple((int(row["update"]), float(row["reward"])) for row in rows)
    return Result(float(measured["last"][sampler]["reward"]), delta, curve)


def _prompt_rewards(text: str, sampler: str) -> dict[str, float]:
    rows = [
        (row["prompt"], float(row["reward"]))
        for row in csv.DictReader(io.StringIO(text))
        if row["checkpoint"] == "last" and row["sampler"] == sampler and row["reward"]
    ]
    return {prompt: reward for prompt, reward in rows if math.isfinite(reward)}
