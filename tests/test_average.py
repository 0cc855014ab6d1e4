"""`train.ema`: averaged weights are validated, saved and survive a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from margrpo.checkpoints import load_policy, save_policy
from margrpo.config import Config
from margrpo.models import Models
from margrpo.trainer import train
from margrpo.updater import Updater
from tests.support import make_config, make_policy, scene_prompts

PROMPTS = {"train": scene_prompts("train", 12), "validation": scene_prompts("validation", 4)}


def config(**settings: Any) -> Config:
    sizes = {"updates": 2, "validation_every": 2, "learning_rate": 0.01}
    return make_config(reward={"weights": {"jpeg_size": 1.0}}, train={**sizes, **settings})


@pytest.fixture
def base(tmp_path: Path) -> Path:
    save_policy(make_policy(), tmp_path / "base.safetensors", {})
    return tmp_path / "base.safetensors"


def run(given: Config, base: Path, out: Path) -> dict[str, Tensor]:
    train(given, "grpo", 0, base, PROMPTS, out, out, out / "state", progress=False)
    return load_policy(out / "last.safetensors").state_dict()


def test_the_average_follows_the_weights(base: Path) -> None:
    models = Models(config(ema=0.75), "grpo", 0, base, torch.device("cpu"))
    name, parameter = next(iter(models.trainable().items()))
    start = parameter.detach().clone()
    for step in (1, 2):
        parameter.data.copy_(start + step)
        models.track()
    # 0.75 (0.75 * 0 + 0.25 * 1) + 0.25 * 2 = 0.6875
    assert torch.allclose(models.chosen()[name] - start, torch.tensor(0.6875), atol=1e-5)
    with models.averaged():
        assert torch.equal(parameter, models.chosen()[name])
    assert torch.equal(parameter, start + 2)


def test_checkpoints_hold_the_average_of_the_weights_after_each_update(base: Path, tmp_path: Path) -> None:
    updater = Updater(config(), "grpo", 0, base, PROMPTS["train"], PROMPTS["validation"])
    average = {name: value.detach().clone() for name, value in updater.models.trainable().items()}
    for update in (1, 2):
        updater.update(update, update == 2)
        for name, value in updater.models.trainable().items():
            average[name] = 0.5 * average[name] + 0.5 * value.detach()
    saved = run(config(ema=0.5), base, tmp_path / "averaged")
    plain = run(config(), base, tmp_path / "plain")
    assert any(not torch.equal(saved[name], plain[name]) for name in average)
    for name, value in average.items():
        assert torch.allclose(saved[name], value, atol=1e-6)
    columns = [(tmp_path / name / "metrics.csv").read_text().splitlines() for name in ("averaged", "plain")]
    header = columns[0][0].split(",")
    first, second = ([dict(zip(header, row.split(","), strict=True)) for row in part[1:]] for part in columns)
    assert [row["reward"] for row in first] == [row["reward"] for row in second]  # rollouts use the weights
    assert first[1]["validation/reward"] != second[1]["validation/reward"]


def test_a_resumed_run_ends_with_the_same_average(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = config(ema=0.5, checkpoint_every=1)
    whole = run(given, base, tmp_path / "whole")
    update = Updater.update

    def fails(self: Updater, number: int, validated: bool) -> dict[str, float]:
        if number == 2:
            raise KeyboardInterrupt
        return update(self, number, validated)

    monkeypatch.setattr(Updater, "update", fails)
    with pytest.raises(KeyboardInterrupt):
        run(given, base, tmp_path / "cut")
    monkeypatch.setattr(Updater, "update", update)
    again = run(given, base, tmp_path / "cut")
    assert all(torch.equal(value, again[name]) for name, value in whole.items())
