"""Intervals and tests against hand-computed values, closed forms and simulated coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest

from margrpo.metrics.statistics import (
    Interval,
    holm,
    iqm,
    paired_t,
    probability_of_improvement,
    prompt_bootstrap,
    sign_flip_p,
    t_interval,
)


def test_t_interval_matches_the_t_table() -> None:
    # Standard error 1 / sqrt(3); the table's t at .975 and 2 degrees of freedom is 4.302653, at .95 2.919986.
    interval = t_interval([1.0, 2.0, 3.0])
    assert (interval.mean, interval.n, interval.level) == (2.0, 3, 0.95)
    assert interval.high - 2 == pytest.approx(4.302653 / math.sqrt(3), abs=1e-5)
    assert 2 - interval.low == pytest.approx(4.302653 / math.sqrt(3), abs=1e-5)
    assert t_interval([1.0, 2.0, 3.0], level=0.9).high - 2 == pytest.approx(2.919986 / math.sqrt(3), abs=1e-5)


def test_one_run_has_no_interval() -> None:
    interval = t_interval([0.4])
    assert (interval.mean, interval.n, interval.method) == (0.4, 1, "one run")
    assert math.isnan(interval.low)
    assert math.isnan(interval.high)


def test_equal_runs_have_an_interval_of_width_zero() -> None:
    assert t_interval([0.5, 0.5, 0.5]) == Interval(0.5, 0.5, 0.5, 3, 0.95, "t over runs, no spread")


def test_paired_t_uses_differences_of_common_seeds() -> None:
    # Differences 1, 2, 3: t^2 = 12; at 2 degrees of freedom p = 1 - t / sqrt(t^2 + 2) = 1 - sqrt(12 / 14).
    result = paired_t({2: 12.0, 0: 101.0, 1: 7.0, 9: 1e6}, {0: 100.0, 1: 5.0, 2: 9.0, 8: -1e6})
    assert result.seeds == (0, 1, 2)
    assert result.interval.mean == pytest.approx(2.0)
    assert result.interval.low == pytest.approx(2 - 4.302653 / math.sqrt(3), abs=1e-5)
    assert result.p_value == pytest.approx(1 - math.sqrt(12 / 14), abs=1e-12)
    reverse = paired_t({0: 100.0, 1: 5.0, 2: 9.0}, {0: 101.0, 1: 7.0, 2: 12.0})
    assert reverse.interval.mean == pytest.approx(-2.0)
    assert reverse.p_value == pytest.approx(result.p_value)


def test_paired_t_without_spread_or_with_one_seed() -> None:
    same = paired_t({0: 0.3, 1: 0.4}, {0: 0.3, 1: 0.4})
    assert (same.interval.low, same.interval.high, same.p_value) == (0.0, 0.0, 1.0)
    # .4 - .3 and .3 - .2 differ by rounding only.
    constant = paired_t({0: 0.4, 1: 0.3}, {0: 0.3, 1: 0.2})
    assert constant.interval.high == pytest.approx(0.1)
    assert math.isnan(constant.p_value)
    one = paired_t({0: 0.4, 1: 0.3}, {1: 0.2})
    assert one.seeds == (1,)
    assert one.interval.method == "one run"
    assert math.isnan(one.p_value)
    assert math.isnan(one.interval.low)


def test_bootstrap_of_two_prompts_spans_both() -> None:
    # Resampled means are 0, 1/2, 1 with weights 1/4, 1/2, 1/4: the 2.5 % and 97.5 % points are 0 and 1.
    interval = prompt_bootstrap([0.0, 1.0], None, np.random.default_rng(0))
    assert (interval.mean, interval.low, interval.high, interval.n) == (0.5, 0.0, 1.0, 2)


def test_bootstrap_reaches_the_normal_interval_for_many_prompts() -> None:
    values = np.random.default_rng(1).normal(0.3, 2.0, size=2000)
    interval = prompt_bootstrap(values, None, np.random.default_rng(2))
    half = 1.959964 * values.std(ddof=1) / math.sqrt(2000)
    assert interval.high - values.mean() == pytest.approx(half, rel=0.05)
    assert values.mean() - interval.low == pytest.approx(half, rel=0.05)
    narrow = prompt_bootstrap(values, None, np.random.default_rng(2), level=0.5)
    assert narrow.high - narrow.low == pytest.approx(2 * half * 0.674490 / 1.959964, rel=0.05)


def test_bootstrap_covers_the_true_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(3)
    hits = 0
    for _ in range(400):
        interval = prompt_bootstrap(rng.exponential(size=40), None, rng, level=0.9, resamples=600)
        hits += interval.low <= 1 <= interval.high
    # Binomial standard error .015; BCa is known to fall short by a few points for skewed data of this size.
    assert 0.83 <= hits / 400 <= 0.94


def test_bootstrap_corrects_for_skew() -> None:
    values = np.random.default_rng(4).exponential(size=60)
    interval = prompt_bootstrap(values, None, np.random.default_rng(5))
    assert interval.high - interval.mean > 1.15 * (interval.mean - interval.low)


def test_bootstrap_resamples_prompts_in_pairs() -> None:
    rng = np.random.default_rng(6)
    difficulty = rng.normal(0, 10, size=300)
    gain = rng.normal(0.2, 0.1, size=300)
    interval = prompt_bootstrap(difficulty + gain, difficulty, np.random.default_rng(7))
    # Were a and b resampled apart, the width would be that of the difficulties: more than 2.
    width = 2 * 1.96 * gain.std(ddof=1) / math.sqrt(300)
    assert interval.high - interval.low == pytest.approx(width, rel=0.1)
    assert interval.mean == pytest.approx(gain.mean())


def test_bootstrap_depends_on_nothing_but_its_generator() -> None:
    values = np.arange(10.0) ** 2
    first = prompt_bootstrap(values, None, np.random.default_rng(8), resamples=200)
    assert prompt_bootstrap(values, None, np.random.default_rng(8), resamples=200) == first
    assert prompt_bootstrap(values, None, np.random.default_rng(9), resamples=200) != first


def test_bootstrap_without_spread_or_with_one_prompt() -> None:
    rng = np.random.default_rng(0)
    flat = prompt_bootstrap([0.4, 0.3], [0.3, 0.2], rng)
    assert flat.low == flat.high == flat.mean == pytest.approx(0.1)
    assert flat.method.endswith("no spread")
    one = prompt_bootstrap([0.4], None, rng)
    assert one.method == "one prompt"
    assert math.isnan(one.low)
    assert math.isnan(one.high)


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        # Only all-plus and all-minus are as far from zero as the observed mean.
        ([1.0, 2.0, 3.0, 4.0, 5.0], 2 / 32),
        # |sum| >= 8 of 1, 2, 3, 4, with sign: 8 (flip 1), 10, and their negatives.
        ([-1.0, 2.0, 3.0, 4.0], 4 / 16),
        ([1.0, 2.0, -3.0], 1.0),
        ([0.0, 0.0], 1.0),
        ([0.7], 1.0),
        ([1.0] * 13, 2 / 2**13),
    ],
)
def test_sign_flip_is_exact_for_few_prompts(differences: list[float], expected: float) -> None:
    assert sign_flip_p(differences, np.random.default_rng(0)) == pytest.approx(expected)


def test_sign_flip_of_many_prompts_is_near_the_z_test() -> None:
    values = np.random.default_rng(1).normal(0.1, 1.0, size=400)
    # Under sign flips the sum has variance sum of squares exactly.
    z = abs(values.sum()) / math.sqrt((values**2).sum())
    expected = math.erfc(z / math.sqrt(2))
    assert sign_flip_p(values, np.random.default_rng(2)) == pytest.approx(expected, abs=0.008)


def test_holm_by_hand() -> None:
    # .005 * 4, .01 * 3, .03 * 2, then .04 * 1 raised to the one before it.
    adjusted = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert list(adjusted) == ["a", "b", "c", "d"]
    assert adjusted == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06, "d": 0.02})


def test_holm_stops_at_one_and_leaves_out_nan() -> None:
    adjusted = holm({"one run": math.nan, "a": 0.6, "b": 0.02})
    assert math.isnan(adjusted["one run"])
    assert adjusted["b"] == pytest.approx(0.04)
    assert adjusted["a"] == pytest.approx(0.6)
    assert holm({"a": 0.6, "b": 0.7}) == {"a": 1.0, "b": 1.0}
    assert holm({}) == {}


def test_iqm_by_hand() -> None:
    assert iqm(range(1, 9)) == 4.5
    assert iqm([100.0, 1.0, 2.0, -100.0]) == 1.5
    assert iqm([1.0, 2.0, 6.0]) == 3.0


def test_probability_of_improvement_by_hand() -> None:
    # Of nine pairs: 1 beats 0; 2 beats 0 and ties twice; 3 beats all three.
    assert probability_of_improvement([1, 2, 3], [2, 2, 0]) == pytest.approx(6 / 9)
    assert probability_of_improvement([2, 2, 0], [1, 2, 3]) == pytest.approx(3 / 9)
    assert probability_of_improvement([1.0], [0.0, 0.5, 0.9, 0.2]) == 1.0


def test_mistakes_are_named() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match=r"a has \[0, 1\], b has \[2\]"):
        paired_t({0: 1.0, 1: 1.0}, {2: 1.0})
    with pytest.raises(ValueError, match="level is 95"):
        t_interval([1.0, 2.0], level=95)
    with pytest.raises(ValueError, match=r"shape \(0,\)"):
        iqm([])
    with pytest.raises(ValueError, match="1 NaN or infinite of 2"):
        t_interval([1.0, math.nan])
    with pytest.raises(ValueError, match="3 prompts and b 2"):
        prompt_bootstrap([1.0, 2.0, 3.0], [1.0, 2.0], rng)
    with pytest.raises(ValueError, match=r"shape \(2, 2\)"):
        prompt_bootstrap(np.eye(2), None, rng)
    with pytest.raises(ValueError, match=r"'x': 1\.2"):
        holm({"x": 1.2, "y": 0.1})
