"""Intervals, tests and robust means over training seeds and prompts.

The unit of a statement about a method is the training seed (`t_interval`, `paired_t`); the unit of a
statement about one checkpoint is the prompt, its images averaged first (`prompt_bootstrap`, `sign_flip_p`).
Intervals over prompts do not cover how much another training run would differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

# Values drawn at once by the resampling routines: tens of megabytes at any number of prompts.
_BATCH_VALUES = 2_000_000
# Sign flips are enumerated completely up to 2**13 of them, and sampled beyond.
_SIGN_FLIPS = 9_999
# Values that differ by less than this share of their size differ by rounding alone.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Interval:
    """A mean with its two-sided confidence interval; low and high are NaN where one value gives no spread."""

    mean: float
    low: float
    high: float
    n: int
    level: float
    method: str


@dataclass(frozen=True)
class PairedDifference:
    """The mean of a - b over common seeds, its interval and its two-sided p value (NaN where undefined)."""

    interval: Interval
    p_value: float
    seeds: tuple[int, ...]


def _sample(values: ArrayLike, name: str) -> NDArray[np.float64]:
    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 1 or sample.size == 0:
        raise ValueError(f"{name} has shape {sample.shape}; one dimension with at least one value is needed")
    if not np.isfinite(sample).all():
        raise ValueError(
            f"{name} has {int((~np.isfinite(sample)).sum())} NaN or infinite of {sample.size} values"
        )
    return sample


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level is {level}; it must lie between 0 and 1, 0.95 for instance")


def _without_spread(values: NDArray[np.float64], scale: float) -> bool:
    return bool(np.ptp(values) <= _ROUNDING * scale)


def _t(values: NDArray[np.float64], level: float, scale: float, name: str) -> tuple[Interval, float]:
    """Return the t interval of the mean and the p value of mean = 0."""
    mean, n = float(values.mean()), values.size
    if n == 1:
        return Interval(mean, math.nan, math.nan, n, level, "one run"), math.nan
    if _without_spread(values, scale):
        # t is 0 / 0 or infinite: no difference at all is p = 1, an equal one in every run is not a test.
        p_value = 1.0 if abs(mean) <= _ROUNDING * scale else math.nan
        return Interval(mean, mean, mean, n, level, f"{name}, no spread"), p_value
    test = stats.ttest_1samp(values, 0.0)
    bounds = test.confidence_interval(level)
    return Interval(mean, float(bounds.low), float(bounds.high), n, level, name), float(test.pvalue)


def t_interval(values: ArrayLike, level: float = 0.95) -> Interval:
    """Return the mean over training seeds with its Student t interval (n - 1 degrees of freedom).

    values: [n_runs]. One run gives NaN bounds and the method "one run"; equal values give width 0.
    Raises ValueError for no values, non-finite values, or a level outside (0, 1).
    """
    _check_level(level)
    sample = _sample(values, "values")
    interval, _ = _t(sample, level, float(np.abs(sample).max()), "t over runs")
    return interval


def paired_t(a: Mapping[int, float], b: Mapping[int, float], level: float = 0.95) -> PairedDifference:
    """Return the mean difference a - b over the seeds that both have, with a paired two-sided t test.

    a, b: seed -> metric. One common seed gives NaN bounds and p value. Differences without spread give an
    interval of width 0 and p = 1 if they are all zero, otherwise NaN: their spread cannot be estimated.
    Raises ValueError when no seed is common, a value is not finite, or the level is outside (0, 1).
    """
    _check_level(level)
    seeds = tuple(sorted(a.keys() & b.keys()))
    if not seeds:
        raise ValueError(f"no common seed: a has {sorted(a)}, b has {sorted(b)}")
    first = _sample([a[seed] for seed in seeds], "a")
    second = _sample([b[seed] for seed in seeds], "b")
    scale = float(max(np.abs(first).max(), np.abs(second).max()))
    interval, p_value = _t(first - second, level, scale, "paired t over seeds")
    return PairedDifference(interval, p_value, seeds)


def prompt_bootstrap(
    a: ArrayLike,
    b: ArrayLike | None,
    rng: np.random.Generator,
    level: float = 0.95,
    resamples: int = 10_000,
) -> Interval:
    """Return the mean of a, or of a - b, over the prompts of one run with its BCa bootstrap interval.

    a, b: [n_prompts] in the same order of prompts, so that a resampled prompt brings both its values. One
    prompt gives NaN bounds; equal values, for which BCa is undefined, an interval of width 0; `method` names
    both cases.
    Raises ValueError for shapes that differ, non-finite or no values, or a level outside (0, 1).
    Source: Efron, "Better bootstrap confidence intervals" (1987), as implemented by scipy.stats.bootstrap.
    """
    _check_level(level)
    values = _sample(a, "a")
    scale = float(np.abs(values).max())
    if b is not None:
        other = _sample(b, "b")
        if other.shape != values.shape:
            raise ValueError(
                f"a has {values.size} prompts and b {other.size}; pairs need the same prompts in both"
            )
        scale = max(scale, float(np.abs(other).max()))
        values = values - other
    mean, n = float(values.mean()), values.size
    if n == 1:
        return Interval(mean, math.nan, math.nan, n, level, "one prompt")
    method = "BCa bootstrap over prompts"
    if _without_spread(values, scale):
        return Interval(mean, mean, mean, n, level, f"{method}, no spread")
    bounds = stats.bootstrap(
        (values,),
        np.mean,
        n_resamples=resamples,
        batch=max(1, _BATCH_VALUES // n),
        confidence_level=level,
        method="BCa",
        rng=rng,
    ).confidence_interval
    return Interval(mean, float(bounds.low), float(bounds.high), n, level, method)


def sign_flip_p(differences: ArrayLike, rng: np.random.Generator) -> float:
    """Return the two-sided p value of the sign-flip test that paired differences are symmetric around zero.

    differences: [n]. All 2**n sign flips are enumerated up to n = 13; beyond, 9,999 are drawn and the
    observed one is counted among them, so the smallest value is 2e-4.
    Raises ValueError for no or non-finite values.
    """
    values = _sample(differences, "differences")
    if values.size == 1:
        # Both flips lie equally far from zero; scipy wants two values.
        return 1.0
    test = stats.permutation_test(
        (values,),
        np.mean,
        permutation_type="samples",
        vectorized=True,
        n_resamples=_SIGN_FLIPS,
        batch=max(1, _BATCH_VALUES // values.size),
        rng=rng,
    )
    return float(test.pvalue)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Return the Holm-adjusted p values of a family of comparisons, in the order given.

    A NaN (a comparison with one run) stays NaN and does not count in the family: no test was made. Adjusted
    values never exceed 1 and keep the order of the raw ones. Raises ValueError for a p value outside 0..1.
    Source: Holm, "A simple sequentially rejective multiple test procedure" (1979).
    """
    adjusted = dict.fromkeys(p_values, math.nan)
    tested = {name: p for name, p in p_values.items() if not math.isnan(p)}
    wrong = {name: p for name, p in tested.items() if not 0 <= p <= 1}
    if wrong:
        raise ValueError(f"p values outside 0..1: {wrong}")
    highest = 0.0
    for rank, name in enumerate(sorted(tested, key=tested.__getitem__)):
        highest = max(highest, min(1.0, (len(tested) - rank) * tested[name]))
        adjusted[name] = highest
    return adjusted


def iqm(values: ArrayLike) -> float:
    """Return the interquartile mean: the mean after dropping floor(n / 4) values at each end.

    values: [n]. Fewer than four values give the plain mean. Raises ValueError for no or non-finite values.
    Source: Agarwal et al., "Deep RL at the edge of the statistical precipice" (2021).
    """
    return float(stats.trim_mean(_sample(values, "values"), 0.25))


def probability_of_improvement(a: ArrayLike, b: ArrayLike) -> float:
    """Return the share of pairs (one run of a, one of b) in which a is higher, ties counted half; in 0..1.

    a: [n], b: [m]. Raises ValueError for no or non-finite values.
    Source: Agarwal et al. (2021); the Mann-Whitney U divided by n m.
    """
    difference = _sample(a, "a")[:, None] - _sample(b, "b")[None, :]
    return float((0.5 * (np.sign(difference) + 1)).mean())
