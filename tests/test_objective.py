from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Normal
from torch.distributions import kl_divergence as exact_kl

from margrpo.diffusion import Gaussian
from margrpo.objective import advantages, consistency_mask, kl_divergence, surrogate
from margrpo.rollout import RecordedStep, Trajectories
from margrpo.trajectories import uncertain_tokens
from tests.support import objective


def test_advantages_by_hand() -> None:
    # mean 2, unbiased std sqrt((1 + 0 + 1) / 2) = 1
    values = advantages(torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3, dtype=torch.int64))
    torch.testing.assert_close(values, torch.tensor([-1.0, 0.0, 1.0]) / 1.0001)


def test_equal_rewards_have_no_advantage() -> None:
    values = advantages(torch.full((4,), 0.7), torch.tensor([3, 3, 3, 3]))
    assert values.abs().max() == 0


def test_groups_are_slots_not_prompts() -> None:
    # the same prompt in two slots (ids 0 and 7), interleaved: each slot is centred on its own mean
    rewards = torch.tensor([0.0, 10.0, 1.0, 11.0])
    values = advantages(rewards, torch.tensor([0, 7, 0, 7]))
    expected = 0.5 / (math.sqrt(0.5) + 1e-4)
    torch.testing.assert_close(values, torch.tensor([-expected, -expected, expected, expected]))


def test_advantages_sum_to_zero_in_a_group() -> None:
    rewards = torch.rand(24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = advantages(rewards, torch.arange(3).repeat(8))
    for group in range(3):
        assert abs(float(values[group::3].sum())) < 1e-12


def test_group_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        advantages(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 0, 1]))


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [(1.5, 2.0, 2.4), (0.5, 2.0, 1.0), (1.5, -2.0, -3.0), (0.5, -2.0, -1.6), (1.1, 2.0, 2.2)],
)
def test_clipped_surrogate_by_hand(ratio: float, advantage: float, expected: float) -> None:
    value = surrogate(torch.tensor(math.log(ratio)), torch.tensor(advantage), 0.2)
    assert float(value) == pytest.approx(expected, rel=1e-6)
    free = surrogate(torch.tensor(math.log(ratio)), torch.tensor(advantage), None)
    assert float(free) == pytest.approx(ratio * advantage, rel=1e-6)


def test_kl_kinds() -> None:
    generator = torch.Generator().manual_seed(0)
    mean, other, value = torch.randn(3, 6, 4, generator=generator, dtype=torch.float64)
    std, other_std = torch.rand(2, 6, 1, generator=generator, dtype=torch.float64) + 0.2
    policy, reference = Gaussian(mean, std), Gaussian(other, other_std)
    reached = Gaussian(value, torch.zeros_like(std))
    p, q = Normal(mean, std.expand_as(mean)), Normal(other, other_std.expand_as(mean))
    torch.testing.assert_close(kl_divergence("gaussian", policy, reference, reached), exact_kl(p, q).sum(-1))
    d = other - mean
    torch.testing.assert_close(
        kl_divergence("released", policy, reference, reached), (d.exp() - d - 1).sum(-1)
    )
    r = (q.log_prob(value) - p.log_prob(value)).sum(-1)
    torch.testing.assert_close(kl_divergence("k3", policy, reference, reached), r.exp() - r - 1)


def _step(now: list[list[float]], before: list[list[float]] | None, committed: int, k: int) -> RecordedStep:
    final = torch.tensor([now])
    count = final.shape[1]
    return RecordedStep(
        k=k,
        tokens=torch.zeros(1, 4, 2),
        known=torch.zeros(1, 4, dtype=torch.bool),
        index=torch.tensor([[2, 0, 3, 1]])[:, :count],
        committed=committed,
        trajectories=Trajectories(final),
        z=torch.zeros(1, count, 1),
        null_z=None,
        previous=None if before is None else torch.tensor([before]),
    )


def test_consistency_mask_by_hand() -> None:
    # final tokens by position 0..3; the step sees positions 2, 0, 3, 1
    final = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 2.0]]])
    now = [[0.0, 1.0], [1.0, 1.0], [0.0, 1.0], [1.0, 0.0]]
    before = [[1.0, 0.0], [0.0, 1.0], [0.0, 5.0], [0.0, 1.0]]
    # position 2: cos 0 - 1 < 0 but committed now; 0: .707 - 0 > 0; 3: 1 - 1 = 0, not > 0; 1: 0 - 1 < 0
    step = _step(now, before, committed=1, k=2)
    assert consistency_mask(step, final, 0.0).tolist() == [[True, True, False, False]]
    assert consistency_mask(step, final, 0.8).tolist() == [[True, False, False, False]]
    assert consistency_mask(step, final, -0.5).tolist() == [[True, True, True, False]]
    assert consistency_mask(step, final, None).tolist() == [[True] * 4]
    assert consistency_mask(_step(now, None, committed=1, k=0), final, 0.0).tolist() == [[True] * 4]


@pytest.mark.parametrize(("fraction", "count"), [(0.3, 5), (0.1, 2), (0.5, 8), (1.0, 16), (0.04, 1)])
def test_exactly_round_fraction_tokens_are_uncertain(fraction: float, count: int) -> None:
    final = torch.randn(3, 5, 16, 4, generator=torch.Generator().manual_seed(0))
    assert uncertain_tokens(final, fraction).sum(1).tolist() == [count] * 3


def test_the_most_uncertain_tokens_are_chosen() -> None:
    # two samples per token; channels disagree by (0, 4), (1, 1), (3, 3): mean std 1, .5, 1.5
    first = torch.tensor([[0.0, 4.0], [1.0, 1.0], [3.0, 3.0]])
    final = torch.stack([first, torch.zeros(3, 2)])[None]
    assert uncertain_tokens(final, 0.34).tolist() == [[False, False, True]]
    assert uncertain_tokens(final, 0.67).tolist() == [[True, False, True]]


def test_objective_switches_of_the_presets_are_valid() -> None:
    assert (
        objective(trajectory_source="bridged", token_mask="committed", rao_blackwell=True).trajectories == 1
    )
