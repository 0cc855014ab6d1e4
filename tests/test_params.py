"""Malformed params: exit code 2, one line that names the key, nothing written."""

from __future__ import annotations

from pathlib import Path

import pytest

from margrpo.cli import app, run
from margrpo.errors import ConfigError
from margrpo.params import build_config, load_config, load_params, overlay
from tests.support import RUN, VARIANTS

# (overrides, key the message must begin with, text it must contain)
MALFORMED: list[tuple[list[str], str, str]] = [
    # unknown keys
    (["trian={}"], "trian", "did you mean train?"),
    (["train.updats=5"], "train.updats", "did you mean updates?"),
    (["objective.tokenmask=committed"], "objective.tokenmask", "did you mean token_mask?"),
    (["objective.guidance.scale=2"], "objective.guidance.scale", "allowed: rollout, logprob"),
    (["variants.grpo.trainabel=all"], "variants.grpo.trainabel", "did you mean trainable?"),
    (["study.runs.grpo-0.sed=1"], "study.runs.grpo-0.sed", "did you mean seed?"),
    (["pretrain.architecture.widht=96"], "pretrain.architecture.widht", "did you mean width?"),
    (["profiles.smoke.trian={}"], "profiles.smoke.trian", "did you mean train?"),
    # wrong types
    (["train.updates=fifty"], "train.updates", "fifty; allowed: integer"),
    (["train.updates=5.5"], "train.updates", "5.5; allowed: integer"),
    (["train.updates=true"], "train.updates", "True; allowed: integer"),
    (["train.learning_rate=fast"], "train.learning_rate", "fast; allowed: number"),
    (["objective.token_mask=1"], "objective.token_mask", "unknown | committed"),
    (["objective.trainable=everything"], "objective.trainable", "backbone | all | head"),
    (["evaluation.samplers=ode"], "evaluation.samplers", "ode; allowed: a list of ode | sde"),
    (["evaluation.samplers=[ode, euler]"], "evaluation.samplers.1", "euler; allowed: a list of ode | sde"),
    (["study.runs=[grpo-0]"], "study.runs", "allowed: a mapping"),
    (["train=null"], "train", "None"),
    (["variants.grpo=all"], "variants.grpo", "all"),
    (["report.comparisons=[[grpo]]"], "report.comparisons.0", "two different variants"),
    # out of range
    (["objective.uncertain_fraction=1.3"], "objective.uncertain_fraction", "1.3; allowed: number"),
    (["train.learning_rate=-0.1"], "train.learning_rate", "> 0"),
    (["train.images_per_prompt=1"], "train.images_per_prompt", ">= 2"),
    (["train.milestone=51"], "train.milestone", "51; allowed: null or 1..updates (50)"),
    (["train.ar_steps=7"], "train.ar_steps", "1..sampler.ar_steps (6)"),
    (["train.denoising_steps=8"], "train.denoising_steps", "1..7"),
    (["sampler.eta=0"], "sampler.eta", "> 0"),
    (["report.level=1.5"], "report.level", "< 1"),
    (["pretrain.architecture.heads=5"], "pretrain.architecture.heads", "a divisor of width 96"),
    (["checkpoint.sha256=abc"], "checkpoint.sha256", "abc"),
    # not numbers
    (["objective.beta=.nan"], "objective.beta", "nan"),
    (["train.learning_rate=.inf"], "train.learning_rate", "inf"),
    (["reward.weights.scenes=.nan"], "reward.weights.scenes", "nan"),
    (["variants.consistency.consistency=.nan"], "variants.consistency.consistency", "nan"),
    # combinations that would do nothing
    (
        ["variants.frozen_head_committed.consistency=0.0"],
        "variants.frozen_head_committed.consistency",
        "null",
    ),
    (["variants.mar_grpo_bridged.kl=k3"], "variants.mar_grpo_bridged.kl", "gaussian | released"),
    (["variants.mte_topk.trajectories=1"], "variants.mte_topk.uncertain_fraction", "1.0 with trajectories 1"),
    (
        ["variants.frozen_head.trajectories=3"],
        "variants.frozen_head.trajectories",
        "1 with trajectory_source",
    ),
    (["variants.mte.resample_condition=null"], "variants.mte.resample_condition", "commit | current"),
    (["objective.inner_epochs=2"], "objective.clip_range", "0 < clip_range < 1"),
    (["objective.guidance.logprob=guided"], "objective.guidance.logprob", "conditional with guidance"),
    (["checkpoint.path=base.safetensors"], "checkpoint.path", "null unless source is path"),
    (["checkpoint.source=path"], "checkpoint.path", "a checkpoint file"),
    # names
    (["study.runs={new-0: {variant: new, seed: 0}}"], "study.runs.new-0.variant", "one of grpo"),
    (["study.runs={grpo-1: {variant: grpo, seed: 0}}"], "study.runs.grpo-1", "the name grpo-0"),
    (["report.comparisons=[[grpo, best]]"], "report.comparisons.0", "base or one of grpo"),
    (["reward.weights.hps=1.0"], "reward.weights.hps", "unknown reward"),
    # files and variables
    (
        ["checkpoint.source=path", "checkpoint.path=no.safetensors"],
        "checkpoint.path",
        "an existing checkpoint",
    ),
    (
        ["checkpoint.source=path", "checkpoint.path=$HOME/base.safetensors"],
        "checkpoint.path",
        "literal value",
    ),
    (["tracking.uri=${MLFLOW}"], "tracking.uri", "variables are not expanded"),
    # the overrides themselves
    (["train.updates"], "--set", "key=value"),
    (["train.updates.more=1"], "train.updates.more", "keys of a mapping"),
    (["train.updates=[1"], "train.updates", "valid YAML"),
]


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_one_line(capsys: pytest.CaptureFixture[str], key: str, text: str) -> None:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"margrpo: error: {key}: ")
    assert captured.err.count("\n") == 1
    assert captured.err.endswith("\n")
    assert text in captured.err


def test_there_are_at_least_forty() -> None:
    assert len(MALFORMED) >= 40


@pytest.mark.parametrize(
    ("overrides", "key", "text"), MALFORMED, ids=[" ".join(case[0]) for case in MALFORMED]
)
def test_malformed_value(
    overrides: list[str],
    key: str,
    text: str,
    in_folder: Path,
    project_root: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (in_folder / "params.yaml").write_bytes((project_root / "params.yaml").read_bytes())
    before = snapshot(in_folder)
    arguments = [part for override in overrides for part in ("--set", override)]

    assert run(app, ["train", "frozen_head", *arguments]) == 2

    assert_one_line(capsys, key, text)
    assert snapshot(in_folder) == before


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "an existing params file"),
        (b"train: {updates: 5\n", "valid YAML"),
        (b"train: {}\ntrain: {}\n", "duplicate key"),
        (b"- train\n", "a mapping of sections"),
        (b"", "a mapping of sections"),
        (b"\xff\xfe\x00t", "readable UTF-8"),
        (b"train: !!python/object/apply:os.system [ls]\n", "valid YAML"),
    ],
    ids=["missing", "broken", "duplicate", "list", "empty", "binary", "python tag"],
)
def test_malformed_file(
    content: bytes | None, text: str, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (in_folder / "params.yaml").write_bytes(content)
    before = snapshot(in_folder)

    assert run(app, ["train", "frozen_head"]) == 2

    captured = capsys.readouterr()
    assert captured.err.startswith("margrpo: error: params")
    assert captured.err.count("\n") == 1
    assert text in captured.err
    assert snapshot(in_folder) == before


def test_overrides_come_after_the_profile(project_root: Path) -> None:
    config = load_config(project_root / "params.yaml", ["train.updates=7"], "smoke")
    assert config.train.updates == 7
    assert config.train.validation_every == 3  # from the profile
    assert config.train.learning_rate == 4e-4  # from the file
    assert list(config.study.runs) == ["grpo-0", "frozen_head_committed-0", "mar_grpo_bridged-0"]


def test_unknown_profile_names_the_known_ones(project_root: Path) -> None:
    with pytest.raises(ConfigError, match="profile: huge; allowed: smoke"):
        load_params(project_root / "params.yaml", profile="huge")


def test_variant_changes_only_its_switches(project_root: Path) -> None:
    config = load_config(project_root / "params.yaml")
    bridged = config.objective_of("mar_grpo_bridged")
    changed = {
        name: value
        for name, value in bridged.model_dump().items()
        if value != config.objective.model_dump()[name]
    }
    assert changed == {
        "token_mask": "committed",
        "trajectory_source": "bridged",
        "trajectories": 4,
        "rao_blackwell": True,
    }


def test_options_of_a_reward_go_with_its_weight() -> None:
    base = {
        "reward": {
            "weights": {"jpeg_size": 1.0, "ocr": 1.0},
            "options": {"jpeg_size": {"scale": 2.0}, "ocr": {}},
        }
    }
    found = overlay(base, {"reward": {"weights": {"ocr": 2.0}}})
    assert found == {"reward": {"weights": {"ocr": 2.0}, "options": {"ocr": {}}}}
    with pytest.raises(ConfigError, match=r"reward.options: jpeg_size; allowed: a reward of weights: ocr"):
        build_config(
            {
                **RUN,
                "variants": VARIANTS,
                **overlay(base, {"reward": {"weights": {"ocr": 1.0}, "options": {"jpeg_size": {}}}}),
            }
        )
