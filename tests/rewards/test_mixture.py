from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from margrpo import rewards
from margrpo.config import RewardOptions
from margrpo.errors import ConfigError, TrainingError
from margrpo.objective import advantages
from margrpo.rewards import base, mixture, runner

IMAGES = torch.linspace(0, 1, 8).view(8, 1, 1, 1).expand(8, 3, 4, 4).contiguous()
PROMPTS = [f"prompt {i}" for i in range(8)]
SPECS: list[Mapping[str, Any]] = [{} for _ in range(8)]


def brightness(images: Tensor, prompts: Sequence[str], specs: base.Specs) -> Tensor:
    return images.mean((1, 2, 3))


@pytest.fixture
def add(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def register(name: str, reward: base.Reward, **facts: Any) -> None:
        monkeypatch.setitem(
            base._REGISTRY, name, base.Entry(base.Info(name, "test", "none", **facts), lambda o: reward)
        )

    register("brightness", brightness)
    return register


def score(weights: dict[str, float], training: bool = False, **options: RewardOptions) -> rewards.RewardBatch:
    return rewards.score(weights, IMAGES, PROMPTS, SPECS, options, training)


def test_total_is_the_weighted_sum_of_raw_parts(add):
    add("index", lambda images, prompts, specs: torch.tensor([float(p[-1]) for p in prompts]))
    result = score({"brightness": 7.0, "index": -0.5})
    assert torch.allclose(result.parts["index"], torch.arange(8.0))
    assert torch.allclose(result.total, torch.arange(8) * 0.5)


def test_small_batches_give_the_same_scores_and_every_image_its_prompt(add):
    sizes = []

    def index(images: Tensor, prompts: Sequence[str], specs: base.Specs) -> Tensor:
        sizes.append(len(images))
        return torch.tensor([float(p[-1]) for p in prompts])

    add("index", index, batch_size=3)
    assert score({"index": 1.0}).total.tolist() == list(range(8))
    assert sizes == [3, 3, 2]
    assert score({"index": 1.0}, index=RewardOptions(batch_size=5)).total.tolist() == list(range(8))
    assert sizes[3:] == [5, 3]


def test_a_reward_that_raises_for_one_image_costs_that_image(add, caplog):
    def picky(images: Tensor, prompts: Sequence[str], specs: base.Specs) -> Tensor:
        if "prompt 5" in prompts:
            raise RuntimeError("bad picture\nmore")
        return images.mean((1, 2, 3))

    add("picky", picky)
    result = score({"picky": 1.0, "brightness": 1.0})
    assert result.total.isnan().tolist() == [i == 5 for i in range(8)]
    assert not result.parts["brightness"].isnan().any()
    assert "reward picky: no score for 1 of 8 images (RuntimeError: bad picture)" in caplog.text
    assert result.parts["picky"][4] == IMAGES[4].mean()


def test_infinite_and_missing_scores_are_nan_and_never_zero(add):
    add("odd", lambda images, *_: torch.tensor([1.0, float("inf"), float("nan")] + [0.0] * 5))
    assert score({"odd": 1.0}).parts["odd"].isnan().tolist() == [False, True, True] + [False] * 5


def test_a_reward_of_weight_zero_is_logged_and_cannot_spoil_the_sum(add):
    add("odd", lambda images, *_: torch.full((8,), torch.nan))
    result = score({"brightness": 1.0, "odd": 0.0})
    assert torch.allclose(result.total, IMAGES[:, 0, 0, 0])
    assert result.parts["odd"].isnan().all()


def test_on_failure_fail_stops(add):
    add("odd", lambda images, *_: torch.tensor([torch.nan] + [0.0] * 7))
    with pytest.raises(TrainingError, match="reward odd: no score for 1 of 8 images"):
        score({"odd": 1.0}, odd=RewardOptions(on_failure="fail"))


def test_a_hanging_reward_is_left_behind_and_built_anew(monkeypatch):
    built = []

    def build(options: RewardOptions) -> base.Reward:
        built.append(options)
        slow = len(built) == 1

        def reward(images: Tensor, prompts: Sequence[str], specs: base.Specs) -> Tensor:
            if slow and "prompt 0" in prompts:
                time.sleep(30)
            return images.mean((1, 2, 3))

        return reward

    monkeypatch.setitem(base._REGISTRY, "slow", base.Entry(base.Info("slow", "test", "none"), build))
    started = time.perf_counter()
    options = RewardOptions(timeout_s=0.2, batch_size=4)
    result = score({"slow": 1.0}, slow=options)
    assert time.perf_counter() - started < 5
    assert result.parts["slow"].isnan().tolist() == [True] * 4 + [False] * 4
    assert not score({"slow": 1.0}, slow=options).total.isnan().any()
    assert len(built) == 2


def test_a_dead_reward_stops_after_some_calls(add):
    def dead(images: Tensor, prompts: Sequence[str], specs: base.Specs) -> Tensor:
        raise ConnectionError("gone")

    add("dead", dead)
    for _ in range(runner.PATIENCE - 1):
        assert score({"dead": 1.0, "brightness": 1.0}).total.isnan().all()
    with pytest.raises(TrainingError, match=r"no score for 8 of 8 images \(ConnectionError: gone\), 3 times"):
        score({"dead": 1.0, "brightness": 1.0})


def test_scores_of_the_wrong_number_are_no_scores(add):
    add("wrong", lambda images, *_: torch.zeros(3))
    assert score({"wrong": 1.0}).total.isnan().all()


def test_scaling_applies_always_and_batch_normalisation_only_in_training():
    scores = torch.tensor([20.0, 22.0, torch.nan, 24.0])
    fixed = RewardOptions(shift=20.0, scale=2.0, normalize="minmax")
    assert mixture.scaled(scores, fixed, training=False)[[0, 1, 3]].tolist() == [0, 1, 2]
    assert mixture.scaled(scores, fixed, training=True)[[0, 1, 3]].tolist() == [0, 0.5, 1]
    standard = mixture.scaled(scores, RewardOptions(normalize="standard"), training=True)
    assert standard[2].isnan()
    assert torch.allclose(standard[[0, 1, 3]], torch.tensor([-(1.5**0.5), 0.0, 1.5**0.5]))
    assert mixture.scaled(torch.full((3,), 2.0), RewardOptions(normalize="standard"), True).tolist() == [
        0,
        0,
        0,
    ]


def test_advantages_leave_out_images_without_a_reward():
    groups = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    values = torch.tensor([1.0, 3.0, torch.nan, 5.0, torch.nan, 2.0, 2.0])
    expected = 1 / (2**0.5 + 1e-4)
    result = advantages(values, groups)
    assert torch.allclose(result, torch.tensor([-expected, expected, 0, 0, 0, 0, 0]))
    assert advantages(torch.full((7,), torch.nan), groups).tolist() == [0] * 7


def test_metrics_of_a_mixture():
    parts = {
        "scenes": torch.tensor([0.0, 1.0, 0.5, 0.5]),
        "jpeg_size": torch.tensor([-1.0, -1.0004, -2.0, torch.nan]),
    }
    logged = rewards.metrics(rewards.RewardBatch(torch.zeros(4), parts), images_per_group=2)
    assert set(logged) == set(rewards.columns(["scenes", "jpeg_size"]))
    assert logged["rewards/scenes/mean"] == 0.5
    assert logged["rewards/scenes/std"] == pytest.approx(0.5**0.5 / 2)
    assert logged["rewards/scenes/frac_zero_std"] == 0.5
    assert logged["rewards/jpeg_size/mean"] == pytest.approx(-4.0004 / 3)
    assert logged["rewards/jpeg_size/frac_below_step"] == 1.0  # .0004 kB and one image alone
    assert logged["rewards/jpeg_size/frac_zero_std"] == 0.5
    assert logged["rewards/jpeg_size/failed"] == 1


def test_the_embedded_world_alone_logs_what_it_did():
    assert rewards.columns(["scenes"]) == ["rewards/scenes/mean"]


def test_a_mixture_that_cannot_run_is_refused_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match=r"reward.weights.beauty: unknown reward; allowed: .*scenes"):
        rewards.check({"beauty": 1.0})
    with pytest.raises(ConfigError, match="at least one weight"):
        rewards.check({"scenes": 0.0})
    with pytest.raises(
        ConfigError, match=r"options.hpsv2.path: .* has no HPS_v2_compressed.pt; allowed: a folder"
    ):
        rewards.check({"hpsv2": 1.0}, {"hpsv2": RewardOptions(path=str(tmp_path))})


def test_a_jpeg_is_smaller_the_less_it_shows():
    noise = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    flat, noisy = rewards.score(
        {"jpeg_size": 1.0}, torch.cat([torch.full_like(noise, 0.5), noise]), ["", ""], [{}, {}]
    ).total
    # an empty baseline JPEG with its tables has some 600 bytes; 1,024 noisy pixels take well over a kB more
    assert -0.8 < flat < -0.6
    assert noisy < -1.8
