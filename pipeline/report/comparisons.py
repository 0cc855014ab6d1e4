"""Comparisons of variants: paired over seeds, Holm-adjusted over the family in params.yaml."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from margrpo.metrics.statistics import Interval, PairedDifference, holm, paired_t, prompt_bootstrap
from pipeline.report.data import BASE, Measure, StudyData, TrainedRun, reward

COST_TOLERANCE = 0.02
"""Relative: core-seconds of equal runs on one machine differ by more."""


@dataclass(frozen=True)
class Comparison:
    """Is `first` better than `second`? The difference is None where one of them has no run in this study."""

    first: str
    second: str
    difference: PairedDifference | None
    adjusted: float

    @property
    def key(self) -> str:
        """The pair as one word."""
        return comparison_key(self.first, self.second)


@dataclass(frozen=True)
class EqualCost:
    """`first` at `checkpoint`, chosen so that it cost no more CPU than `second` at its end.

    Attributes:
        checkpoint: last, milestone, or None where neither is cheap enough.
        first_cost, second_cost: mean core-seconds over the common seeds.
    """

    first: str
    second: str
    checkpoint: str | None
    first_cost: float
    second_cost: float
    difference: PairedDifference | None
    adjusted: float


@dataclass(frozen=True)
class WithinRun:
    """Difference of two runs of the same seed over the test prompts."""

    first: str
    second: str
    interval: Interval


def comparison_key(first: str, second: str) -> str:
    """Return the name of a pair in metrics.json and in the Holm family."""
    return f"{first}_minus_{second}"


def compare(study: StudyData, measure: Measure) -> list[Comparison]:
    """Return the pairs of `report.comparisons` on one measure, Holm-adjusted over those tested."""
    found = {
        (first, second): _paired(study, first, second, measure, measure)
        for first, second in study.config.report.comparisons
    }
    adjusted = _holm(found)
    return [
        Comparison(first, second, difference, adjusted[first, second])
        for (first, second), difference in found.items()
    ]


def compare_at_equal_cost(study: StudyData) -> list[EqualCost]:
    """Return the pairs of trained variants with `first` stopped where it cost no more CPU than `second`.

    `first` counts at its last checkpoint where that was cheap enough, else at its milestone, else not at all;
    cheap enough allows for `COST_TOLERANCE`.
    """
    milestone = study.config.train.milestone
    rows: dict[tuple[str, str], tuple[str | None, float, float, PairedDifference | None]] = {}
    for first, second in study.config.report.comparisons:
        seeds = {run.seed for run in study.of(first)} & {run.seed for run in study.of(second)}
        if BASE in (first, second) or not seeds:
            continue
        limit = _mean_cost(study.of(second), seeds, None)
        enough = limit * (1 + COST_TOLERANCE)
        checkpoint: str | None = "last"
        cost = _mean_cost(study.of(first), seeds, None)
        if cost > enough:
            checkpoint = None
            if milestone is not None:
                cost = _mean_cost(study.of(first), seeds, milestone)
                checkpoint = "milestone" if cost <= enough else None
        difference = None
        if checkpoint is not None:
            difference = _paired(
                study, first, second, reward(checkpoint, study.sampler), reward("last", study.sampler)
            )
        rows[first, second] = (checkpoint, cost, limit, difference)
    adjusted = _holm({pair: row[3] for pair, row in rows.items()})
    return [
        EqualCost(first, second, checkpoint, cost, limit, difference, adjusted[first, second])
        for (first, second), (checkpoint, cost, limit, difference) in rows.items()
    ]


def compare_within_runs(study: StudyData) -> list[WithinRun]:
    """Return every declared pair seed by seed, test prompts resampled in pairs (same prompts, same noise)."""
    report = study.config.report
    rows = []
    for first, second in report.comparisons:
        others = {run.seed: run for run in study.of(second)}
        for run in study.of(first):
            other = study.base if second == BASE else others.get(run.seed)
            if other is None:
                continue
            ours = run.prompt_rewards("last", study.sampler)
            theirs = other.prompt_rewards("last", study.sampler).reindex(ours.index)
            scored = ours.notna() & theirs.notna()  # a prompt none of whose images has a reward is in no pair
            if not scored.any():
                continue
            ours, theirs = ours[scored], theirs[scored]
            # One generator per pair, so that adding a comparison changes no other interval.
            rng = np.random.default_rng(run.seed)
            interval = prompt_bootstrap(
                ours.to_numpy(), theirs.to_numpy(), rng, report.level, report.resamples
            )
            rows.append(WithinRun(run.name, other.name, interval))
    return rows


def difference_of(study: StudyData, first: str, second: str, measure: Measure) -> PairedDifference | None:
    """Return the paired difference of two variants on one measure, None where one of them has no run."""
    return _paired(study, first, second, measure, measure)


def _paired(
    study: StudyData, first: str, second: str, of_first: Measure, of_second: Measure
) -> PairedDifference | None:
    a, b = _values(study, first, of_first), _values(study, second, of_second)
    # The base is one policy: its single evaluation is the partner of every seed.
    if first == BASE:
        a = dict.fromkeys(b, a[0]) if a else {}
    if second == BASE:
        b = dict.fromkeys(a, b[0]) if b else {}
    if not a.keys() & b.keys():
        return None
    return paired_t(a, b, study.config.report.level)


def _values(study: StudyData, variant: str, measure: Measure) -> dict[int, float]:
    if variant != BASE:
        return study.by_seed(variant, measure)
    value = measure(study.base)
    return {0: value} if math.isfinite(value) else {}


def _mean_cost(runs: list[TrainedRun], seeds: set[int], update: int | None) -> float:
    return float(np.mean([run.core_seconds(update) for run in runs if run.seed in seeds]))


def _holm(found: dict[tuple[str, str], PairedDifference | None]) -> dict[tuple[str, str], float]:
    p_values = {
        comparison_key(*pair): math.nan if difference is None else difference.p_value
        for pair, difference in found.items()
    }
    adjusted = holm(p_values)
    return {pair: adjusted[comparison_key(*pair)] for pair in found}
