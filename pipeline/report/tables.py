"""The tables of the report, as text cells: one source for HTML, Markdown and CSV."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pandas as pd

from margrpo.metrics.statistics import Interval, PairedDifference, t_interval
from pipeline.report import numbers
from pipeline.report.claims import gradient_norm
from pipeline.report.comparisons import COST_TOLERANCE, Comparison, EqualCost, WithinRun
from pipeline.report.data import BASE, Evaluated, Measure, StudyData, TrainedRun, reward

_CHECKPOINTS = ("last", "best", "milestone")


@dataclass(frozen=True)
class Table:
    """A table with its caption and the note below it; the first column holds names, the others numbers.

    A folded one is closed in the HTML until the reader opens it.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str
    highlights: frozenset[int] = field(default_factory=frozenset)
    folded: bool = False
    kind: ClassVar[str] = "table"


def variants_table(study: StudyData) -> Table:
    """Return the headline table: a row per variant, mean over seeds with half width of the t-interval."""
    sampler = study.sampler
    other = [name for name in study.config.evaluation.samplers if name != sampler]
    measures: list[tuple[str, Measure, bool]] = [
        (f"reward {sampler.upper()}", reward("last", sampler), False)
    ]
    measures += [(f"reward {name.upper()}", reward("last", name), False) for name in other]
    measures += [
        ("seen", reward("last", sampler, "reward_seen"), False),
        ("unseen", reward("last", sampler, "reward_unseen"), False),
        ("diversity", reward("last", sampler, "diversity"), False),
        ("KL to base", lambda run: run.kl(), True),
        ("gradient norm", _gradient_norm, True),
        ("core-s/update", _core_seconds_per_update, True),
    ]
    rows = [(BASE, "", *(_single(measure(study.base), wide) for _, measure, wide in measures))]
    for variant in study.variants:
        cells = [_cell(study, variant, measure, wide) for _, measure, wide in measures]
        rows.append((variant, str(len(study.of(variant))), *cells))
    means = [_mean(study, variant, measures[0][1]) for variant in study.variants]
    known = [index for index, mean in enumerate(means) if math.isfinite(mean)]
    best = [max(known, key=lambda index: means[index]) + 1] if known else []
    return Table(
        "Variants after the last update",
        ("variant", "seeds", *(label for label, _, _ in measures)),
        tuple(rows),
        f"Mean over training seeds ± half width of the {_percent(study)} t-interval over seeds (one seed: "
        f"no interval). Seen and unseen: {sampler.upper()} reward on prompts whose composition does or does "
        "not occur in training. Diversity: mean absolute pixel difference between images of one prompt. "
        "KL: per token and denoising step, on states of the base. Gradient norm: of the trained parameters "
        "before clipping, mean over updates; end-to-end variants train more parameters. Core-seconds: CPU "
        "time of training, all included. The highest mean is in bold; whether it differs is for the "
        "comparisons below.",
        frozenset(best),
    )


def details_table(study: StudyData) -> Table:
    """Return the secondary measures: best checkpoint, categories, strict rule, Vendi, high frequencies."""
    sampler = study.sampler
    last = study.base.evaluation.get("last", {}).get(sampler, {})
    skipped = {"reward_seen", "reward_unseen"}
    categories = [name for name in last if name.startswith("reward_") and name not in skipped]
    measures: list[tuple[str, Measure]] = [
        (name.removeprefix("reward_"), reward("last", sampler, name)) for name in categories
    ]
    measures += [
        ("strict", reward("last", sampler, "strict")),
        ("best on validation", reward("best", sampler)),
        ("Vendi", reward("last", sampler, "vendi")),
        ("high frequencies", reward("last", sampler, "high_frequency")),
    ]
    rows = [(BASE, *(_single(measure(study.base), False) for _, measure in measures))]
    rows += [
        (variant, *(_cell(study, variant, measure, False) for _, measure in measures))
        for variant in study.variants
    ]
    return Table(
        f"Categories and other measures ({sampler.upper()})",
        ("variant", *(label for label, _ in measures)),
        tuple(rows),
        f"Mean over seeds ± half width of the {_percent(study)} t-interval over seeds. Categories: reward "
        "on their test prompts. Strict: share of images with every object, count, color and relation "
        "right. Best on validation: reward of the checkpoint that validation prompts chose. Vendi: "
        f"effective number of different images among {study.config.evaluation.images_per_prompt} of a "
        "prompt. High frequencies: share of spectral energy above half of Nyquist; it falls when images "
        "are smoothed.",
    )


def comparisons_table(
    study: StudyData, primary: list[Comparison], others: dict[str, list[Comparison]]
) -> Table:
    """Return the declared comparisons: primary metric with p values, further metrics with plain intervals."""
    rows = []
    absent = [_pair(row.first, row.second) for row in primary if row.difference is None]
    for index, row in enumerate(primary):
        if row.difference is None:
            continue
        extra = [_signed(column[index].difference) for column in others.values()]
        rows.append(
            (
                _pair(row.first, row.second),
                str(len(row.difference.seeds)),
                numbers.signed(row.difference.interval),
                numbers.p_text(row.difference.p_value),
                numbers.p_text(row.adjusted),
                *extra,
            )
        )
    tested = sum(not math.isnan(row.adjusted) for row in primary)
    return Table(
        f"Comparisons at equal updates ({study.sampler.upper()} reward, last checkpoint)",
        ("first − second", "seeds", "difference", "p", "p (Holm)", *others),
        tuple(rows),
        f"Difference of the means with its {_percent(study)} t-interval on per-seed paired differences; "
        f"two-sided paired t-test; Holm adjustment over the family of {tested} tested comparisons of this "
        "table. Comparisons with the base subtract its one evaluation on the same prompts and noise from "
        "every seed. Columns right of the p values are secondary: their intervals are not adjusted."
        + (f" Not in this study: {'; '.join(absent)}." if absent else ""),
    )


def equal_cost_table(study: StudyData, rows: list[EqualCost]) -> Table:
    """Return the comparisons at equal core-seconds."""
    cells = []
    for row in rows:
        if row.checkpoint is None:
            difference, raw = "no: no checkpoint cost so little", math.nan
        elif row.difference is None:
            difference, raw = "not evaluated", math.nan
        else:
            difference, raw = numbers.signed(row.difference.interval), row.difference.p_value
        cells.append(
            (
                _pair(row.first, row.second),
                row.checkpoint or numbers.MISSING,
                numbers.plain(row.first_cost, 1),
                numbers.plain(row.second_cost, 1),
                difference,
                numbers.p_text(raw),
                numbers.p_text(row.adjusted),
            )
        )
    tested = sum(not math.isnan(row.adjusted) for row in rows)
    milestone = study.config.train.milestone
    return Table(
        f"Comparisons at equal core-seconds ({study.sampler.upper()} reward)",
        (
            "first − second",
            "checkpoint of first",
            "its core-s",
            "core-s of second",
            "difference",
            "p",
            "p (Holm)",
        ),
        tuple(cells),
        f"The first variant counts at its last checkpoint where that cost no more CPU ({COST_TOLERANCE:.0%} allowed) "
        "than the second one's whole training, else after update "
        f"{milestone if milestone is not None else '(none set)'}, else there is no fair "
        "comparison. Core-seconds were measured during training (mean over the common seeds) and vary with the "
        f"load of the machine. {_percent(study)} t-interval on per-seed paired differences, paired t-test, Holm "
        f"over the {tested} tested comparisons of this table.",
    )


def within_runs_table(study: StudyData, rows: list[WithinRun]) -> Table:
    """Return the run-by-run differences with intervals over prompts."""
    return Table(
        f"Run by run ({study.sampler.upper()} reward, last checkpoint)",
        ("first − second", "prompts", "difference"),
        tuple(
            (_pair(row.first, row.second), str(row.interval.n), numbers.signed(row.interval)) for row in rows
        ),
        f"{_percent(study)} BCa bootstrap interval, test prompts resampled in pairs (images of a prompt "
        f"averaged, same noise seeds in both; {study.config.report.resamples:,} resamples), not adjusted. "
        "These intervals say how well two given checkpoints are told apart, not how another training seed "
        "would turn out.",
        folded=True,
    )


def results(study: StudyData) -> pd.DataFrame:
    """Return every evaluated number, one row per run, checkpoint and sampler."""
    rows: list[dict[str, Any]] = []
    for run in (study.base, *study.runs):
        trained = isinstance(run, TrainedRun)
        for checkpoint in _CHECKPOINTS:
            for sampler in study.config.evaluation.samplers:
                values = run.evaluation.get(checkpoint, {}).get(sampler)
                if values is None:
                    continue
                rows.append(
                    {
                        "run": run.name,
                        "variant": run.variant if isinstance(run, TrainedRun) else BASE,
                        "seed": run.seed if isinstance(run, TrainedRun) else None,
                        "checkpoint": checkpoint,
                        "sampler": sampler,
                        **values,
                        "kl_to_base": run.kl() if checkpoint == "last" else None,
                        "grad_norm": _gradient_norm(run) if trained and checkpoint == "last" else None,
                        "core_s_per_update": _core_seconds_per_update(run)
                        if trained and checkpoint == "last"
                        else None,
                    }
                )
    return pd.DataFrame(rows).astype({"seed": "Int64"})


def headline(study: StudyData, primary: list[Comparison], equal_cost: list[EqualCost]) -> dict[str, Any]:
    """Return the numbers for `dvc metrics diff`: means per variant and differences, if measured."""
    samplers = study.config.evaluation.samplers
    measures: dict[str, Measure] = {f"reward_{name}": reward("last", name) for name in samplers}
    measures["reward_unseen"] = reward("last", study.sampler, "reward_unseen")
    measures["diversity"] = reward("last", study.sampler, "diversity")
    measures["kl_to_base"] = lambda run: run.kl()
    variants = {BASE: {name: measure(study.base) for name, measure in measures.items()}}
    for variant in study.variants:
        variants[variant] = {name: _mean(study, variant, measure) for name, measure in measures.items()}
    differences = {row.key: _interval_numbers(row.difference.interval) for row in primary if row.difference}
    at_cost = {
        f"{row.first}_minus_{row.second}": _interval_numbers(row.difference.interval)
        for row in equal_cost
        if row.difference
    }
    found = {"variants": variants, "differences": differences, "differences_at_equal_cost": at_cost}
    return {section: {key: _finite(value) for key, value in rows.items()} for section, rows in found.items()}


def _interval_numbers(interval: Interval) -> dict[str, float]:
    return {"mean": interval.mean, "low": interval.low, "high": interval.high}


def _signed(difference: PairedDifference | None) -> str:
    return numbers.MISSING if difference is None else numbers.signed(difference.interval)


def _finite(values: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if math.isfinite(value)}


def _gradient_norm(run: Evaluated) -> float:
    return gradient_norm(run) if isinstance(run, TrainedRun) else math.nan


def _core_seconds_per_update(run: Evaluated) -> float:
    return run.core_seconds() / run.updates() if isinstance(run, TrainedRun) else math.nan


def _mean(study: StudyData, variant: str, measure: Measure) -> float:
    values = list(study.by_seed(variant, measure).values())
    return sum(values) / len(values) if values else math.nan


def _cell(study: StudyData, variant: str, measure: Measure, wide: bool) -> str:
    values = list(study.by_seed(variant, measure).values())
    if not values:
        return numbers.MISSING
    interval = t_interval(values, study.config.report.level)
    return numbers.spread_significant(interval) if wide else numbers.spread(interval)


def _single(value: float, wide: bool) -> str:
    return numbers.significant(value, 2) if wide else numbers.plain(value)


def _pair(first: str, second: str) -> str:
    return f"{first} − {second}"


def _percent(study: StudyData) -> str:
    return f"{100 * study.config.report.level:.3g} %"
