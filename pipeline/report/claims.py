"""Claims of the MAR-GRPO paper (arXiv 2604.06966) and of this project, judged by rules fixed before runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from margrpo.metrics.statistics import PairedDifference, holm, t_interval
from pipeline.report.comparisons import Comparison, EqualCost, difference_of
from pipeline.report.data import Evaluated, StudyData, TrainedRun, reward
from pipeline.report.numbers import p_statement, signed

Verdict = Literal["supported", "contradicted", "open"]

# A statement about late training needs late training: the default study ends long before.
LATE_UPDATES = 500


@dataclass(frozen=True)
class Claim:
    """One claim with its rule and what the data say."""

    text: str
    source: str
    rule: str
    verdict: Verdict
    evidence: str


# First better than second in the primary metric: (claim, who makes it, first, second).
_PAIRS = (
    ("Reinforcing with a frozen head improves on the base", "paper", "frozen_head", "base"),
    ("Freezing the head gives a better reward than end-to-end GRPO", "paper", "frozen_head", "grpo"),
    ("Multi-trajectory expectation (all tokens) improves on the frozen head", "paper", "mte", "frozen_head"),
    ("Choosing the uncertain tokens improves on all tokens", "paper", "mte_topk", "mte"),
    ("Consistency filtering improves on the frozen head", "paper", "consistency", "frozen_head"),
    ("MAR-GRPO, as the text reads, improves on the frozen head", "paper", "mar_grpo", "frozen_head"),
    (
        "MAR-GRPO, as released, improves on the frozen head",
        "paper",
        "mar_grpo_released",
        "frozen_head",
    ),
    (
        "Bridged trajectories improve on the frozen head with committed tokens",
        "this project",
        "mar_grpo_bridged",
        "frozen_head_committed",
    ),
)


def judge(study: StudyData, comparisons: list[Comparison], equal_cost: list[EqualCost]) -> list[Claim]:
    """Return every claim with verdict and evidence.

    Args:
        study: the runs.
        comparisons: the declared comparisons on the primary metric (one Holm family).
        equal_cost: the same at equal core-seconds (their own family).
    """
    by_pair = {(row.first, row.second): row for row in comparisons}
    claims = [_reward_claim(study, by_pair, *pair) for pair in _PAIRS]
    claims.append(_equal_cost_claim(study, equal_cost))
    return [*claims, *_stability(study), _late_collapse(study), _late_progress(study)]


def decide(effect: float, p_value: float, level: float) -> Verdict:
    """Return supported (effect > 0) or contradicted (< 0) where p < 1 - level, else open; NaN is open."""
    if effect == 0.0 or not is_significant(p_value, level):
        return "open"
    return "supported" if effect > 0.0 else "contradicted"


def is_significant(p_value: float, level: float) -> bool:
    """Return whether p < 1 - level; False for NaN (no test was made)."""
    return p_value + level < 1.0


def _reward_claim(
    study: StudyData,
    by_pair: dict[tuple[str, str], Comparison],
    text: str,
    source: str,
    first: str,
    second: str,
) -> Claim:
    rule = (
        f"{first} − {second}, {study.sampler.upper()} reward on the test prompts, last checkpoint, paired "
        f"over seeds: Holm-adjusted p < {1 - study.config.report.level:.2g} decides by the sign, else open"
    )
    row = by_pair.get((first, second))
    if row is None:
        return Claim(text, source, rule, "open", f"not among report.comparisons: add [{first}, {second}]")
    if row.difference is None:
        return Claim(text, source, rule, "open", "not in this study")
    verdict = decide(row.difference.interval.mean, row.adjusted, study.config.report.level)
    return Claim(text, source, rule, verdict, _evidence(row.difference, row.adjusted))


def _equal_cost_claim(study: StudyData, rows: list[EqualCost]) -> Claim:
    first, second = "mar_grpo_bridged", "frozen_head_committed"
    text = "Bridged trajectories improve on that control at equal core-seconds too"
    rule = (
        f"{first}, stopped where it cost no more CPU, − {second} at its end, {study.sampler.upper()} "
        f"reward, paired over seeds: Holm-adjusted p < {1 - study.config.report.level:.2g} decides by the "
        "sign, else open"
    )
    row = next((row for row in rows if (row.first, row.second) == (first, second)), None)
    if row is None:
        return Claim(text, "this project", rule, "open", "not in this study")
    if row.difference is None:
        evidence = "no checkpoint of it cost so little" if row.checkpoint is None else "not evaluated"
        return Claim(text, "this project", rule, "open", evidence)
    verdict = decide(row.difference.interval.mean, row.adjusted, study.config.report.level)
    return Claim(text, "this project", rule, verdict, _evidence(row.difference, row.adjusted))


def _stability(study: StudyData) -> list[Claim]:
    measures: tuple[tuple[str, str, Callable[[TrainedRun], float]], ...] = (
        ("Freezing the head lowers the gradient norm", "mean gradient norm over all updates", gradient_norm),
        (
            "Freezing the head makes the training reward steadier",
            "standard deviation of the change of the training reward between updates",
            reward_jitter,
        ),
    )
    found = {text: difference_of(study, "grpo", "frozen_head", _trained(read)) for text, _, read in measures}
    p_values = {text: math.nan if row is None else row.p_value for text, row in found.items()}
    adjusted = holm(p_values)
    claims = []
    for text, what, _ in measures:
        rule = (
            f"grpo − frozen_head, {what}, paired over seeds: Holm-adjusted p (family of 2) < "
            f"{1 - study.config.report.level:.2g} decides by the sign, else open"
        )
        row = found[text]
        if row is None:
            claims.append(Claim(text, "paper", rule, "open", "not in this study"))
            continue
        verdict = decide(row.interval.mean, adjusted[text], study.config.report.level)
        claims.append(Claim(text, "paper", rule, verdict, _evidence(row, adjusted[text])))
    return claims


def gradient_norm(run: TrainedRun) -> float:
    """Return the mean gradient norm over all updates (before clipping)."""
    return float(run.metrics["grad_norm"].mean())


def reward_jitter(run: TrainedRun) -> float:
    """Return the standard deviation of the change of the training reward from update to update.

    Changes, not levels: a reward that rises steadily is steady. NaN with fewer than three updates.
    """
    return float(np.diff(run.metrics["reward"].to_numpy()).std(ddof=1)) if len(run.metrics) > 2 else math.nan


def _late_collapse(study: StudyData) -> Claim:
    text = "End-to-end GRPO collapses late in training"
    rule = (
        f"at least {LATE_UPDATES} updates; grpo, best − last checkpoint in {study.sampler.upper()} reward, "
        "t-interval over seeds: above 0 supported, below 0 contradicted, else open"
    )
    best, last = reward("best", study.sampler), reward("last", study.sampler)
    values = [best(run) - last(run) for run in study.of("grpo")]
    return _late(study, text, rule, values)


def _late_progress(study: StudyData) -> Claim:
    text = "MAR-GRPO still improves where the others saturate"
    rule = (
        f"at least {LATE_UPDATES} updates; mar_grpo, mean validation reward of the last quarter − that of "
        "the quarter before, t-interval over seeds: above 0 supported, below 0 contradicted, else open"
    )
    return _late(study, text, rule, [_late_gain(run) for run in study.of("mar_grpo")])


def _late_gain(run: TrainedRun) -> float:
    rows = run.metrics
    if "validation/reward" not in rows:
        return math.nan
    share = rows["update"] / rows["update"].iloc[-1]
    last, before = share > 0.75, (share > 0.5) & (share <= 0.75)
    return float(rows.loc[last, "validation/reward"].mean() - rows.loc[before, "validation/reward"].mean())


def _late(study: StudyData, text: str, rule: str, values: list[float]) -> Claim:
    updates = min((run.updates() for run in study.runs), default=0)
    if updates < LATE_UPDATES:
        return Claim(text, "paper", rule, "open", f"{updates} updates are too few to tell")
    measured = [value for value in values if math.isfinite(value)]
    if not measured:
        return Claim(text, "paper", rule, "open", "not in this study")
    interval = t_interval(measured, study.config.report.level)
    verdict: Verdict = "supported" if interval.low > 0 else "contradicted" if interval.high < 0 else "open"
    return Claim(text, "paper", rule, verdict, signed(interval))


def _evidence(difference: PairedDifference, adjusted: float) -> str:
    return f"{signed(difference.interval)}, {p_statement(adjusted)}"


def _trained(read: Callable[[TrainedRun], float]) -> Callable[[Evaluated], float]:
    return lambda run: read(run) if isinstance(run, TrainedRun) else math.nan
