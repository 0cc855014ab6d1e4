from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from margrpo import pretrain as module
from margrpo.benchmarks.scenes import load_split, score
from margrpo.config import Architecture, Pretrain
from margrpo.policies.tiny import TinyPolicy
from margrpo.pretrain import draw_known, flow_loss, pretrain, rate, render_scenes
from margrpo.scenes.grammar import parse

TINY = Pretrain(
    images=128, steps=120, batch_size=16, learning_rate=5e-3, ema=0.8, seed=4,
    architecture=Architecture(width=16, depth=1, heads=2, head_width=16, head_depth=1, channels=6),
)  # fmt: skip


def test_loss_falls_and_the_same_seed_gives_the_same_bits():
    losses: list[float] = []
    before = torch.get_rng_state()
    first = pretrain(TINY, progress=False, on_step=lambda step, loss: losses.append(loss))
    second = pretrain(TINY, progress=False)
    other = pretrain(TINY.model_copy(update={"seed": 5}), progress=False)
    assert torch.equal(before, torch.get_rng_state())
    assert len(losses) == 120
    assert np.mean(losses[-20:]) < 0.8 * np.mean(losses[:5])
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name
    assert not torch.equal(first.transformer.mask_token, other.transformer.mask_token)


def test_result_does_not_depend_on_the_threads_of_the_caller_and_restores_them():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        two = pretrain(TINY.model_copy(update={"steps": 3}), progress=False)
        assert torch.get_num_threads() == 2
        torch.set_num_threads(1)
        one = pretrain(TINY.model_copy(update={"steps": 3}), progress=False)
    finally:
        torch.set_num_threads(before)
    for name, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[name]), name


def test_kept_weights_are_the_moving_average():
    """With decay 0 the average is the last step's weights; with decay near 1 it stays at the first step's."""
    steps = TINY.model_copy(update={"steps": 6, "ema": 0.0})
    last, first = pretrain(steps, False), pretrain(steps.model_copy(update={"ema": 0.999999}), False)
    only = pretrain(steps.model_copy(update={"steps": 6, "ema": 0.5}), False)
    a, b, c = (p.transformer.token_proj.weight for p in (first, last, only))
    assert (c - a).norm() < (b - a).norm()
    assert (c - b).norm() < (b - a).norm()


def test_only_the_train_split_is_read(monkeypatch):
    asked: list[str] = []

    def recorded(split: str):
        asked.append(split)
        return load_split(split)

    monkeypatch.setattr(module, "load_split", recorded)
    prompts, _ = render_scenes(300, seed=0)
    assert set(asked) == {"train"}
    assert all(parse(prompt).seen for prompt in prompts)


def test_rendered_scenes_show_their_prompts_and_balance_categories():
    prompts, images = render_scenes(400, seed=9)
    assert images.shape == (400, 3, 32, 32)
    assert images.dtype == torch.float32
    parsed = [parse(prompt) for prompt in prompts]
    assert score(images, [prompt.spec for prompt in parsed]).mean() > 0.99
    counts = [sum(prompt.category == category for prompt in parsed) for category in ("single", "spatial")]
    assert all(abs(count - 100) < 4 * math.sqrt(400 * 0.25 * 0.75) for count in counts)
    again, same = render_scenes(400, seed=9)
    assert again == prompts
    assert torch.equal(images, same)


def test_known_tokens_follow_the_cosine_schedule():
    known = draw_known(20_000, 16, torch.Generator().manual_seed(0))
    counts = known.sum(1)
    assert counts.min() == 0
    assert counts.max() == 15  # something is always left to learn
    for limit in (0, 4, 8, 14):
        # P(count <= n) = P(1 - cos(pi u / 2) < (n + 1) / 16)
        expected = math.acos(1 - (limit + 1) / 16) * 2 / math.pi
        assert (counts <= limit).float().mean().item() == pytest.approx(expected, abs=0.012)
    share = known.float().mean(0)
    assert (share - share.mean()).abs().max() < 0.015  # every position equally often


def test_loss_of_a_zero_head_is_the_variance_of_the_target():
    """A new head predicts 0, so the loss is E|eps - x_0|^2 per channel = 1 + E x_0^2."""
    policy = TinyPolicy(TINY.architecture)
    tokens = torch.full((256, 16, 6), 2.0)
    condition = policy.encode([None] * 256)
    loss = flow_loss(policy, tokens, condition, torch.Generator().manual_seed(0))
    assert loss.item() == pytest.approx(5.0, abs=0.1)


def test_rate_by_hand():
    # 100 steps: 5 of warm-up, then a cosine from 1 to .1 over 95
    assert [rate(step, 100) for step in (0, 1, 4)] == pytest.approx([0.2, 0.4, 1.0])
    assert rate(5, 100) == pytest.approx(1.0)
    assert rate(5 + 95, 100) == pytest.approx(0.1)
    assert rate(5 + 19, 100) == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi / 5)))
    assert rate(0, 1) == 1.0
