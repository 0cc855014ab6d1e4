"""Write report.html, report.md, results.csv, metrics.json and figures/ under reports/, all or nothing."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import pandas as pd

from margrpo.config import Config
from margrpo.grids import spread
from pipeline.report import benchmarks, cost, diagnosis, figures, numbers, provenance, sweeps, tables
from pipeline.report.claims import judge
from pipeline.report.comparisons import compare, compare_at_equal_cost, compare_within_runs
from pipeline.report.data import BASE, Evaluated, StudyData, load, reward
from pipeline.report.lead import effects_of, make_lead
from pipeline.report.render import (
    Block,
    ClaimList,
    Document,
    Facts,
    Gallery,
    Picture,
    Section,
    Source,
    render,
)
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
    sampler, level = study.sampler, study.config.report.level
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
    found = benchmarks.load_results(study, root)
    noise = diagnosis.read_noise(root)
    effects = effects_of(study, primary)
    figures.draw_effects(effects, level, drawn / "effects.png")
    variants = tables.variants_table(study)
    results = Section(variants.caption, "Results", (variants, _headline(study, drawn)))
    comparisons = Section(
        "Comparisons",
        "Comparisons",
        (
            tables.comparisons_table(study, primary, others),
            tables.equal_cost_table(study, equal_cost),
            tables.within_runs_table(study, compare_within_runs(study)),
        ),
    )
    judged = Section(
        "Claims",
        "Claims",
        (ClaimList(tuple(claims)),),
        "The rules were fixed in code before the runs. “Open” means that these runs do not decide it.",
    )
    curves = Section(
        "Training curves",
        "Curves",
        tuple(_curves(study, drawn)),
        "Line: mean over seeds. Band: lowest to highest seed. The panels of a row share their axes.",
    )
    details = tables.details_table(study)
    secondary = Section(details.caption, "Categories", (details,))
    document = Document(
        title=f"Report of the study {study.config.study.name}",
        question=QUESTION,
        lead=make_lead(study, effects, claims, noise),
        effects=Picture(
            "effects.png",
            "Effect of every ingredient on the held-out reward with interval",
            f"Difference of the means with its {100 * level:.3g} % t-interval over seeds (not adjusted). Filled and "
            "colored: decided after Holm's correction; hollow: open.",
        ),
        sections=(
            results,
            comparisons,
            judged,
            *_sweeps(study, drawn),
            curves,
            Section("Reward against diversity", "Diversity", (_scatter(study, drawn),)),
            _noise(study, noise, drawn),
            *_maps(root, drawn),
            _samples(study, drawn),
            *_benchmark_sections(study, found),
            secondary,
            _cost(study, drawn),
            _provenance(study, root),
        ),
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


def _sweeps(study: StudyData, drawn: Path) -> list[Section]:
    points, level = sweeps.points_of(study), study.config.report.level
    series = sweeps.find_series(points)
    if not sweeps.differing_keys(points):
        return []
    metric = f"{study.sampler.upper()} reward"
    blocks: list[Block] = [sweeps.series_table(series, level, metric)] if series else []
    if sweeps.draw_series(series, level, metric, drawn / "switches.png"):
        caption = "Small dots: seeds. Large dot and line: mean and t-interval. The panels share their axis."
        blocks.append(Picture("switches.png", "Held-out reward over the values of single switches", caption))
    blocks.append(sweeps.switches_table(points))
    return [Section("Switches: what one key changes", "Switches", tuple(blocks))]


def _noise(study: StudyData, noise: pd.DataFrame | None, drawn: Path) -> Section:
    if noise is None:
        note = "Not measured in this study (`diagnose.gradients` in params.yaml; `margrpo diagnose` measures it)."
        return Section("Gradient noise at the base policy", "Gradient noise", (), note)
    diagnosis.draw_noise(noise, drawn / "gradient_noise.png")
    picture = Picture(
        "gradient_noise.png",
        "Variance of a gradient and signal-to-noise ratio, by variant",
        "Left: how much single gradients scatter. Right: whether their mean tells more than that scatter. Less "
        "variance alone is no merit: an estimate that forgets the reward has little of it.",
    )
    table = diagnosis.noise_table(noise, study.config.diagnose.gradients)
    return Section(table.caption, "Gradient noise", (table, picture))


def _maps(root: Path, drawn: Path) -> list[Section]:
    found = diagnosis.read_maps(root)
    if found is None:
        return []
    maps, facts = found
    diagnosis.draw_maps(maps, facts, drawn / "token_maps.png")
    alt = "Uncertainty and consistency of every token at each AR step of a few images"
    picture = Picture("token_maps.png", alt, diagnosis.maps_note(facts), chart=False)
    return [Section("What the estimator sees", "Token maps", (picture,))]


def _samples(study: StudyData, drawn: Path) -> Section:
    shown = _shown(study)
    note = (
        "The same test prompts, taken from the categories in turn, and the same noise for every policy; the first seed "
        f"of each variant; {study.sampler.upper()} samples of the last checkpoint."
    )
    pictures = tuple(_sample(study, run, drawn) for run in shown)
    return Section("Before and after", "Samples", (Gallery(pictures), _sample_prompts(study, shown)), note)


def _benchmark_sections(study: StudyData, found: benchmarks.Results) -> list[Section]:
    found_tables = tuple(benchmarks.benchmark_tables(study, found))
    return [Section("Benchmarks", "Benchmarks", found_tables)] if found_tables else []


def _cost(study: StudyData, drawn: Path) -> Section:
    table = cost.cost_table(study)
    blocks: list[Block] = [table]
    if cost.draw_cost(study, drawn / "cost.png"):
        caption = "Wall seconds of the phases, mean over runs."
        blocks.append(Picture("cost.png", "Seconds of an update by phase and variant", caption))
    return Section(table.caption, "Cost", tuple(blocks))


def _provenance(study: StudyData, root: Path) -> Section:
    facts = [
        *provenance.describe_setting(study, root),
        *benchmarks.failures(study),
        *provenance.describe_provenance(study, root),
    ]
    params = Source("Params, all keys (params.yaml, validated)", provenance.params_text(study))
    blocks = (Facts(tuple(facts)), provenance.checkpoints_table(study), params)
    return Section("Setting and provenance", "Provenance", blocks)


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
    chosen = [variant for variant in _SHOWN if variant in study.variants] or study.variants[: len(_SHOWN)]
    return [study.base, *(study.of(variant)[0] for variant in chosen)]


def _sample(study: StudyData, run: Evaluated, drawn: Path) -> Picture:
    file = f"samples_{run.name}.png"
    shutil.copyfile(run.grid, drawn / file)
    caption = "base (before)" if run is study.base else f"{run.name} (after)"
    return Picture(file, f"Sample grid of {run.name}: a row of images per test prompt", caption, chart=False)


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
