"""The report of synthetic runs whose numbers are known."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from margrpo.config import Config
from margrpo.errors import MargrpoError
from margrpo.grids import grid_png
from margrpo.maps import TokenMaps, save_maps
from margrpo.params import build_config, load_params
from pipeline.report import build, style
from pipeline.report.claims import judge
from pipeline.report.comparisons import compare, compare_at_equal_cost, compare_within_runs
from pipeline.report.data import StudyData, load, reward

PARAMS = Path(__file__).parents[2] / "params.yaml"
CATEGORIES = ("single", "color", "spatial", "numeracy")
SCRIPT = "<script>alert(1)</script> $x_{ `"
PROMPTS = [*(f'prompt <{index}> & "more" | x' for index in range(7)), SCRIPT]
# Reward of the last checkpoint by variant; seeds add 0, .01, .02 ...
REWARDS = {"base": 0.40, "grpo": 0.38, "frozen_head_committed": 0.45, "mar_grpo_bridged": 0.50}
# A per-seed wobble so that paired differences have a spread.
WOBBLE = (0.0, 0.002, -0.002)


def make_config(seeds: int = 3, **changes: Any) -> Config:
    params = load_params(PARAMS)
    params["study"] = {
        "name": "synthetic",
        "runs": {
            f"{variant}-{seed}": {"variant": variant, "seed": seed}
            for variant in ("grpo", "frozen_head_committed", "mar_grpo_bridged")
            for seed in range(seeds)
        },
    }
    params["report"] = {
        "level": 0.95,
        "resamples": 200,
        "comparisons": [
            ["frozen_head", "base"],
            ["mar_grpo_bridged", "frozen_head_committed"],
            ["grpo", "base"],
        ],
    }
    params["train"] = {**params["train"], "updates": 20, "milestone": 16, **changes}
    return build_config(params)


def reward_of(variant: str, seed: int) -> float:
    if variant == "base":
        return REWARDS["base"]
    wobble = WOBBLE[seed] if variant == "mar_grpo_bridged" else 0.0
    return REWARDS[variant] + 0.01 * seed + wobble


def write_evaluation(folder: Path, value: float, checkpoints: tuple[str, ...]) -> None:
    folder.mkdir(parents=True)
    rows, metrics = [], {}
    # Prompt rewards spread around the value, equally for every policy: differences are constant over prompts.
    offsets = np.linspace(-0.1, 0.1, len(PROMPTS))
    for checkpoint in checkpoints:
        shift = -0.02 if checkpoint == "milestone" else 0.0
        metrics[checkpoint] = {
            sampler: {
                "reward": value + shift - (0.02 if sampler == "ode" else 0.0),
                "reward_seen": value + 0.05,
                "reward_unseen": value - 0.05,
                "reward_single": value + 0.1,
                "strict": value / 2,
                "diversity": 0.15,
                "vendi": 3.0,
                "high_frequency": 0.2,
                "n_images": 64.0,
            }
            for sampler in ("ode", "sde")
        }
        for sampler in ("ode", "sde"):
            for index, prompt in enumerate(PROMPTS):
                rows.append(
                    {
                        "checkpoint": checkpoint,
                        "sampler": sampler,
                        "prompt": prompt,
                        "category": CATEGORIES[index % 4],
                        "seen": index < 4,
                        "reward": value + shift + offsets[index],
                        "strict": 0.5,
                        "diversity": 0.15,
                    }
                )
    metrics["last"]["kl_to_base"] = 0.0 if len(checkpoints) == 1 else 0.02
    (folder / "metrics.json").write_text(json.dumps(metrics))
    pd.DataFrame(rows).to_csv(folder / "prompts.csv", index=False)
    images = torch.linspace(0, 1, 4 * 2 * 3 * 32 * 32).view(4, 2, 3, 32, 32)
    (folder / "grid.png").write_bytes(grid_png(PROMPTS[:4], images))


def write_study(config: Config, root: Path) -> None:
    write_evaluation(root / "reports/evaluation/base", REWARDS["base"], ("last",))
    for name, run in config.study.runs.items():
        write_evaluation(
            root / "reports/evaluation" / name,
            reward_of(run.variant, run.seed),
            ("last", "best", "milestone"),
        )
        folder = root / "reports/runs" / name
        folder.mkdir(parents=True)
        updates = np.arange(config.train.updates)
        noise = np.random.default_rng(run.seed).normal(size=len(updates))
        pd.DataFrame(
            {
                "update": updates,
                "reward": 0.4 + 0.001 * updates + 0.01 * noise,
                "kl": 0.001 * updates,
                "grad_norm": 1.0 if run.variant == "grpo" else 0.02 + 0.001 * noise,
                "diversity": 0.15,
                "validation/reward": [0.4 + 0.001 * u if u % 5 == 4 else math.nan for u in updates],
            }
        ).to_csv(folder / "metrics.csv", index=False)
        # 1 core-second an update; bridged costs 1.2: after update 15 it has spent 19.2 of the control's 20.
        cost = 1.2 if run.variant == "mar_grpo_bridged" else 1.0
        pd.DataFrame({"update": updates, "core_s": cost * (updates + 1)}).to_csv(
            folder / "timing.csv", index=False
        )
        (folder / "summary.json").write_text(json.dumps({"run": name, "base_sha256": "ab" * 32}))


def write_diagnosis(root: Path) -> None:
    folder = root / "reports/diagnose"
    folder.mkdir(parents=True)
    rows = [("frozen_head_committed", 0.2, 4.0, 1.5, 0.1, 1.0), ("mar_grpo_bridged", 0.1, 1.0, 1.2, 0.2, 0.9)]
    columns = ["variant", "mean_norm", "trace", "signal_to_noise", "cosine", "projection"]
    pd.DataFrame(rows, columns=columns).to_csv(folder / "noise.csv", index=False)
    committed = torch.tensor([[0, 1, 1, 1]])
    known = torch.tensor([[[False] * 4], [[True, False, False, False]]])
    uncertainty = torch.tensor([[[0.5, 1.0, 0.2, 0.1]], [[0.5, 0.9, 0.1, 0.0]]]).masked_fill(known, math.nan)
    kept = ~known & torch.tensor([[[True] * 4], [[True, True, False, True]]])
    chosen = torch.tensor([[False, True, False, False]])
    images = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    found = TokenMaps(images, torch.tensor([0, 1]), committed, uncertainty, uncertainty, kept, chosen)
    facts = {"variant": "mar_grpo", "prompts": [SCRIPT], "trajectories": 3, "uncertain_fraction": 0.3}
    save_maps(folder / "maps.safetensors", found, facts | {"consistency": 0.0, "ar_steps": 2})


@pytest.fixture(scope="module", autouse=True)
def _coarse_figures() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(style, "DPI", 40)
        yield


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project")
    config = make_config()
    write_study(config, root)
    write_diagnosis(root)
    build(config, root)
    return root


@pytest.fixture(scope="module")
def study(project: Path) -> StudyData:
    return load(make_config(), project)


def test_paired_differences_and_holm(study: StudyData) -> None:
    absent, bridged, grpo = compare(study, reward("last", "sde"))
    assert absent.difference is None
    assert math.isnan(absent.adjusted)
    # Differences .05, .052, .048: mean .05, sd .002, half width 4.302653 * .002 / sqrt 3 = .004968.
    assert bridged.difference is not None
    assert bridged.difference.seeds == (0, 1, 2)
    assert bridged.difference.interval.mean == pytest.approx(0.05)
    assert bridged.difference.interval.high - 0.05 == pytest.approx(0.004968, abs=1e-6)
    # Two degrees of freedom: p = 1 - t / sqrt(t^2 + 2) with t = .05 / .0011547 = 43.3; a family of two tests.
    t = 0.05 / (0.002 / math.sqrt(3))
    assert bridged.difference.p_value == pytest.approx(1 - t / math.sqrt(t * t + 2), rel=1e-6)
    assert bridged.adjusted == pytest.approx(2 * bridged.difference.p_value)
    # grpo - base: -.02, -.01, 0: mean -.01, not decided.
    assert grpo.difference is not None
    assert grpo.difference.interval.mean == pytest.approx(-0.01)
    assert grpo.adjusted == grpo.difference.p_value > 0.05


def test_equal_cost_takes_the_milestone(study: StudyData) -> None:
    rows = compare_at_equal_cost(study)
    assert [(row.first, row.second) for row in rows] == [("mar_grpo_bridged", "frozen_head_committed")]
    row = rows[0]
    assert row.checkpoint == "milestone"
    assert (row.first_cost, row.second_cost) == (pytest.approx(19.2), pytest.approx(20.0))
    assert row.difference is not None
    assert row.difference.interval.mean == pytest.approx(0.03)


def test_equal_cost_says_when_nothing_is_cheap_enough(tmp_path: Path) -> None:
    config = make_config(milestone=18)  # 18 updates at 1.2 cost 21.6 > 20
    write_study(config, tmp_path)
    row = compare_at_equal_cost(load(config, tmp_path))[0]
    assert row.checkpoint is None
    assert row.difference is None
    assert row.first_cost == pytest.approx(21.6)
    build(config, tmp_path)
    assert "no checkpoint cost so little" in (tmp_path / "reports/report.md").read_text()


def test_within_runs_differences_are_per_prompt(study: StudyData) -> None:
    rows = {(row.first, row.second): row.interval for row in compare_within_runs(study)}
    assert len(rows) == 6
    interval = rows["mar_grpo_bridged-1", "frozen_head_committed-1"]
    assert interval.n == len(PROMPTS)
    assert interval.mean == pytest.approx(0.052)
    assert rows["grpo-0", "base"].mean == pytest.approx(-0.02)


def test_claims_follow_the_rules(study: StudyData) -> None:
    claims = {
        claim.text: claim
        for claim in judge(study, compare(study, reward("last", "sde")), compare_at_equal_cost(study))
    }
    bridged = claims["Bridged trajectories improve on the frozen head with committed tokens"]
    assert bridged.verdict == "supported"
    assert bridged.evidence == "+0.050 [+0.045, +0.055], p\u00a0=\u00a00.001"
    assert (
        claims["Bridged trajectories improve on that control at equal core-seconds too"].verdict
        == "supported"
    )
    late = claims["End-to-end GRPO collapses late in training"]
    assert (late.verdict, late.evidence) == ("open", "20 updates are too few to tell")
    frozen = claims["Reinforcing with a frozen head improves on the base"]
    assert (frozen.verdict, frozen.evidence) == ("open", "not in this study")


def test_outputs(project: Path) -> None:
    reports = project / "reports"
    results = pd.read_csv(reports / "results.csv")
    assert len(results) == 2 + 9 * 3 * 2  # base: last; nine runs: three checkpoints; two samplers each
    row = results.set_index(["run", "checkpoint", "sampler"]).loc[("mar_grpo_bridged-2", "last", "sde")]
    assert row["reward"] == pytest.approx(0.518)
    assert row["core_s_per_update"] == pytest.approx(1.2)
    metrics = json.loads((reports / "metrics.json").read_text())
    assert metrics["variants"]["base"]["reward_ode"] == pytest.approx(0.38)
    assert metrics["variants"]["mar_grpo_bridged"]["reward_sde"] == pytest.approx(0.51)
    assert metrics["differences"]["mar_grpo_bridged_minus_frozen_head_committed"]["mean"] == pytest.approx(
        0.05
    )
    markdown = (reports / "report.md").read_text()
    answer = "**After 20 updates the held-out reward is raised by bridged trajectories (this project); 1 of 2"
    assert answer in markdown
    assert "- Helps: bridged trajectories (this project) +0.050 \\[+0.045, +0.055\\]" in markdown
    # Variance 1 against 4.
    assert "mar\\_grpo\\_bridged has 0.25 times the variance of frozen\\_head\\_committed" in markdown
    # One switch at a time: S = 4 against the control's own trajectory.
    assert "| S (trajectories) | 4 | mar\\_grpo\\_bridged | 3 | 0.510 ± 0.023 | +0.050" in markdown
    # Cost: 1.2 core-seconds against 1, 3 runs of 20 updates each.
    assert re.search(r"\| mar\\_grpo\\_bridged \| 3 \| 1\.2 ± 0\.0 \| 1\.20 \|.*\| 72 \|", markdown)
    linked = re.findall(r"\(figures/([^)]+)\)", markdown)
    assert linked
    assert "Not in this study: frozen\\_head − base." in markdown
    assert sorted(set(linked)) == sorted(path.name for path in (reports / "figures").iterdir())
    # Mean over seeds .46 with half width t(2) * .01 / sqrt 3 = .025.
    assert "0.460 ± 0.025" in markdown
    assert list((project / ".margrpo").iterdir()) == []


def test_html_is_self_contained_and_escaped(project: Path) -> None:
    html = (project / "reports/report.html").read_text()
    assert re.findall(r"""(?:src|href)=["'](?!data:|#)""", html) == []
    assert "url(" not in html
    assert "@import" not in html
    assert "<script" not in html
    assert "prompt &lt;0&gt; &amp; &#34;more&#34; | x" in html
    assert "prompt <0>" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt; $x_<wbr>{ `" in html
    assert len(html) < 6_000_000
    for anchor in re.findall(r'href="#([^"]+)"', html):
        assert f'id="{anchor}"' in html
    assert "prefers-color-scheme: dark" in html
    # Table cells of prompts with a bar stay one cell in Markdown.
    assert 'prompt \\<0\\> & "more" \\| x' in (project / "reports/report.md").read_text()


def test_same_numbers_give_the_same_bytes(project: Path) -> None:
    reports = project / "reports"
    files = [*reports.glob("figures/*.png"), *reports.glob("report.*"), reports / "results.csv"]
    before = {path: path.read_bytes() for path in files}
    build(make_config(), project)
    assert {path: path.read_bytes() for path in files} == before


def test_one_seed_degrades(tmp_path: Path) -> None:
    config = make_config(seeds=1)
    write_study(config, tmp_path)
    build(config, tmp_path)
    markdown = (tmp_path / "reports/report.md").read_text()
    assert "+0.050 (one run)" in markdown
    assert re.search(r"\bnan\b", markdown.lower()) is None
    assert "**supported**" not in markdown
    assert "nothing is decided: with one seed a variant, no difference can be tested" in markdown
    assert "Variants with one run say nothing about how another seed would turn out" in markdown
    assert "Not measured in this study (`diagnose.gradients` in params.yaml" in markdown
    differences = json.loads((tmp_path / "reports/metrics.json").read_text())["differences"]
    assert differences["mar_grpo_bridged_minus_frozen_head_committed"] == {"mean": pytest.approx(0.05)}


def test_many_variants_and_numbers_that_are_missing(tmp_path: Path) -> None:
    config = make_config()
    params = config.model_dump()
    params["variants"] |= {f"beta{index}": {"beta": 0.001 * (index + 1)} for index in range(12)}
    names = [f"beta{index}" for index in range(12)]
    params["study"]["runs"] = {
        f"{name}-{seed}": {"variant": name, "seed": seed} for name in names for seed in (0, 1)
    }
    params["report"]["comparisons"] = [["beta1", "beta0"], ["beta2", "beta1"]]
    config = build_config(params)
    REWARDS.update(dict.fromkeys(names, 0.5))
    write_study(config, tmp_path)
    # beta0 has no numbers at all, beta1 only one seed's; a prompt of beta2-0 has none; curves with gaps.
    for run in ("beta0-0", "beta0-1", "beta1-1"):
        file = tmp_path / "reports/evaluation" / run / "metrics.json"
        file.write_text(re.sub(r'("reward[a-z_]*"): [0-9.]+', r"\1: NaN", file.read_text()))
    prompts = tmp_path / "reports/evaluation/beta2-0/prompts.csv"
    frame = pd.read_csv(prompts)
    frame.loc[frame["prompt"] == PROMPTS[0], "reward"] = math.nan
    frame.to_csv(prompts, index=False)
    curves = tmp_path / "reports/runs/beta0-0/metrics.csv"
    pd.read_csv(curves).assign(reward=math.nan, kl=math.inf, grad_norm=math.nan).to_csv(curves, index=False)
    build(config, tmp_path)
    markdown = (tmp_path / "reports/report.md").read_text()
    assert re.search(r"\bnan\b", markdown.lower()) is None
    assert "| beta0 | 2 | n/a |" in markdown
    assert "| beta | 0.012 | beta11 | 2 | 0.505 ± 0.064 |" in markdown  # .5 and .51: t(1) * .00707 / sqrt 2
    assert "| beta2-0 − beta1-0 | 7 |" in markdown  # without the prompt that has no reward
    assert "NaN" not in (tmp_path / "reports/metrics.json").read_text()


def test_base_alone(tmp_path: Path) -> None:
    config = make_config()
    config = config.model_copy(update={"study": config.study.model_copy(update={"runs": {}})})
    write_study(config, tmp_path)
    (tmp_path / "reports/runs").mkdir()
    build(config, tmp_path)
    markdown = (tmp_path / "reports/report.md").read_text()
    assert "**Nothing is compared: no pair of report.comparisons has runs in this study.**" in markdown
    assert "| base |  | 0.400 |" in markdown
    assert "samples_base.png" in markdown


def test_missing_runs_are_named_and_nothing_is_written(tmp_path: Path) -> None:
    config = make_config()
    write_study(config, tmp_path)
    (tmp_path / "reports/runs/grpo-1/timing.csv").unlink()
    (tmp_path / "reports/evaluation/base/grid.png").unlink()
    with pytest.raises(MargrpoError, match=r"2 of 10 runs are missing: base, grpo-1;"):
        build(config, tmp_path)
    assert sorted(path.name for path in (tmp_path / "reports").iterdir()) == ["evaluation", "runs"]


def test_a_damaged_run_leaves_the_old_report(tmp_path: Path) -> None:
    config = make_config(seeds=1)
    write_study(config, tmp_path)
    build(config, tmp_path)
    before = (tmp_path / "reports/report.html").read_bytes()
    damaged = tmp_path / "reports/evaluation/grpo-0/metrics.json"
    damaged.write_text("{")
    with pytest.raises(MargrpoError, match=r"metrics\.json"):
        build(config, tmp_path)
    assert (tmp_path / "reports/report.html").read_bytes() == before
