"""The answer of the report, in what a reader takes in within half a minute."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

import pandas as pd

from margrpo.metrics.statistics import Interval
from pipeline.report import numbers
from pipeline.report.claims import Claim, is_significant
from pipeline.report.comparisons import Comparison
from pipeline.report.data import BASE, StudyData, reward

# What a pair of variants says about, in words; any other pair goes by its names.
_INGREDIENTS = {
    ("frozen_head", BASE): "reinforcing at all, head frozen",
    ("frozen_head", "grpo"): "freezing the head",
    ("mte", "frozen_head"): "multi-trajectory expectation (MTE)",
    ("mte_topk", "frozen_head"): "MTE on the uncertain tokens",
    ("mte_topk", "mte"): "uncertain tokens instead of all",
    ("consistency", "frozen_head"): "consistency filter",
    ("mar_grpo", "frozen_head"): "all of MAR-GRPO, as the paper reads",
    ("mar_grpo_released", "frozen_head"): "all of MAR-GRPO, as released",
    ("mar_grpo_bridged", "frozen_head_committed"): "bridged trajectories (this project)",
}


_SIGNAL = 2.0  # a signal-to-noise ratio below this is hardly a signal: without any it is about 1


@dataclass(frozen=True)
class Effect:
    """One declared comparison in words: helps, hurts or open."""

    name: str
    pair: str
    interval: Interval
    adjusted: float
    seeds: int
    verdict: str


@dataclass(frozen=True)
class Lead:
    """The answer in one sentence, and the points behind it: label and text."""

    answer: str
    points: tuple[tuple[str, str], ...]


def effects_of(study: StudyData, primary: list[Comparison]) -> list[Effect]:
    """Return the comparisons that were made, in the order of params.yaml."""
    level, found = study.config.report.level, []
    for row in primary:
        if row.difference is None:
            continue
        pair, interval = f"{row.first} − {row.second}", row.difference.interval
        verdict = "open"
        if is_significant(row.adjusted, level):
            verdict = "helps" if interval.mean > 0 else "hurts"
        name = _INGREDIENTS.get((row.first, row.second), pair)
        found.append(Effect(name, pair, interval, row.adjusted, len(row.difference.seeds), verdict))
    return found


def make_lead(
    study: StudyData, effects: list[Effect], claims: list[Claim], noise: pd.DataFrame | None
) -> Lead:
    """Return which ingredients help, by how much, and what is open."""
    points: list[tuple[str, str]] = []
    for label, verdict in (("Helps", "helps"), ("Hurts", "hurts")):
        rows = [effect for effect in effects if effect.verdict == verdict]
        if rows:
            points.append((label, "; ".join(_statement(effect) for effect in rows)))
    undecided = [effect for effect in effects if effect.verdict == "open"]
    if undecided:
        points.append(("Open", _open(undecided)))
    decided = [claim for claim in claims if claim.verdict != "open"]
    others = [
        claim for claim in decided if "reward on the test prompts" not in claim.rule
    ]  # those are the effects
    if others:
        texts = [f"{claim.text.lower()}: {claim.verdict} ({claim.evidence})" for claim in others]
        points.append(("Also decided", "; ".join(texts)))
    if noise is not None and (text := _noise(noise)):
        points.append(("Gradient", text))
    points.append(("Highest mean", _highest(study)))
    points.append(("Basis", _basis(study)))
    return Lead(_answer(study, effects), tuple(points))


def _answer(study: StudyData, effects: list[Effect]) -> str:
    updates = max((run.updates() for run in study.runs), default=0)
    helps = [effect for effect in effects if effect.verdict == "helps"]
    hurts = [effect for effect in effects if effect.verdict == "hurts"]
    if not effects:
        return "Nothing is compared: no pair of report.comparisons has runs in this study."
    if not helps and not hurts:
        if all(math.isnan(effect.adjusted) for effect in effects):
            return f"After {updates} updates nothing is decided: with one seed a variant, no difference can be tested."
        return (
            f"After {updates} updates no ingredient is shown to change the held-out reward: none of "
            f"{len(effects)} comparisons is decided after Holm's correction."
        )
    parts = [f"raised by {_names(helps)}"] if helps else []
    parts += [f"lowered by {_names(hurts)}"] if hurts else []
    left = len(effects) - len(helps) - len(hurts)
    rest = f"{left} of {len(effects)} comparisons stay open" if left else "no comparison stays open"
    return f"After {updates} updates the held-out reward is {' and '.join(parts)}; {rest}."


def _names(effects: list[Effect]) -> str:
    names = [effect.name for effect in effects]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _statement(effect: Effect) -> str:
    text = f"{effect.name} {numbers.signed(effect.interval)}"
    return (
        f"{text}, {numbers.p_statement(effect.adjusted)} (Holm)" if not math.isnan(effect.adjusted) else text
    )


def _open(effects: list[Effect]) -> str:
    closest = min(effects, key=lambda effect: (math.isnan(effect.adjusted), effect.adjusted))
    widths = [(effect.interval.high - effect.interval.low) / 2 for effect in effects]
    known = [width for width in widths if math.isfinite(width)]
    text = f"{len(effects)} comparisons; closest to a decision: {_statement(closest)}"
    if known:
        text += f". Their intervals reach ±{numbers.plain(median(known))} (median): smaller effects cannot be seen here"
    return text


def _noise(noise: pd.DataFrame) -> str:
    traces = {str(name): float(trace) for name, trace in zip(noise["variant"], noise["trace"], strict=True)}
    texts = []
    for first, second in (("mte", "frozen_head"), ("mar_grpo_bridged", "frozen_head_committed")):
        if first in traces and traces.get(second, 0.0) > 0:
            share = numbers.significant(traces[first] / traces[second], 2)
            texts.append(f"{first} has {share} times the variance of {second}")
    highest = noise["signal_to_noise"].max()
    if texts and highest < _SIGNAL:
        texts.append(
            f"no variant's signal stands out at the base policy (signal-to-noise up to {highest:.1f})"
        )
    return "; ".join(texts)


def _highest(study: StudyData) -> str:
    measure = reward("last", study.sampler)
    means = {
        variant: sum(values) / len(values)
        for variant in study.variants
        if (values := list(study.by_seed(variant, measure).values()))
    }
    base = numbers.plain(measure(study.base))
    if not means:
        return f"no run was measured; the base has {base}"
    best = max(means, key=lambda variant: means[variant])
    return f"{best} with {numbers.plain(means[best])} {study.sampler.upper()} reward; the base has {base}"


def _basis(study: StudyData) -> str:
    seeds = sorted({len(study.of(variant)) for variant in study.variants})
    span = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}" if seeds else "no"
    train = study.config.train
    prompts = study.base.prompts
    count = prompts["prompt"].nunique() if "prompt" in prompts else 0
    text = (
        f"{len(study.runs)} runs of {len(study.variants)} variants, {span} seed{'' if span == '1' else 's'} each; "
        f"{train.prompts_per_update * train.images_per_prompt} images an update; {count} test prompts × "
        f"{study.config.evaluation.images_per_prompt} images"
    )
    if any(len(study.of(variant)) == 1 for variant in study.variants):
        text += ". Variants with one run say nothing about how another seed would turn out"
    return text
