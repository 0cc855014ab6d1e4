"""Write report.html, report.md, results.csv, metrics.json and figures/ under reports/, all or nothing."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

from margrpo.config import Config
from margrpo.grids import spread
from pipeline.report import benchmarks, figures, numbers, tables
from pipeline.report.claims import Claim, is_significant, judge
from pipeline.report.comparisons import Comparison, compare, compare_at_equal_cost, compare_within_runs
from pipeline.report.data import BASE, Evaluated, StudyData, load, reward
from pipeline.report.render import Document, Picture, render
from pipeline.report.setting import describe_setting
from pipeline.report.tables import Table

QUESTION = (
    "A hybrid image generator writes continuous tokens with a masked autoregressive backbone and denoises "
    "each with a small diffusion head. Reinforcing it with GRPO: which of MAR-GRPO's ingredients raise the "
    "reward on prompts that training never saw?"
)
# The variants shown in before/after grids; fixed here, not chosen by result.
_SHOWN = ("frozen_head_committed", "mar_grpo_bridged")


def build(config: Config, root: Path) -> None:
    """Write the report of `config.study` under `root`/reports; on any error nothing there changes.

    Raises:
        MargrpoError: runs of the study are missing or unreadable.
    """
    study = load(config, root)
    reports, scratch = root / "reports", root / ".margrpo"
    scratch.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="report-", dir=scratch) as name:
        folder = Path(name)
        _write(study, root, folder)
        _replace(folder, reports)


def _write(study: StudyData, root: Path, folder: Path) -> None:
    drawn = folder / "figures"
    drawn.mkdir()
    sampler = study.sampler
    primary = compare(study, reward("last", sampler))
    others = {
        f"{name.upper()} reward": compare(study, reward("last", name))
        for name in study.config.evaluation.samplers
        if name != sampler
    }
    others["unseen"] = compare(study, reward("last", sampler, "reward_unseen"))
    others["best on validation"] = compare(study, reward("best", sampler))
    equal_cost = compare_at_equal_cost(study)
    claims = judge(study, primary, equal_cost)
    shown = _shown(study)
    found = benchmarks.load_results(study, root)
    document = Document(
        title=f"Report of the study {study.config.study.name}",
        question=QUESTION,
        answers=_answers(study, primary, claims),
        headline=_headline(study, drawn),
        variants=tables.variants_table(study),
        comparisons=[
            tables.comparisons_table(study, primary, others),
            tables.equal_cost_table(study, equal_cost),
        ],
        claims=claims,
        curves=_curves(study, drawn),
        scatter=_scatter(study, drawn),
        samples=[_sample(run, drawn) for run in shown],
        samples_note=(
            "The same test prompts, taken from the categories in turn, and the same noise for every "
            f"policy; the first seed of each variant; {sampler.upper()} samples of the last checkpoint."
        ),
        sample_prompts=_sample_prompts(study, shown),
        details=tables.details_table(study),
        within_runs=tables.within_runs_table(study, compare_within_runs(study)),
        benchmarks=benchmarks.benchmark_tables(study, found),
        setting=[*describe_setting(study, root), *benchmarks.failures(study)],
    )
    html, markdown = render(document, drawn)
    (folder / "report.html").write_text(html, encoding="utf-8")
    (folder / "report.md").write_text(markdown, encoding="utf-8")
    tables.results(study).to_csv(folder / "results.csv", index=False)
    numbers_found = tables.headline(study, primary, equal_cost)
    on_benchmarks = benchmarks.benchmark_numbers(study, found)
    if on_benchmarks:
        numbers_found["benchmarks"] = on_benchmarks
    (folder / "metrics.json").write_text(
        json.dumps(numbers_found, indent=2, allow_nan=False) + "\n", encoding="utf-8"
    )


def _replace(folder: Path, reports: Path) -> None:
    target, old = reports / "figures", folder / "old"
    if target.exists():
        os.replace(target, old)
    os.replace(folder / "figures", target)
    for path in sorted(folder.iterdir()):
        if path != old:
            os.replace(path, reports / path.name)


def _answers(study: StudyData, primary: list[Comparison], claims: list[Claim]) -> list[str]:
    """Return the findings in a few sentences."""
    measure = reward("last", study.sampler)
    means = {
        variant: sum(values) / len(values)
        for variant in study.variants
        if (values := list(study.by_seed(variant, measure).values()))
    }
    answers = []
    if means:
        best = max(means, key=lambda variant: means[variant])
        answers.append(
            f"Highest mean held-out {study.sampler.upper()} reward: {best} with "
            f"{numbers.plain(means[best])}; the base has {numbers.plain(measure(study.base))}."
        )
    level = study.config.report.level
    decided = [row for row in primary if row.difference is not None and is_significant(row.adjusted, level)]
    for row in decided:
        assert row.difference is not None
        better = "is better than" if row.difference.interval.mean > 0 else "is worse than"
        answers.append(
            f"{row.first} {better} {row.second}: {numbers.signed(row.difference.interval)} over "
            f"{len(row.difference.seeds)} seeds ({numbers.p_statement(row.adjusted)} after Holm)."
        )
    compared = sum(row.difference is not None for row in primary)
    answers.append(f"{len(decided)} of {compared} comparisons are decided at p < {1 - level:.2g} after Holm.")
    if any(len(study.of(variant)) == 1 for variant in study.variants):
        answers.append(
            "Some variants have one run only: nothing can be said about how another seed would turn out."
        )
    counts = {
        verdict: sum(claim.verdict == verdict for claim in claims)
        for verdict in ("supported", "contradicted", "open")
    }
    answers.append("Claims: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) + ".")
    return answers


def _headline(study: StudyData, drawn: Path) -> Picture:
    figures.draw_headline(study, drawn / "headline.png")
    return Picture(
        "headline.png",
        f"Held-out {study.sampler.upper()} reward of every variant with interval, and of the base",
        f"Small dots: training seeds. Large dot and line: mean and {100 * study.config.report.level:.3g} % "
        "t-interval over seeds. Dashed: the base policy.",
    )


def _curves(study: StudyData, drawn: Path) -> list[Picture]:
    pictures = []
    for name, curve in figures.CURVES.items():
        if figures.draw_curve(study, name, drawn / f"{name}.png"):
            pictures.append(Picture(f"{name}.png", f"{curve.title} over updates, by variant", curve.caption))
    return pictures


def _scatter(study: StudyData, drawn: Path) -> Picture:
    figures.draw_scatter(study, drawn / "reward_against_diversity.png")
    return Picture(
        "reward_against_diversity.png",
        "Reward against diversity, a point per run",
        "A point per run. Reward gained by making the images of a prompt alike would move a point up and "
        "to the left.",
    )


def _shown(study: StudyData) -> list[Evaluated]:
    return [study.base, *(study.of(variant)[0] for variant in _SHOWN if variant in study.variants)]


def _sample(run: Evaluated, drawn: Path) -> Picture:
    file = f"samples_{run.name}.png"
    shutil.copyfile(run.grid, drawn / file)
    return Picture(file, f"Sample grid of {run.name}: a row of images per test prompt", run.name)


def _sample_prompts(study: StudyData, shown: list[Evaluated]) -> Table:
    rewards = [run.prompt_rewards("last", study.sampler) for run in shown]
    prompts = study.base.prompts.drop_duplicates("prompt")
    groups = list(zip(prompts["category"], prompts["seen"], strict=True))
    picked = prompts.iloc[spread(groups, study.config.evaluation.grid_prompts)]
    rows = [
        (
            f"{row.prompt} ({'seen' if row.seen else 'unseen'})",
            *(numbers.plain(float(found.get(row.prompt, float("nan")))) for found in rewards),
        )
        for row in picked.itertuples()
    ]
    return Table(
        "Reward of the prompts shown",
        ("prompt", *(BASE if run is study.base else run.name for run in shown)),
        tuple(rows),
        f"Mean over the {study.config.evaluation.images_per_prompt} images of the prompt; “unseen”: the "
        "composition does not occur in training.",
    )
