"""The benchmarks of the evaluation in the report: means of every category per variant, differences with intervals."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from margrpo.benchmarks.suite import COLUMNS, summarize
from margrpo.errors import MargrpoError
from margrpo.metrics.statistics import paired_t, prompt_bootstrap, t_interval
from margrpo.sources import Benchmark
from pipeline.report import numbers
from pipeline.report.data import BASE, StudyData
from pipeline.report.tables import Table

FILE = "benchmarks.csv"


@dataclass(frozen=True)
class Results:
    """Results of every evaluated policy.

    Attributes:
        tables: run -> table of results (`margrpo.benchmarks.suite.COLUMNS`).
        means: run -> benchmark -> score -> numbers (`margrpo.benchmarks.suite.summarize`).
    """

    tables: dict[str, pd.DataFrame]
    means: dict[str, dict[str, dict[str, dict[str, float]]]]

    def prompts(self, run: str, benchmark: str, score: str) -> pd.DataFrame:
        """Return mean and weight of every prompt, indexed by its place in the benchmark."""
        table = self.tables[run]
        rows = table[(table["benchmark"] == benchmark) & (table["score"] == score)]
        return rows.set_index("index")[["mean", "weight"]]

    def value(self, run: str, benchmark: str, score: str, category: str) -> float:
        """Return a mean, NaN where no image has a score."""
        return self.means[run].get(benchmark, {}).get(score, {}).get(category, float("nan"))


def load_results(study: StudyData, root: Path) -> Results:
    """Read the results on the benchmarks of the study's params.

    Raises:
        MargrpoError: a run has none of them.
    """
    wanted = {(name, score) for name, given in _benchmarks(study).items() for score in given.scores}
    tables = {}
    for run in (study.base, *study.runs) if wanted else ():
        path = root / "reports" / "evaluation" / run.name / FILE
        try:
            table = pd.read_csv(
                path, keep_default_na=False, na_values={"mean": [""]}, dtype={"category": str, "prompt": str}
            )
            there = set(zip(table["benchmark"], table["score"], strict=True))
        except (OSError, ValueError, KeyError) as error:
            raise MargrpoError(f"report: {path} is not readable ({error}); run `dvc repro`") from error
        if not wanted <= there or set(COLUMNS) - set(table.columns):
            lacking = ", ".join("/".join(pair) for pair in sorted(wanted - there)) or "columns"
            raise MargrpoError(f"report: {path} lacks {lacking}; run `dvc repro`")
        tables[run.name] = table
    return Results(tables, {name: summarize(table) for name, table in tables.items()})


def benchmark_tables(study: StudyData, found: Results) -> list[Table]:
    """Return two tables per benchmark: means of the variants, and the declared comparisons."""
    tables = []
    for name, given in _benchmarks(study).items():
        if given.scores:
            tables.append(_means(study, found, name, given))
            tables.append(_comparisons(study, found, name, given))
    return [table for table in tables if table.rows]


def benchmark_numbers(study: StudyData, found: Results) -> dict[str, Any]:
    """Return variant -> benchmark -> score -> mean over seeds, for metrics.json."""
    result: dict[str, Any] = {}
    for variant in (BASE, *study.variants):
        for name, given in _benchmarks(study).items():
            for score in given.scores:
                values = _by_seed(study, found, variant, name, score, "all")
                if values:
                    mean = float(np.mean(list(values.values())))
                    result.setdefault(variant, {}).setdefault(name, {})[score] = mean
    return result


def failures(study: StudyData) -> list[tuple[str, str]]:
    """Return a line of the setting on test images that have no reward; none if every image has one."""
    lines = []
    for run in (study.base, *study.runs):
        for sampler in study.config.evaluation.samplers:
            failed = run.value("last", sampler, "failed")
            if failed > 0:
                total = run.value("last", sampler, "n_images")
                lines.append(f"{run.name} {sampler.upper()} {failed:.0f} of {total:.0f}")
    if not lines:
        return []
    policies = {
        name: study.config.reward.options[name].on_failure if name in study.config.reward.options else "drop"
        for name in study.config.reward.weights
    }
    listed = ", ".join(f"{name}: {policy}" for name, policy in policies.items())
    return [
        ("Images without a reward", f"{'; '.join(lines)}; they are in no mean (policy on failure {listed})")
    ]


def _benchmarks(study: StudyData) -> dict[str, Benchmark]:
    return study.config.evaluation.benchmarks


def _runs(study: StudyData, variant: str) -> dict[int, str]:
    """Return seed -> run; the base is one policy under seed 0."""
    return {0: BASE} if variant == BASE else {run.seed: run.name for run in study.of(variant)}


def _by_seed(
    study: StudyData, found: Results, variant: str, name: str, score: str, category: str
) -> dict[int, float]:
    values = {seed: found.value(run, name, score, category) for seed, run in _runs(study, variant).items()}
    return {seed: value for seed, value in values.items() if value == value}


def _means(study: StudyData, found: Results, name: str, given: Benchmark) -> Table:
    base = found.means[BASE][name]
    counted = {"n_images", "failed", "all"}
    categories = list(dict.fromkeys(key for of in base.values() for key in of if key not in counted))
    columns = ["all", *categories] if len(categories) > 1 else ["all"]
    rows = []
    for score in given.scores:
        for variant in (BASE, *study.variants):
            cells = []
            for category in columns:
                values = list(_by_seed(study, found, variant, name, score, category).values())
                if not values:
                    cells.append(numbers.MISSING)
                    continue
                cells.append(numbers.spread(t_interval(values, study.config.report.level), 4))
            failed = sum(found.value(run, name, score, "failed") for run in _runs(study, variant).values())
            seeds = "" if variant == BASE else str(len(study.of(variant)))
            rows.append((f"{score}: {variant}", seeds, *cells, f"{failed:.0f}"))
    return Table(
        f"Benchmark {name}",
        ("score: variant", "seeds", *columns, "without score"),
        tuple(rows),
        f"{_how(study, found, name, given)} Mean over training seeds ± half width of the {_percent(study)} "
        "t-interval over seeds (one seed: no interval); last checkpoints. Without score: images, over all "
        "seeds, that the score failed on or does not apply to; they are in no mean "
        f"({_policies(study, given)}).",
    )


def _comparisons(study: StudyData, found: Results, name: str, given: Benchmark) -> Table:
    rows = []
    for score in given.scores:
        for first, second in study.config.report.comparisons:
            row = _comparison(study, found, (first, second), name, score)
            if row is not None:
                rows.append((f"{score}: {first} − {second}", *row))
    return Table(
        f"Benchmark {name}: comparisons",
        ("score: first − second", "seeds", "prompts", "over prompts", "over seeds"),
        tuple(rows),
        "Difference of the totals, same noise in both. Over prompts: prompts resampled in pairs, the common seeds "
        f"averaged first ({_percent(study)} BCa bootstrap, {study.config.report.resamples:,} resamples): how "
        "well these checkpoints are told apart. Over seeds: t-interval on per-seed differences: how another "
        "training seed would turn out. Not adjusted for the number of comparisons.",
    )


def _comparison(
    study: StudyData, found: Results, pair: tuple[str, str], name: str, score: str
) -> tuple[str, str, str, str] | None:
    ours, theirs = (_runs(study, variant) for variant in pair)
    # The base is one policy: its single evaluation is the partner of every seed.
    ours = dict.fromkeys(theirs, BASE) if pair[0] == BASE else ours
    theirs = dict.fromkeys(ours, BASE) if pair[1] == BASE else theirs
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return None
    differences = pd.concat(
        [_difference(found, ours[seed], theirs[seed], name, score) for seed in seeds], axis=1, join="inner"
    ).mean(axis=1)
    if differences.empty:
        return None
    report = study.config.report
    # One generator per row, so that adding a comparison changes no other interval.
    interval = prompt_bootstrap(
        differences.to_numpy(), None, np.random.default_rng(0), report.level, report.resamples
    )
    a, b = ({seed: found.value(runs[seed], name, score, "all") for seed in seeds} for runs in (ours, theirs))
    known = [seed for seed in seeds if a[seed] == a[seed] and b[seed] == b[seed]]
    over_seeds = paired_t({seed: a[seed] for seed in known}, {seed: b[seed] for seed in known}, report.level)
    return (
        str(len(seeds)),
        str(len(differences)),
        numbers.signed(interval, 4),
        numbers.signed(over_seeds.interval, 4),
    )


def _difference(found: Results, first: str, second: str, name: str, score: str) -> pd.Series:
    """Return the prompts' differences, scaled by their weights so that their plain mean is that of the totals."""
    ours, theirs = (found.prompts(run, name, score) for run in (first, second))
    both = ours.assign(other=theirs["mean"]).dropna()
    return (both["mean"] - both["other"]) * both["weight"] / both["weight"].mean()


def _how(study: StudyData, found: Results, name: str, given: Benchmark) -> str:
    """Return how the images were made: sampler, steps, guidance, precision, noise, numbers."""
    table, sampler = found.tables[BASE], study.config.sampler
    rows = table[table["benchmark"] == name]
    prompts = rows["index"].nunique()
    images = int((rows["images"] + rows["failed"]).groupby(rows["index"]).max().sum())
    guidance = given.guidance or study.config.evaluation.guidance
    source = given.prompts if given.prompts != "file" else "own prompts"
    return (
        f"{given.sampler.upper()} samples of {prompts} prompts ({source}), {images:,} images; "
        f"{sampler.ar_steps} AR steps × {sampler.denoising_steps} denoising steps, guidance {guidance:g}, "
        f"{given.precision}; the noise of an image depends on its prompt's index and its own index only."
    )


def _policies(study: StudyData, given: Benchmark) -> str:
    options = {**study.config.reward.options, **study.config.evaluation.options}
    chosen = {name: options[name].on_failure if name in options else "drop" for name in given.scores}
    return "policy on failure: " + ", ".join(f"{name} {policy}" for name, policy in chosen.items())


def _percent(study: StudyData) -> str:
    return f"{100 * study.config.report.level:.3g} %"
