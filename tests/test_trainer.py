from __future__ import annotations

import csv
import hashlib
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from margrpo.checkpoints import load_policy, save_policy, sha256
from margrpo.config import Config
from margrpo.errors import ConfigError, TrainingError
from margrpo.rewards import base as rewards
from margrpo.trainer import train
from margrpo.updater import Updater
from tests.support import VARIANTS, make_config, make_policy, scene_prompts

PROMPTS = {"train": scene_prompts("train", 12), "validation": scene_prompts("validation", 4)}


def brightness(images: Tensor, prompts: Sequence[str], specs: Sequence[Mapping[str, Any]]) -> Tensor:
    """A reward that any images differ in."""
    return images.mean((1, 2, 3))


def constant(images: Tensor, prompts: Sequence[str], specs: Sequence[Mapping[str, Any]]) -> Tensor:
    return torch.full((len(images),), 0.5)


@pytest.fixture(autouse=True)
def _rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rewards._REGISTRY, "brightness", entry("brightness", brightness))
    monkeypatch.setitem(rewards._REGISTRY, "constant", entry("constant", constant))


def entry(name: str, reward: rewards.Reward) -> rewards.Entry:
    return rewards.Entry(rewards.Info(name, "test", "none"), lambda options: reward)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base") / "policy.safetensors"
    save_policy(make_policy(), path, {})
    return path


def config(reward: str = "brightness", **sections: Any) -> Config:
    return make_config(reward={"weights": {reward: 1.0}}, **sections)


def run(config: Config, variant: str, base: Path, folder: Path, resume: Path | None = None) -> dict[str, Any]:
    result = train(config, variant, 0, base, PROMPTS, folder / "out", folder / "logs", resume, progress=False)
    assert json.loads((folder / "logs" / "summary.json").read_text())["last_sha256"] == result.last_sha256
    return {"result": result, "metrics": (folder / "logs" / "metrics.csv").read_bytes()}


def rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / "logs" / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_same_seed_same_bits_and_only_trainable_weights_change(
    variant: str, base: Path, tmp_path: Path
) -> None:
    first = run(config(), variant, base, tmp_path / "a")
    second = run(config(), variant, base, tmp_path / "b")
    assert first["metrics"] == second["metrics"]
    assert first["result"].last_sha256 == second["result"].last_sha256
    before, after = load_policy(base), load_policy(tmp_path / "a" / "out" / "last.safetensors")
    frozen_head = variant != "grpo"
    changed = [
        not torch.equal(a, b) for a, b in zip(before.head_parameters(), after.head_parameters(), strict=True)
    ]
    assert any(changed) != frozen_head
    assert any(
        not torch.equal(a, b)
        for a, b in zip(before.backbone_parameters(), after.backbone_parameters(), strict=True)
    )
    for row in rows(tmp_path / "a"):
        assert (float(row["grad_norm/head"]) == 0) == frozen_head
        total = math.hypot(float(row["grad_norm/head"]), float(row["grad_norm/backbone"]))
        assert float(row["grad_norm"]) == pytest.approx(total, rel=1e-5)
        assert float(row["ratio_max_deviation"]) <= 1e-5
    assert [bool(row["validation/reward"]) for row in rows(tmp_path / "a")] == [False, True, False, True]


@pytest.mark.parametrize("variant", ["frozen_head_committed", "grpo"])
def test_training_raises_an_easy_reward(variant: str, base: Path) -> None:
    settings = config(
        objective={"beta": 0.0},
        train={
            "updates": 30,
            "learning_rate": 1e-3,
            "prompts_per_update": 3,
            "images_per_prompt": 8,
            "validation_images": 32,
        },
    )
    updater = Updater(settings, variant, 0, base, PROMPTS["train"], PROMPTS["validation"])
    before = updater.validate()
    for update in range(1, 31):
        updater.update(update, False)
    assert updater.validate() > before + 0.01


class Killed(Exception):
    """Stands for kill -9: nothing after it runs."""


@pytest.mark.parametrize("variant", ["grpo", "bridged"])
@pytest.mark.parametrize("killed_at", [1, 3])
def test_a_killed_run_ends_with_the_same_weights(
    variant: str, killed_at: int, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(train={"milestone": 2})
    whole = run(settings, variant, base, tmp_path / "whole")
    state = tmp_path / "state.safetensors"
    update = Updater.update

    def fail(self: Updater, number: int, validated: bool) -> dict[str, float]:
        if number == killed_at + 1:
            raise Killed
        return update(self, number, validated)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Updater, "update", fail)
        run(settings, variant, base, tmp_path / "cut", state)
    assert state.is_file()
    (tmp_path / "cut" / "logs" / "metrics.csv").unlink()  # as DVC does before it runs a stage again
    shutil.rmtree(tmp_path / "cut" / "out", ignore_errors=True)
    updates: list[int] = []
    monkeypatch.setattr(Updater, "update", lambda self, n, v: updates.append(n) or update(self, n, v))
    resumed = run(settings, variant, base, tmp_path / "cut", state)
    assert updates == list(range(killed_at + 1, 5))
    assert resumed == whole
    for name in ("last", "best", "milestone"):
        one, other = (tmp_path / folder / "out" / f"{name}.safetensors" for folder in ("whole", "cut"))
        assert sha256(one) == sha256(other)
    assert not state.exists()
    grids = [
        {file.name: file.read_bytes() for file in (tmp_path / folder / "out/validation").iterdir()}
        for folder in ("whole", "cut")
    ]
    assert sorted(grids[0]) == ["000002.png", "000004.png"]  # of the validations
    assert grids[0] == grids[1]


def test_micro_batches_do_not_change_the_gradient(base: Path) -> None:
    found = []
    for size in (None, 2, 5):
        settings = config(train={"micro_batch": size})
        updater = Updater(settings, "released", 0, base, PROMPTS["train"], PROMPTS["validation"])
        updater.optimizer.step = lambda: None  # type: ignore[method-assign,assignment]
        updater.update(1, False)
        found.append(torch.cat([p.grad.flatten() for p in updater.trainable() if p.grad is not None]))
    scale = float(found[0].abs().max())
    for other in found[1:]:
        assert float((other - found[0]).abs().max()) < 1e-5 * scale


def test_draws_are_functions_of_seed_and_update(base: Path) -> None:
    make = lambda seed: Updater(config(), "grpo", seed, base, PROMPTS["train"], PROMPTS["validation"])  # noqa: E731
    first, again, other = make(0), make(0), make(1)
    assert first.draw(3).seeds == again.draw(3).seeds != other.draw(3).seeds
    assert first.select(3) == again.select(3)
    assert len({seed for update in range(1, 6) for seed in first.draw(update).seeds}) == 5 * 6
    batch = first.draw(1)
    assert batch.groups.tolist() == [0, 0, 0, 1, 1, 1]
    assert batch.prompts[0] is batch.prompts[2] is not batch.prompts[3]


def test_categories_take_turns_and_every_prompt_is_shown_once_an_epoch(base: Path) -> None:
    every = scene_prompts("train", 1000)
    kinds = ("single", "color", "numeracy")
    prompts = [prompt for kind in kinds for prompt in [p for p in every if p.category == kind][:4]]
    updater = Updater(config(), "grpo", 0, base, prompts, PROMPTS["validation"])
    shown = [prompt for update in range(1, 7) for prompt in updater.draw(update).prompts[::3]]
    assert [prompt.category for prompt in shown] == ["color", "numeracy", "single"] * 4
    assert sorted(prompt.text for prompt in shown) == sorted(prompt.text for prompt in prompts)


def test_steps_are_drawn_without_replacement_among_the_scored(base: Path) -> None:
    updater = Updater(config(), "grpo", 0, base, PROMPTS["train"], PROMPTS["validation"])
    seen: set[int] = set()
    for update in range(1, 40):
        recording = updater.select(update)
        assert len(recording.ar_steps) == 2
        assert len(set(recording.denoising_steps)) == 3
        seen |= set(recording.denoising_steps)
    assert seen == set(range(7))  # the deterministic step 7 has no log-prob


def test_inner_epochs_move_the_ratio_and_clip(base: Path, tmp_path: Path) -> None:
    settings = config(
        objective={"inner_epochs": 3, "clip_range": 1e-4}, train={"learning_rate": 1e-2, "updates": 2}
    )
    run(settings, "frozen_head_committed", base, tmp_path)
    for row in rows(tmp_path):
        assert 0.05 < float(row["clip_ratio"]) < 1
        assert float(row["ratio_max_deviation"]) <= 1e-5


def test_nothing_to_learn_from_stops_with_a_message(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = config("constant", objective={"beta": 0.0}, train={"updates": 30})
    with pytest.raises(TrainingError, match="equal rewards and the gradient was 0 for 10 updates"):
        run(settings, "frozen_head", base, tmp_path)
    assert "100 % of the groups have equal rewards" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_non_finite_numbers_stop_and_name_the_last_good_state(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state.safetensors"

    def broken(images: Tensor, prompts: Sequence[str], specs: Sequence[Mapping[str, Any]]) -> Tensor:
        broken.calls += 1  # type: ignore[attr-defined]
        return images.mean((1, 2, 3)) * (math.inf if broken.calls == 4 else 1)  # type: ignore[attr-defined]

    broken.calls = 0  # type: ignore[attr-defined]
    monkeypatch.setitem(rewards._REGISTRY, "brightness", entry("brightness", broken))
    settings = make_config(
        reward={"weights": {"brightness": 1.0}, "options": {"brightness": {"on_failure": "fail"}}}
    )
    # calls: updates 1 and 2, the validation after update 2, then update 3
    with pytest.raises(
        TrainingError, match=r"update 3; the last good state is .*state.safetensors \(update 2\)"
    ):
        run(settings, "frozen_head", base, tmp_path, state)


def test_settings_that_do_not_fit_the_policy_are_config_errors(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least one of the 16 tokens"):
        run(config(variants={"released": {"uncertain_fraction": 0.01}}), "released", base, tmp_path)
    with pytest.raises(ConfigError, match=r"reward.weights.nothing: unknown reward; allowed: .*scenes"):
        run(config("nothing"), "frozen_head", base, tmp_path)
    with pytest.raises(ConfigError, match=r"variant: nope; allowed: grpo"):
        run(config(), "nope", base, tmp_path)
    assert not (tmp_path / "logs").exists()


def test_metrics_csv_keeps_all_digits(base: Path, tmp_path: Path) -> None:
    run(config(), "frozen_head", base, tmp_path)
    row = rows(tmp_path)[1]
    assert repr(float(row["reward"])) == row["reward"]
    digest = hashlib.sha256((tmp_path / "logs" / "metrics.csv").read_bytes()).hexdigest()
    assert len(digest) == 64
    with open(tmp_path / "logs" / "timing.csv", newline="") as file:
        timing = list(csv.DictReader(file))
    assert [int(t["update"]) for t in timing] == [1, 2, 3, 4]
    core = [float(t["core_s"]) for t in timing]
    assert core == sorted(core)
