"""The command line: help without heavy imports, exit codes, one-line errors, what the commands write."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from margrpo.checkpoints import SHIPPED, load_policy, sha256
from margrpo.cli import run
from margrpo.config import Sampler
from margrpo.rollout import generate
from pipeline.cli import app

COMMANDS = ["pretrain", "train", "evaluate", "diagnose", "sample", "reproduce", "report"]


@pytest.fixture
def project(in_folder: Path, project_root: Path) -> Path:
    """Return a folder with the params of the repository and nothing else."""
    (in_folder / "params.yaml").write_bytes((project_root / "params.yaml").read_bytes())
    return in_folder


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    error = capsys.readouterr().err
    assert error.startswith("margrpo: error: ")
    assert error.count("\n") == 1
    return error


def test_help_is_fast_and_names_every_command(project_root: Path) -> None:
    program = (
        "import sys; from pipeline.cli import app; from margrpo.cli import run; code = run(app, ['--help'])\n"
        "heavy = {'torch', 'mlflow', 'prefect', 'dvc', 'pandas', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=project_root)
    assert done.returncode == 0, done.stderr
    assert all(command in done.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_the_common_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, [command, "--help"]) == 0
    text = capsys.readouterr().out
    assert all(option in text for option in ("--params", "--set", "--profile"))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["retrain"], "No such command"),
        (["train"], "Missing argument"),
        (["train", "grpo", "--sede", "1"], "No such option"),
        (["train", "grpo", "--seed", "x"], "Invalid value"),
        (["train", "best"], "variant: best; allowed: grpo"),
        (["reproduce", "--profile", "huge"], "profile: huge; allowed: smoke"),
        (["reproduce", "--set", "train.updates=0"], "train.updates: 0; allowed"),
        (["reproduce"], "no dvc.yaml here"),
        (["report"], "reports"),
        (["sample", "a red circle", "--out", "params.yaml"], "--out: params.yaml; allowed: a folder"),
        (["sample"], "prompt: none; allowed: at least one"),
        (["sample", "a red circle", "--sampler", "euler"], "ode | sde"),
        (["sample", "a purple circle"], "purple"),
        (["sample", "a red circle", "--checkpoint", "none.safetensors"], "none.safetensors: no such file"),
        (["sample", "a red circle", "--checkpoint", "params.yaml"], "not a readable safetensors file"),
        (["evaluate", "none.safetensors"], "none.safetensors: no such file"),
        (["diagnose", "best"], "variant: best; allowed: grpo"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_one_line_and_write_nothing(
    arguments: list[str], text: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(project.rglob("*"))
    assert run(app, arguments) == 2
    assert text in one_line(capsys)
    assert sorted(project.rglob("*")) == before


def test_console_script_exits_with_two(project: Path, project_root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", "train", "grpo", "--set", "train.updates=none"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(project_root), "PATH": ""},
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert (
        done.stderr
        == "margrpo: error: train.updates: none; allowed: integer >= 1 <= 1000000 (rollout + update rounds)\n"
    )


def test_sample_writes_images_a_grid_and_their_seeds(project: Path) -> None:
    arguments = ["sample", "--prompt", "a red circle", "two blue squares", "--n", "3", "--sampler", "sde"]
    arguments += ["--policy", str(SHIPPED)]
    for out, seed in (("first", "0"), ("second", "0"), ("other", "1")):
        assert run(app, [*arguments, "--out", out, "--seed", seed]) == 0
    names = [f"{row:03d}-{column:03d}.png" for row in range(2) for column in range(3)]
    assert sorted(p.name for p in (project / "first").iterdir()) == [*names, "grid.png", "samples.json"]
    for name in (*names, "grid.png"):
        first, second, other = ((project / out / name).read_bytes() for out in ("first", "second", "other"))
        assert first == second != other
    facts = json.loads((project / "first" / "samples.json").read_text())
    assert facts["settings"]["sha256"] == sha256(SHIPPED)
    assert [entry["prompt"] for entry in facts["images"]] == ["two blue squares"] * 3 + ["a red circle"] * 3
    # the recorded seed alone makes the image again
    policy, fourth = load_policy(SHIPPED), facts["images"][3]
    policy.configure(Sampler())
    image = policy.decode(generate(policy, [fourth["prompt"]], [fourth["seed"]], 6).tokens)[0]
    with Image.open(project / "first" / fourth["file"]) as picture:
        assert picture.size == (32, 32)
        assert abs(np.asarray(picture) / 255 - image.permute(1, 2, 0).numpy()).max() <= 0.51 / 255
    with Image.open(project / "first" / "grid.png") as grid:
        assert grid.width > 3 * 32


def test_train_then_evaluate(project: Path) -> None:
    small = ["train.updates=2", "train.milestone=1", "train.validation_images=8", "train.prompts_per_update=2",
             "evaluation.prompts=4", "evaluation.images_per_prompt=2", "evaluation.kl_prompts=2"]  # fmt: skip
    options = [part for change in small for part in ("--set", change)]
    assert run(app, ["train", "frozen_head_committed", "--seed", "3", "--out", "run", *options]) == 0
    summary = json.loads((project / "run" / "summary.json").read_text())
    last = project / "run" / "last.safetensors"
    assert summary["run"] == "frozen_head_committed-3"
    assert summary["last_sha256"] == sha256(last) != sha256(SHIPPED)
    assert list(pd.read_csv(project / "run" / "metrics.csv")["update"]) == [1, 2]
    load_policy(last)

    assert run(app, ["evaluate", "run/last.safetensors", "--out", "evaluation", *options]) == 0
    metrics = json.loads((project / "evaluation" / "metrics.json").read_text())
    assert metrics["last"]["sde"]["n_images"] == 8
    assert metrics["last"]["kl_to_base"] > 0


def test_pretrain_writes_a_policy_that_training_accepts(project: Path) -> None:
    tiny = ["--set", "pretrain.images=64", "--set", "pretrain.steps=2"]
    assert run(app, ["pretrain", "--out", "base.safetensors", *tiny]) == 0
    load_policy(project / "base.safetensors")
    use = ["--set", "checkpoint.source=path", "--set", "checkpoint.path=base.safetensors"]
    assert run(app, ["sample", "a red circle", "--images", "1", *use]) == 0
    assert run(app, ["sample", "a red circle", *use, "--set", f"checkpoint.sha256={'ab' * 32}"]) == 2
