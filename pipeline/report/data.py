"""Read what training and evaluation wrote about every run of the study."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from margrpo.config import Config
from margrpo.errors import MargrpoError

BASE = "base"
_RUN_FILES = ("metrics.csv", "timing.csv", "summary.json")
_EVALUATION_FILES = ("metrics.json", "prompts.csv", "grid.png")


@dataclass(frozen=True)
class Evaluated:
    """An evaluated policy: the base, or a run of the study.

    Attributes:
        evaluation: metrics.json, checkpoint -> sampler -> metric (and `kl_to_base` beside the samplers).
        prompts: prompts.csv, one row per checkpoint, sampler and test prompt.
        grid: path of its sample grid.
    """

    name: str
    evaluation: dict[str, Any]
    prompts: pd.DataFrame
    grid: Path

    def value(self, checkpoint: str, sampler: str, metric: str) -> float:
        """Return one evaluated number, NaN where it was not measured."""
        return float(self.evaluation.get(checkpoint, {}).get(sampler, {}).get(metric, math.nan))

    def kl(self) -> float:
        """Return the KL of the last checkpoint to the base per (token, step), NaN where not measured."""
        return float(self.evaluation.get("last", {}).get("kl_to_base", math.nan))

    def prompt_rewards(self, checkpoint: str, sampler: str) -> pd.Series:
        """Return the mean reward of each test prompt, indexed by prompt, in the order of the split."""
        frame = self.prompts
        rows = frame[(frame["checkpoint"] == checkpoint) & (frame["sampler"] == sampler)]
        return rows.set_index("prompt")["reward"]


@dataclass(frozen=True)
class TrainedRun(Evaluated):
    """A run of the study: its evaluation and its logs (metrics.csv, timing.csv, summary.json)."""

    variant: str
    seed: int
    metrics: pd.DataFrame
    timing: pd.DataFrame
    summary: dict[str, Any]

    def core_seconds(self, updates: int | None = None) -> float:
        """Return the CPU seconds spent on the first `updates` updates (default: all)."""
        rows = self.timing if updates is None else self.timing.head(updates)
        return float(rows["core_s"].iloc[-1])

    def updates(self) -> int:
        """Return how many updates were made."""
        return len(self.metrics)


Measure = Callable[[Evaluated], float]


@dataclass(frozen=True)
class StudyData:
    """Everything the report is made of."""

    config: Config
    base: Evaluated
    runs: tuple[TrainedRun, ...]

    @property
    def variants(self) -> tuple[str, ...]:
        """The variants that have runs, in the order of params.yaml."""
        present = {run.variant for run in self.runs}
        return tuple(variant for variant in self.config.variants if variant in present)

    @property
    def sampler(self) -> str:
        """The sampler of the primary metric: SDE unless only the ODE was evaluated."""
        samplers = self.config.evaluation.samplers
        return "sde" if "sde" in samplers else samplers[0]

    def of(self, variant: str) -> list[TrainedRun]:
        """Return the runs of a variant, by seed."""
        return sorted((run for run in self.runs if run.variant == variant), key=lambda run: run.seed)

    def by_seed(self, variant: str, measure: Measure) -> dict[int, float]:
        """Return seed -> measure; values that were not measured or are not finite are left out."""
        values = {run.seed: measure(run) for run in self.of(variant)}
        return {seed: value for seed, value in values.items() if math.isfinite(value)}


def reward(checkpoint: str, sampler: str, metric: str = "reward") -> Measure:
    """Return the measure that reads one evaluated number; the base has one checkpoint, whatever is asked for."""
    return lambda run: run.value(checkpoint if isinstance(run, TrainedRun) else "last", sampler, metric)


def load(config: Config, root: Path) -> StudyData:
    """Read the base and all runs of `config.study` under `root`/reports.

    Raises:
        MargrpoError: runs are missing (all of them are named), or a file cannot be read.
    """
    reports = root / "reports"
    missing = [name for name in [BASE, *config.study.runs] if not _complete(reports, name)]
    if missing:
        raise MargrpoError(
            f"report: {len(missing)} of {len(config.study.runs) + 1} runs are missing: "
            f"{', '.join(missing)}; each needs {', '.join(_RUN_FILES)} in reports/runs/<run> and "
            f"{', '.join(_EVALUATION_FILES)} in reports/evaluation/<run>; run `dvc repro`, or drop them "
            "from study.runs in params.yaml"
        )
    base = Evaluated(BASE, **_evaluation(reports, BASE))
    runs = []
    for name, run in config.study.runs.items():
        folder = reports / "runs" / name
        runs.append(
            TrainedRun(
                name,
                **_evaluation(reports, name),
                variant=run.variant,
                seed=run.seed,
                metrics=_read_csv(folder / "metrics.csv", ("update", "reward", "kl", "grad_norm")),
                timing=_read_csv(folder / "timing.csv", ("update", "core_s")),
                summary=_read_json(folder / "summary.json"),
            )
        )
    return StudyData(config, base, tuple(runs))


def _complete(reports: Path, name: str) -> bool:
    files = [reports / "evaluation" / name / file for file in _EVALUATION_FILES]
    if name != BASE:
        files += [reports / "runs" / name / file for file in _RUN_FILES]
    return all(file.is_file() for file in files)


def _evaluation(reports: Path, name: str) -> dict[str, Any]:
    folder = reports / "evaluation" / name
    return {
        "evaluation": _read_json(folder / "metrics.json"),
        "prompts": _read_csv(folder / "prompts.csv", ("checkpoint", "sampler", "prompt", "reward")),
        "grid": folder / "grid.png",
    }


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unreadable(path, str(error)) from error
    if not isinstance(data, dict):
        raise _unreadable(path, "not a JSON object")
    return data


def _read_csv(path: Path, columns: tuple[str, ...]) -> pd.DataFrame:
    try:
        frame = pd.read_csv(path, keep_default_na=False, na_values=[""])
    except (OSError, ValueError) as error:
        raise _unreadable(path, str(error)) from error
    lacking = [column for column in columns if column not in frame.columns]
    if lacking or frame.empty:
        raise _unreadable(path, f"lacks {', '.join(lacking)}" if lacking else "no rows")
    return frame


def _unreadable(path: Path, why: str) -> MargrpoError:
    return MargrpoError(f"report: cannot use {path}: {why}; delete it and run `dvc repro` again")
