"""Evaluation: noise that depends on prompt and index alone, means by hand, the exact KL, the three files."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from margrpo.benchmarks import scenes
from margrpo.checkpoints import save_policy
from margrpo.config import Architecture, Config
from margrpo.evaluation import Scored, choose, evaluate, kl_to_base, prompt_rows, sample, summarize
from margrpo.grids import grid_png, spread
from margrpo.params import load_config
from margrpo.policies.tiny import TinyPolicy
from margrpo.prompts import Prompt

PARAMS = Path(__file__).parents[1] / "params.yaml"
SMALL = Architecture(width=16, depth=1, heads=2, head_width=16, head_depth=1)


def make_config(*overrides: str) -> Config:
    return load_config(PARAMS, ["evaluation.images_per_prompt=2", "evaluation.kl_prompts=4", *overrides])


def make_policy(seed: int = 0) -> TinyPolicy:
    policy = TinyPolicy(SMALL, seed)
    # A fresh head predicts 0 for every input: give it something to say.
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        weight = policy.denoiser.final_layer.linear.weight
        weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    return policy.eval()


def prompts_of_test(count: int) -> list[Prompt]:
    return choose([Prompt(p.text, p.category, p.spec, p.seen) for p in scenes.load_split("test")], count)


@pytest.mark.parametrize("stochastic", [False, True])
def test_images_depend_on_prompt_and_index_alone(stochastic: bool) -> None:
    prompts, policy = prompts_of_test(5), make_policy()
    whole = sample(policy, make_config("evaluation.batch_size=128"), prompts, stochastic)
    parts = sample(policy, make_config("evaluation.batch_size=3"), prompts[::-1], stochastic)
    more = sample(policy, make_config("evaluation.images_per_prompt=3"), prompts, stochastic)
    assert whole.images.shape == (5, 2, 3, 32, 32)
    assert torch.allclose(whole.images, parts.images.flip(0), atol=1e-5)
    assert torch.allclose(whole.images, more.images[:, :2], atol=1e-5)
    assert not torch.allclose(whole.images[:, 0], whole.images[:, 1], atol=1e-2)


def test_ode_and_sde_differ() -> None:
    prompts, policy, config = prompts_of_test(2), make_policy(), make_config()
    ode = sample(policy, config, prompts, stochastic=False)
    assert not torch.allclose(ode.images, sample(policy, config, prompts, stochastic=True).images, atol=1e-2)


def scored_by_hand() -> tuple[list[Prompt], Scored]:
    """Three prompts with two images each: constant gray levels a and b, so that distances are |a - b|."""
    prompts = [
        Prompt("one", "single", {}, True),
        Prompt("two", "color", {}, True),
        Prompt("three", "color", {}, False),
    ]
    levels = torch.tensor([[0.2, 0.2], [0.1, 0.4], [0.0, 0.6]])
    images = levels[:, :, None, None, None].expand(3, 2, 3, 8, 8)
    return prompts, Scored(images, torch.tensor([[1.0, 0.5], [0.5, 0.0], [0.25, 0.25]]), torch.eye(3)[:, :2])


def test_summary_by_hand() -> None:
    prompts, scored = scored_by_hand()
    result = summarize(prompts, scored, full=True)
    # Prompt means .75, .25, .25.
    assert result["reward"] == pytest.approx(1.25 / 3)
    assert result["reward_seen"] == pytest.approx(0.5)
    assert result["reward_unseen"] == pytest.approx(0.25)
    assert result["reward_single"] == pytest.approx(0.75)
    assert result["reward_color"] == pytest.approx(0.25)
    assert result["strict"] == pytest.approx(2 / 6)
    # Distances 0, .3, .6.
    assert result["diversity"] == pytest.approx(0.3, abs=1e-6)
    # Two images of similarity s = exp(-d / .1): eigenvalues (1 +- s) / 2, effective number exp(entropy).
    expected = []
    for distance in (0.0, 0.3, 0.6):
        shares = [(1 + sign * math.exp(-distance / 0.1)) / 2 for sign in (1, -1)]
        expected.append(math.exp(-sum(p * math.log(p) for p in shares if p > 0)))
    assert result["vendi"] == pytest.approx(sum(expected) / 3, abs=1e-5)
    assert result["high_frequency"] == 0.0
    assert result["n_images"] == 6
    assert set(summarize(prompts, scored, full=False)) == {
        "reward", "reward_seen", "reward_unseen", "reward_single", "reward_color", "n_images",
    }  # fmt: skip


def test_groups_without_prompts_are_left_out() -> None:
    prompts, scored = scored_by_hand()
    part = Scored(scored.images[:2], scored.reward[:2], scored.strict[:2])
    assert "reward_unseen" not in summarize(prompts[:2], part, full=False)


def test_prompt_rows_by_hand() -> None:
    prompts, scored = scored_by_hand()
    rows = prompt_rows(prompts, {"sde": scored})
    assert list(rows.columns) == [
        "checkpoint", "sampler", "prompt", "category", "seen", "reward", "strict", "diversity",
    ]  # fmt: skip
    assert rows["reward"].tolist() == [0.75, 0.25, 0.25]
    assert rows["diversity"].tolist() == pytest.approx([0.0, 0.3, 0.6], abs=1e-6)
    assert rows["seen"].tolist() == [True, True, False]


def test_images_without_a_reward_are_counted_and_in_no_mean() -> None:
    prompts, scored = scored_by_hand()
    reward = torch.tensor([[1.0, torch.nan], [0.5, 0.0], [torch.nan, torch.nan]])
    holes = Scored(scored.images, reward, scored.strict)
    result = summarize(prompts, holes, full=False)
    # Prompt means 1, .25 and none; the only unseen prompt is the last.
    assert result == {
        "reward": pytest.approx(0.625),
        "reward_seen": pytest.approx(0.625),
        "reward_single": 1.0,
        "reward_color": 0.25,
        "n_images": 6.0,
        "failed": 3.0,
    }
    rows = prompt_rows(prompts, {"sde": holes})
    assert rows["reward"].tolist()[:2] == [1.0, 0.25]
    assert rows["reward"].isna().tolist() == [False, False, True]


def test_kl_of_the_base_is_zero() -> None:
    policy = make_policy()
    assert kl_to_base(policy, make_policy(), make_config(), prompts_of_test(4)) == 0.0


def test_kl_of_a_shifted_velocity_in_closed_form() -> None:
    policy, base, shift = make_policy(), make_policy(), 0.1
    with torch.no_grad():
        policy.denoiser.final_layer.linear.bias += shift
    # Every velocity is off by `shift` in 16 channels; with equal variances the KL is the squared difference
    # of means over twice the variance, here averaged over the 7 steps that have a density (T = 8), eta .7.
    expected = []
    for step in range(7):
        sigma, dt = 1 - step / 8, -1 / 8
        std = 0.7 * math.sqrt(sigma / (1 - (sigma if sigma < 1 else 7 / 8)))
        off = shift * (1 + std**2 * (1 - sigma) / (2 * sigma)) * dt
        expected.append(16 * off**2 / (2 * std**2 * -dt))
    found = kl_to_base(policy, base, make_config(), prompts_of_test(4))
    assert found == pytest.approx(np.mean(expected), rel=1e-3)


def test_kl_under_guidance_keeps_a_common_shift() -> None:
    # A shift of conditional and null velocity alike survives guidance unchanged: null + w (cond - null).
    policy, base = make_policy(), make_policy()
    with torch.no_grad():
        policy.denoiser.final_layer.linear.bias += 0.1
    plain = kl_to_base(policy, base, make_config(), prompts_of_test(2))
    guided = kl_to_base(policy, base, make_config("evaluation.guidance=3.0"), prompts_of_test(2))
    assert guided == pytest.approx(plain, rel=1e-3)


def test_files_of_a_run(tmp_path: Path) -> None:
    base, last = tmp_path / "base.safetensors", tmp_path / "last.safetensors"
    save_policy(make_policy(0), base, {})
    save_policy(make_policy(1), last, {"snapshot": "last"})
    save_policy(make_policy(1), tmp_path / "best.safetensors", {"snapshot": "best"})
    config = make_config("evaluation.prompts=6", "evaluation.grid_prompts=3")
    out = tmp_path / "evaluation"
    policies = {"best": tmp_path / "best.safetensors", "milestone": base, "last": last}
    evaluate(config, policies, base, out, progress=False)
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["last"]["kl_to_base"] > 0
    assert metrics["last"]["sde"]["n_images"] == 12
    # Equal weights under another label give equal numbers; other checkpoints carry rewards only.
    assert metrics["best"]["sde"]["reward"] == metrics["last"]["sde"]["reward"]
    assert "strict" in metrics["last"]["ode"]
    assert list(metrics["best"]) == ["sde"]
    assert "strict" not in metrics["best"]["sde"]
    rows = pd.read_csv(out / "prompts.csv")
    assert len(rows) == 2 * 6
    for sampler in ("ode", "sde"):
        mean = rows[rows["sampler"] == sampler]["reward"].mean()
        assert mean == pytest.approx(metrics["last"][sampler]["reward"])
    # Two images of 64 pixels and three gaps of 4 wide; three rows of caption, images and gap high.
    with Image.open(out / "grid.png") as grid:
        assert grid.size == (2 * 64 + 3 * 4, 4 + 3 * (24 + 64 + 4))
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    evaluate(config, policies, base, out, progress=False)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_spread_takes_groups_in_turn() -> None:
    assert spread(["a", "a", "a", "b", "c", "c"], 4) == [0, 1, 3, 4]
    assert spread(["a", "a"], 5) == [0, 1]


def test_choice_holds_every_category_seen_and_unseen() -> None:
    chosen = prompts_of_test(7)
    assert len({(prompt.category, prompt.seen) for prompt in chosen}) == 7
    assert {prompt.category for prompt in chosen} == {"single", "color", "spatial", "numeracy"}


def test_grid_enlarges_by_whole_pixels() -> None:
    images = torch.zeros(1, 1, 3, 32, 32)
    images[0, 0, 0, 0, 0] = 1.0  # one red pixel
    data = grid_png(["a caption"], images)
    with Image.open(io.BytesIO(data)) as grid:
        pixels = np.asarray(grid)
    corner = pixels[28 : 28 + 64, 4 : 4 + 64]
    assert (corner[:2, :2] == [255, 0, 0]).all()
    assert (corner[2:, 2:] == 0).all()
