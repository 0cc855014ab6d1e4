"""The whole pipeline on tiny checkpoints of the real families: from a released folder to the report."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import torch
from ruamel.yaml import YAML

from margrpo.base import base_sha256
from margrpo.checkpoints import load_policy, sha256
from margrpo.golden.companions import complete_folder
from margrpo.params import build_config, load_params, overlay
from tests.pipeline.test_end_to_end import clone, run
from tests.policies.real import GOLDEN, trainable_folder

PRESETS = {"all": None, "some": ["grpo", "mar_grpo_released", "mar_grpo_bridged"]}
TEXTS = {
    "mar": ["3", "7", "1", "5"],
    "harmon": ["a red circle", "a blue square", "a red square", "a blue circle"],
    "nova": ["a red cube", "two dogs", "a blue ball", "a bird left of a tree"],
}


def write_params(project: Path, presets: list[str], folder: Path, prompts: Path) -> None:
    """Replace the params of a clone by the smallest sizes for a checkpoint."""
    original = load_params(project / "params.yaml")
    changes = {
        "study": {"runs": {f"{name}-0": {"variant": name, "seed": 0} for name in presets}},
        "checkpoint": {"source": "path", "path": str(folder)},
        "prompts": {"source": "path", "path": str(prompts), "sha256": sha256(prompts)},
        "sampler": {"ar_steps": 4, "denoising_steps": 5},
        "train": {
            "updates": 2,
            "prompts_per_update": 2,
            "images_per_prompt": 3,
            "ar_steps": 2,
            "denoising_steps": 2,
            "validation_every": 1,
            "validation_images": 4,
            "checkpoint_every": 1,
            "milestone": 1,
        },
        "reward": {"weights": {"jpeg_size": 1.0}},
        "evaluation": {"images_per_prompt": 2, "kl_prompts": 2, "grid_prompts": 2},
        "report": {"comparisons": [["mar_grpo_bridged", "base"]], "resamples": 100},
    }
    params = overlay(original, changes)
    params.pop("profiles")
    params["checkpoint"]["sha256"] = base_sha256(build_config(params), folder)
    with open(project / "params.yaml", "w") as stream:
        YAML().dump(params, stream)


@pytest.mark.parametrize(
    ("family", "presets"),
    [
        pytest.param("harmon", "some", marks=pytest.mark.e2e),
        pytest.param("harmon", "all", marks=pytest.mark.slow),
        pytest.param("mar", "all", marks=pytest.mark.slow),
        pytest.param("nova", "all", marks=pytest.mark.slow),
    ],
)
def test_from_a_released_checkpoint_to_the_report(
    family: str, presets: str, tmp_path: Path, project_root: Path
) -> None:
    project = clone(project_root, tmp_path / "project")
    folder = tmp_path / "released"
    if family == "nova":
        complete_folder(GOLDEN / "nova" / "abs", folder)
    else:
        trainable_folder(family, folder)
    prompts = tmp_path / "prompts"
    prompts.mkdir()
    for split, texts in (
        ("train", TEXTS[family]),
        ("validation", TEXTS[family][:2]),
        ("test", TEXTS[family][2:]),
    ):
        (prompts / f"{split}.txt").write_text("\n".join(texts) + "\n")
    names = PRESETS[presets] or list(load_params(project / "params.yaml")["variants"])
    write_params(project, names, folder, prompts)
    run(project, "-m", "dvc", "repro")

    assert family in json.loads((project / "artifacts/base/policy.json").read_text())["header"]["kind"]
    base = load_policy(project / "artifacts/base/policy.safetensors")
    results = pd.read_csv(project / "reports/results.csv")
    assert set(results["run"]) == {"base", *(f"{name}-0" for name in names)}
    for name in names:
        logged = pd.read_csv(project / f"reports/runs/{name}-0/metrics.csv")
        assert len(logged) == 2
        assert (logged["reward_std"] > 0).all()
        assert (logged["grad_norm"] > 0).all()
        assert (logged["rewards/jpeg_size/mean"] < 0).all()
        trained = load_policy(project / f"artifacts/runs/{name}-0/last.safetensors")
        before, after = base.state_dict(), trained.state_dict()
        changed = {key for key, value in after.items() if not torch.equal(value, before[key])}
        ids = {id(p): key for key, p in trained.named_parameters()}
        backbone = {ids[id(p)] for p in trained.backbone_parameters()}
        head = {ids[id(p)] for p in trained.head_parameters()}
        assert changed & backbone
        assert bool(changed & head) == (name == "grpo")
        assert changed <= backbone | head
        measured = json.loads((project / f"reports/evaluation/{name}-0/metrics.json").read_text())
        assert measured["last"]["sde"]["reward"] < 0
        assert measured["last"]["kl_to_base"] > 0
        assert "strict" not in measured["last"]["sde"]
    assert "jpeg_size" in (project / "reports/report.html").read_text()
    assert "up to date" in run(project, "-m", "dvc", "repro")
