"""Benchmarks from the evaluation of the embedded policy into the report, scored by tiny checkpoints of real scorers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from margrpo.checkpoints import save_policy
from margrpo.config import Config
from margrpo.errors import MargrpoError
from margrpo.evaluation import evaluate
from margrpo.metrics.statistics import prompt_bootstrap
from margrpo.params import build_config
from margrpo.prompts import dump_prompts
from pipeline.report import build
from tests.oracles import tiny
from tests.pipeline import test_report
from tests.support import make_policy, scene_prompts

RUNS = {"base": 0, "frozen_head_committed-0": 1, "frozen_head_committed-1": 2, "mar_grpo_bridged-0": 3}
STYLES = ("anime", "concept-art", "paintings", "photo")


def make_config(root: Path, **evaluation: Any) -> Config:
    params = test_report.make_config(2).model_dump()
    names = [name for name in RUNS if name != "base"]
    params["study"]["runs"] = {name: params["study"]["runs"][name] for name in names}
    benchmarks = {
        "styles": {
            "prompts": "hpsv2",
            "path": str(root / "hpsv2"),
            "limit": 2,
            "scores": ["hpsv2.1", "pickscore", "aesthetic"],
        },
        "own": {
            "prompts": "file",
            "path": str(root / "own.jsonl"),
            "images_per_prompt": 2,
            "sampler": "sde",
            "guidance": 2.0,
            "scores": ["scenes", "image_reward"],
            "keep_images": True,
        },
    }
    options = {
        "hpsv2.1": {"path": str(root / "hps")},
        "pickscore": {"path": str(root / "pickscore")},
        "aesthetic": {"path": str(root / "aesthetic")},
        "image_reward": {"path": str(root / "image_reward")},
    }
    sizes = {"prompts": 2, "images_per_prompt": 2, "kl_prompts": 1, "grid_prompts": 2}
    changes = {"benchmarks": benchmarks, "options": options, **sizes, **evaluation}
    params["evaluation"] |= changes
    params["sampler"] |= {"ar_steps": 3, "denoising_steps": 4}
    params["train"] |= {"ar_steps": 2, "denoising_steps": 2}
    return build_config({key: value for key, value in params.items() if key != "profiles"})


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project whose policies were evaluated on two benchmarks, with its report."""
    root = tmp_path_factory.mktemp("project")
    texts = [prompt.text for prompt in scene_prompts("test", 4)]
    (root / "hpsv2").mkdir()
    for style in STYLES:
        (root / "hpsv2" / f"{style}.json").write_text(json.dumps((texts * 200)[:800]))
    (root / "own.jsonl").write_text(dump_prompts(scene_prompts("test", 4)))
    tiny.hps(root / "hps")
    tiny.clip_hf(root / "pickscore", seed=2, activation="gelu")
    tiny.aesthetic(root / "aesthetic")
    tiny.image_reward(root / "image_reward")
    config = make_config(root)
    test_report.write_study(config, root)
    for name, seed in RUNS.items():
        save_policy(make_policy(seed), root / f"{name}.safetensors", {})
        out, policies = root / "reports/evaluation" / name, {"last": root / f"{name}.safetensors"}
        evaluate(
            config,
            policies,
            root / "base.safetensors",
            out,
            scene_prompts("test", 2),
            progress=False,
            images=root / "images" / name,
        )
    build(config, root)
    return root


def table_of(project: Path, run: str) -> pd.DataFrame:
    return pd.read_csv(project / "reports/evaluation" / run / "benchmarks.csv")


def mean_of(project: Path, run: str, benchmark: str, score: str, category: str | None = None) -> float:
    table = table_of(project, run)
    rows = table[(table["benchmark"] == benchmark) & (table["score"] == score)]
    rows = rows if category is None else rows[rows["category"] == category]
    return float(rows["mean"].mean())


def section(text: str, heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading of report.md."""
    lines = text.split(f"# {heading}\n")[1].split("\n#")[0].splitlines()
    rows = [line.strip("|").split("|") for line in lines if line.startswith("|")]
    return [[cell.strip().replace("\\", "").replace("−", "-") for cell in row] for row in rows]


def test_metrics_hold_the_means_of_styles(project: Path) -> None:
    metrics = json.loads((project / "reports/evaluation/mar_grpo_bridged-0/metrics.json").read_text())
    styles = metrics["benchmarks"]["styles"]["hpsv2.1"]
    assert list(styles) == ["all", *STYLES, "n_images", "failed"]
    assert styles["n_images"] == 8
    assert styles["failed"] == 0
    assert styles["photo"] == pytest.approx(
        mean_of(project, "mar_grpo_bridged-0", "styles", "hpsv2.1", "photo")
    )
    assert styles["all"] == pytest.approx(sum(styles[style] for style in STYLES) / 4)
    assert metrics["benchmarks"]["own"]["scenes"]["n_images"] == 8


def test_the_report_shows_every_style_of_every_variant(project: Path) -> None:
    rows = section((project / "reports/report.md").read_text(), "Benchmark styles")
    assert rows[0] == ["score: variant", "seeds", "all", *STYLES, "without score"]
    variants = ("base", "frozen_head_committed", "mar_grpo_bridged")
    assert [row[0] for row in rows[2:]] == [
        f"{score}: {variant}" for score in ("hpsv2.1", "pickscore", "aesthetic") for variant in variants
    ]
    base, control, bridged = rows[2:5]
    assert float(base[3]) == pytest.approx(mean_of(project, "base", "styles", "hpsv2.1", "anime"), abs=6e-5)
    assert float(bridged[2]) == pytest.approx(
        mean_of(project, "mar_grpo_bridged-0", "styles", "hpsv2.1"), abs=6e-5
    )
    seeds = [mean_of(project, f"frozen_head_committed-{seed}", "styles", "hpsv2.1") for seed in (0, 1)]
    mean, half = (float(part) for part in control[2].split("±"))
    assert mean == pytest.approx(np.mean(seeds), abs=6e-5)
    # t of .975 with one degree of freedom, times the standard error of two values
    assert half == pytest.approx(12.7062 * abs(seeds[0] - seeds[1]) / 2, rel=0.02, abs=6e-5)
    assert {row[-1] for row in rows[2:]} == {"0"}


def test_comparisons_are_paired_by_prompts(project: Path) -> None:
    rows = section((project / "reports/report.md").read_text(), "Benchmark styles: comparisons")
    row = next(r for r in rows if r[0] == "hpsv2.1: mar_grpo_bridged - frozen_head_committed")
    assert row[1:3] == ["1", "8"]
    first, second = (table_of(project, name) for name in ("mar_grpo_bridged-0", "frozen_head_committed-0"))
    values = [table[table["score"] == "hpsv2.1"]["mean"].to_numpy() for table in (first, second)]
    interval = prompt_bootstrap(values[0] - values[1], None, np.random.default_rng(0), 0.95, 200)
    numbers = [float(part) for part in row[3].replace("[", " ").replace("]", "").replace(",", " ").split()]
    assert numbers == pytest.approx([interval.mean, interval.low, interval.high], abs=6e-5)
    assert row[4].endswith("(one run)")


def test_the_report_says_how_images_were_made(project: Path) -> None:
    text = (project / "reports/report.md").read_text().replace("\\", "")
    assert (
        "SDE samples of 4 prompts (own prompts), 8 images; 3 AR steps × 4 denoising steps, guidance 2, float32; "
        "the noise of an image depends on its prompt's index and its own index only."
    ) in text
    assert "ODE samples of 8 prompts (hpsv2), 8 images;" in text
    html = (project / "reports/report.html").read_text()
    assert "Benchmark own: comparisons" in html
    numbers = json.loads((project / "reports/metrics.json").read_text())["benchmarks"]
    expected = mean_of(project, "mar_grpo_bridged-0", "own", "image_reward")
    assert numbers["mar_grpo_bridged"]["own"]["image_reward"] == pytest.approx(expected)


def test_images_are_removed_unless_they_are_kept(project: Path) -> None:
    kept = [folder.name.rpartition("-")[0] for folder in (project / "images/base").iterdir()]
    assert kept == ["own"]
    assert len(list((project / "images/base").rglob("*.png"))) == 8


def test_a_score_that_a_run_lacks_is_named(project: Path) -> None:
    file = project / "reports/evaluation/base/benchmarks.csv"
    whole, before = file.read_text(), (project / "reports/report.md").read_bytes()
    table = table_of(project, "base")
    table[table["score"] != "pickscore"].to_csv(file, index=False)
    with pytest.raises(MargrpoError, match=r"benchmarks.csv lacks styles/pickscore; run `dvc repro`"):
        build(make_config(project), project)
    assert (project / "reports/report.md").read_bytes() == before
    file.write_text(whole)


def test_failed_images_are_in_the_tables(project: Path) -> None:
    file = project / "reports/evaluation/base/benchmarks.csv"
    whole, report = file.read_text(), project / "reports/report.md"
    table = table_of(project, "base")
    row = table.index[(table["score"] == "hpsv2.1") & (table["category"] == "photo")][0]
    table.loc[row, ["images", "failed"]] = [0, 1]
    table.loc[row, "mean"] = np.nan
    table.to_csv(file, index=False)
    metrics = project / "reports/evaluation/base/metrics.json"
    content = json.loads(metrics.read_text())
    content["last"]["sde"]["failed"] = 3.0
    metrics.write_text(json.dumps(content))
    build(make_config(project), project)
    text = report.read_text()
    base = section(text, "Benchmark styles")[2]
    assert base[0] == "hpsv2.1: base"
    assert base[-1] == "1"
    rest = table[(table["score"] == "hpsv2.1") & (table["category"] == "photo")]["mean"]
    assert float(base[6]) == pytest.approx(rest.mean(), abs=6e-5)
    assert "base SDE 3 of 4; they are in no mean (policy on failure scenes: drop)" in text
    file.write_text(whole)
