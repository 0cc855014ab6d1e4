from __future__ import annotations

import math

import pytest
import torch

from margrpo.config import Sampler
from margrpo.rollout import Recording, Rollout, generate, take
from tests.support import make_policy, scene_prompts

POLICY = make_policy()
TEXTS = [prompt.text for prompt in scene_prompts("train", 6)]
SEEDS = [11, 12, 13, 14, 15, 16]
EVERYTHING = Recording(frozenset(range(6)), tuple(range(7)), unknown=True, consistency=True)


def test_images_do_not_depend_on_the_batch_nor_on_what_is_recorded() -> None:
    whole = generate(POLICY, TEXTS, SEEDS, 6, recording=EVERYTHING)
    plain = generate(POLICY, TEXTS, SEEDS, 6)
    torch.testing.assert_close(whole.tokens, plain.tokens, atol=1e-5, rtol=1e-5)
    reversed_order = generate(POLICY, TEXTS[::-1], SEEDS[::-1], 6)
    torch.testing.assert_close(reversed_order.tokens.flip(0), plain.tokens, atol=1e-5, rtol=1e-5)
    one = generate(POLICY, TEXTS[3:4], SEEDS[3:4], 6)
    torch.testing.assert_close(one.tokens[0], plain.tokens[3], atol=1e-5, rtol=1e-5)


def test_same_seed_same_bits_other_seed_other_image() -> None:
    first, second = (generate(POLICY, TEXTS, SEEDS, 6) for _ in range(2))
    assert torch.equal(first.tokens, second.tokens)
    other = generate(POLICY, TEXTS, [seed + 1 for seed in SEEDS], 6)
    assert (first.tokens - other.tokens).abs().amax((1, 2)).min() > 0.1


def test_every_token_is_committed_once_and_stays() -> None:
    rollout = generate(POLICY, TEXTS, SEEDS, 6, recording=EVERYTHING)
    written = torch.zeros(6, 16, dtype=torch.int64)
    for step in rollout.steps:
        committed = step.index[:, : step.committed]
        written.scatter_add_(1, committed, torch.ones_like(committed))
        assert not take(step.known, step.index).any()
        assert int(step.known.sum(1)[0]) == 16 - step.index.shape[1]
        # what is known was final when it was written
        assert torch.equal(step.tokens[step.known], rollout.tokens[step.known])
        assert torch.equal(take(rollout.tokens, committed), step.trajectories.final[:, : step.committed])
        torch.testing.assert_close(take(rollout.commit_z, committed), step.z[:, : step.committed])
    assert (written == 1).all()
    assert [step.committed for step in rollout.steps] == [1, 1, 3, 3, 4, 4]


def test_previous_samples_belong_to_the_same_tokens() -> None:
    rollout = generate(POLICY, TEXTS, SEEDS, 6, recording=EVERYTHING)
    for earlier, step in zip(rollout.steps, rollout.steps[1:], strict=False):
        lookup = torch.zeros(6, 16, 8).scatter(
            1, earlier.index[..., None].expand(-1, -1, 8), earlier.trajectories.final
        )
        assert step.previous is not None
        assert torch.equal(step.previous, take(lookup, step.index))
    assert rollout.steps[0].previous is None


def test_committed_mask_records_only_committed_tokens() -> None:
    rollout = generate(POLICY, TEXTS, SEEDS, 6, recording=Recording(frozenset({1, 4}), (0, 3)))
    assert [step.k for step in rollout.steps] == [1, 4]
    assert [step.index.shape[1] for step in rollout.steps] == [1, 4]
    assert rollout.steps[0].trajectories.steps == (0, 3)
    assert rollout.steps[1].trajectories.states is not None
    assert rollout.steps[1].trajectories.states.shape == (2, 6, 4, 8)


def test_states_chain_into_next_states() -> None:
    trajectories = generate(POLICY, TEXTS, SEEDS, 6, recording=EVERYTHING).steps[2].trajectories
    assert trajectories.states is not None
    assert trajectories.next_states is not None
    assert torch.equal(trajectories.states[1:], trajectories.next_states[:-1])


def test_ode_and_sde_share_order_and_start() -> None:
    recording = Recording(frozenset(range(6)), (0,))
    sde = generate(POLICY, TEXTS, SEEDS, 6, recording=recording)
    ode = generate(POLICY, TEXTS, SEEDS, 6, stochastic=False, recording=recording)
    for a, b in zip(sde.steps, ode.steps, strict=True):
        assert torch.equal(a.index, b.index)
    assert not torch.allclose(sde.tokens, ode.tokens)
    again = generate(POLICY, TEXTS, SEEDS, 6, stochastic=False)
    assert torch.equal(ode.tokens, again.tokens)


def _squared_noise(rollout: Rollout, scale: float, guided: bool) -> torch.Tensor:
    """Return z^2 of recorded transitions under the conditional or the guided head, from first principles."""
    values = []
    sigmas = torch.linspace(1, 0, 9)
    for step in rollout.steps:
        trajectories = step.trajectories
        assert trajectories.states is not None
        assert trajectories.next_states is not None
        for row, t in enumerate(trajectories.steps):
            x, after = (v[row].flatten(0, 1) for v in (trajectories.states, trajectories.next_states))
            sigma, dt = float(sigmas[t]), -0.125
            std = 0.7 * math.sqrt(sigma / (1 - (0.875 if sigma == 1 else sigma)))
            times = POLICY.transition.times[t].expand(len(x))
            velocity = POLICY.head(x, times, step.z.flatten(0, 1))
            if guided:
                assert step.null_z is not None
                null = POLICY.head(x, times, step.null_z.flatten(0, 1))
                velocity = null + scale * (velocity - null)
            mean = (
                x * (1 + std**2 * dt / (2 * sigma)) + velocity * (1 + std**2 * (1 - sigma) / (2 * sigma)) * dt
            )
            values.append((((after - mean) / (std * math.sqrt(-dt))) ** 2).flatten())
    return torch.cat(values)


@pytest.mark.parametrize("scale", [1.0, 4.0])
@torch.no_grad()
def test_mean_squared_noise_of_transitions_is_one(scale: float) -> None:
    texts, seeds = TEXTS * 6, list(range(36))
    rollout = generate(POLICY, texts, seeds, 6, guidance=scale, recording=EVERYTHING)
    values = _squared_noise(rollout, scale, guided=scale > 1)
    assert abs(float(values.mean()) - 1) < 3 * math.sqrt(2 / len(values))
    if scale > 1:
        # the known pitfall: scoring a guided rollout with the conditional head
        wrong = _squared_noise(rollout, scale, guided=False)
        assert float(wrong.mean()) > 1 + 6 * math.sqrt(2 / len(values))


def test_fewer_denoising_steps_and_stochastic_end() -> None:
    policy = make_policy()
    policy.configure(Sampler(denoising_steps=4, final_step="stochastic"))
    assert policy.transition.scored == [0, 1, 2, 3]
    rollout = generate(policy, TEXTS[:2], SEEDS[:2], 3, recording=Recording(frozenset({0}), (3,)))
    trajectories = rollout.steps[0].trajectories
    assert trajectories.next_states is not None
    assert torch.equal(trajectories.next_states[0], trajectories.final)
