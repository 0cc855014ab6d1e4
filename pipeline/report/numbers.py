"""How numbers are written in the report."""

from __future__ import annotations

import math

from margrpo.metrics.statistics import Interval

MISSING = "n/a"


def plain(value: float, digits: int = 3) -> str:
    """Return a number with fixed decimals, n/a for NaN."""
    return MISSING if math.isnan(value) else f"{value:.{digits}f}"


def significant(value: float, digits: int = 3) -> str:
    """Return a number with significant digits and without exponent down to 1e-4; n/a for NaN."""
    if math.isnan(value):
        return MISSING
    if value == 0.0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}" if decimals <= 7 else f"{value:.{digits - 1}e}"


def spread(interval: Interval, digits: int = 3) -> str:
    """Return `mean ± half width`; the mean alone where one run gives no interval."""
    half = (interval.high - interval.low) / 2
    if math.isnan(half):
        return plain(interval.mean, digits)
    return f"{plain(interval.mean, digits)} ± {plain(half, digits)}"


def spread_significant(interval: Interval) -> str:
    """Return `mean ± half width` with two significant digits of the mean."""
    half = (interval.high - interval.low) / 2
    mean = significant(interval.mean, 2)
    if math.isnan(half):
        return mean
    decimals = len(mean.partition(".")[2]) if "e" not in mean else 3
    return f"{mean} ± {half:.{decimals}f}" if "e" not in mean else f"{mean} ± {half:.1e}"


def signed(interval: Interval, digits: int = 3) -> str:
    """Return `+mean [low, high]`; `+mean (one run)` where there is no interval."""
    mean = f"{interval.mean:+.{digits}f}".replace("-", "−")
    if math.isnan(interval.low):
        return f"{mean} ({interval.method})"
    return f"{mean} [{interval.low:+.{digits}f}, {interval.high:+.{digits}f}]".replace("-", "−")


def p_statement(value: float) -> str:
    """Return `p = 0.012`, or `p < 0.001`, with no-break spaces."""
    text = p_text(value)
    return (f"p {text}" if text.startswith("<") else f"p = {text}").replace(" ", "\u00a0")


def p_text(value: float) -> str:
    """Return a p value with three decimals, `< 0.001` below that, n/a for NaN."""
    if math.isnan(value):
        return MISSING
    return "< 0.001" if value < 0.001 else f"{value:.3f}"
