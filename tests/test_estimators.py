"""The policy term end to end: what each trajectory source estimates, checked against independent computations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from margrpo.config import Objective
from margrpo.objective import Terms, Totals, consistency_mask, step_terms
from margrpo.policies.tiny import TinyPolicy
from margrpo.rollout import Recording, Rollout, generate, take
from margrpo.trajectories import Rows, build_rows, draw_fresh
from tests.support import VARIANTS, make_policy, objective, scene_prompts

TEXTS = [prompt.text for prompt in scene_prompts("train", 4)]
STEPS = (1, 3, 6)
ADVANTAGE = torch.tensor([1.0, -0.5, 0.25, -0.75])


def many(trajectories: int) -> Objective:
    """Return the bridged objective without KL and with more trajectories than params.yaml may ask for."""
    return objective(**VARIANTS["bridged"], beta=0.0).model_copy(update={"trajectories": trajectories})


def roll(
    policy: TinyPolicy, switches: Objective, steps: tuple[int, ...] = STEPS, first_seed: int = 0
) -> Rollout:
    recording = Recording(
        frozenset({0, 2, 4}), steps, switches.token_mask == "unknown", switches.consistency is not None
    )
    seeds = list(range(first_seed, first_seed + len(TEXTS)))
    return generate(policy, TEXTS, seeds, 6, switches.guidance.rollout, recording=recording)


def rows_of(
    policy: TinyPolicy, rollout: Rollout, switches: Objective, steps: tuple[int, ...] = STEPS
) -> list[Rows]:
    fresh = draw_fresh(policy, rollout, switches, steps)
    return [build_rows(policy, rollout, step, switches, fresh) for step in rollout.steps]


def gradient(
    policy: TinyPolicy,
    rollout: Rollout,
    rows: list[Rows],
    switches: Objective,
    advantage: Tensor = ADVANTAGE,
    reference: TinyPolicy | None = None,
    old: list[Tensor] | None = None,
) -> tuple[Tensor, list[Terms]]:
    """Return the flat gradient of the loss over backbone parameters, and the terms."""
    keeps = [consistency_mask(step, rollout.tokens, switches.consistency) for step in rollout.steps]
    pairs = len(rollout.steps[0].trajectories.steps)
    totals = Totals(
        sum(int(keep.sum()) for keep in keeps) * pairs, sum(keep.numel() for keep in keeps) * pairs
    )
    policy.zero_grad()
    terms = []
    for number, (step, row, keep) in enumerate(zip(rollout.steps, rows, keeps, strict=True)):
        term = step_terms(
            policy,
            reference or policy,
            switches,
            rollout,
            step,
            row,
            keep,
            advantage,
            totals,
            None if old is None else old[number],
        )
        term.loss.backward()
        terms.append(term)
    parameters = [p for p in policy.backbone_parameters() if p.grad is not None]
    return torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).clone(), terms


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_every_pair_has_weight_one(variant: str) -> None:
    policy, switches = make_policy(), objective(**VARIANTS[variant])
    rollout = roll(policy, switches)
    for step, rows in zip(rollout.steps, rows_of(policy, rollout, switches), strict=True):
        tokens = step.index.numel()
        per_pair = torch.zeros(tokens, 8).index_put((rows.token, rows.step), rows.weight, accumulate=True)
        torch.testing.assert_close(per_pair[:, list(STEPS)], torch.ones(tokens, 3))
        assert per_pair.sum() == pytest.approx(3 * tokens)
        kl = torch.zeros(tokens, 8).index_put(
            (rows.token[: len(rows.kl_weight)], rows.step[: len(rows.kl_weight)]),
            rows.kl_weight,
            accumulate=True,
        )
        torch.testing.assert_close(kl[:, list(STEPS)], torch.ones(tokens, 3))


@pytest.mark.parametrize("guidance", [{}, {"guidance": {"rollout": 3.0, "logprob": "guided"}}])
@pytest.mark.parametrize("variant", ["grpo", "frozen_head", "frozen_head_committed", "mte", "released"])
def test_ratio_is_one_on_the_first_inner_epoch(variant: str, guidance: dict[str, Any]) -> None:
    policy, switches = make_policy(), objective(**VARIANTS[variant], **guidance)
    rollout = roll(policy, switches)
    _, terms = gradient(policy, rollout, rows_of(policy, rollout, switches), switches)
    assert max(term.ratio_deviation for term in terms) <= 1e-5
    # and it is a real comparison: another policy has another ratio
    _, other = gradient(make_policy(1), rollout, rows_of(policy, rollout, switches), switches)
    assert max(term.ratio_deviation for term in other) > 1e-2


def test_loss_value_at_ratio_one_is_minus_the_mean_advantage_plus_kl() -> None:
    policy, reference, switches = make_policy(), make_policy(1), objective(beta=0.5)
    rollout = roll(policy, switches)
    rows = rows_of(policy, rollout, switches)
    _, terms = gradient(policy, rollout, rows, switches, reference=reference)
    loss, kl = sum(float(term.loss.detach()) for term in terms), sum(term.kl for term in terms)
    assert kl > 0
    assert loss == pytest.approx(-float(ADVANTAGE.mean()) + 0.5 * kl, abs=1e-5)


def test_own_gradient_is_the_score_function_gradient() -> None:
    """Independent: loop over steps and tokens, torch.distributions.Normal on the kernel written out by hand."""
    policy, switches = make_policy(), objective(beta=0.0)
    rollout = roll(policy, switches)
    ours, _ = gradient(policy, rollout, rows_of(policy, rollout, switches), switches)

    policy.zero_grad()
    total = torch.zeros(())
    pairs = 0
    sigmas = torch.linspace(1, 0, 9)
    for step in rollout.steps:
        z = policy.backbone(step.tokens, step.known, rollout.condition)
        assert step.trajectories.states is not None
        assert step.trajectories.next_states is not None
        for number, t in enumerate(STEPS):
            sigma, dt = float(sigmas[t]), -0.125
            std = 0.7 * math.sqrt(sigma / (1 - sigma))
            for image in range(len(TEXTS)):
                x = step.trajectories.states[number, image]
                picked = z[image, step.index[image]]
                v = policy.head(x, policy.transition.times[t].expand(len(x)), picked)
                mean = x * (1 + std**2 * dt / (2 * sigma)) + v * (1 + std**2 * (1 - sigma) / (2 * sigma)) * dt
                normal = torch.distributions.Normal(mean, std * math.sqrt(-dt))
                total = (
                    total
                    + ADVANTAGE[image] * normal.log_prob(step.trajectories.next_states[number, image]).sum()
                )
                pairs += len(x)
    (-total / pairs).backward()
    theirs = torch.cat([p.grad.flatten() for p in policy.backbone_parameters() if p.grad is not None])
    torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=1e-6)


def test_bridged_gradient_is_advantage_weighted_velocity_matching() -> None:
    """Rao-Blackwell: the gradient equals that of sum A w_t |v - (eps - x0)|^2, w_t = (v-factor / scale)^2 / 2."""
    policy, switches = make_policy(), objective(**VARIANTS["bridged"], beta=0.0)
    rollout = roll(policy, switches)
    rows = rows_of(policy, rollout, switches)
    ours, _ = gradient(policy, rollout, rows, switches)

    policy.zero_grad()
    total = torch.zeros(())
    tokens = 0
    sigmas = torch.linspace(1, 0, 9)
    for step, row in zip(rollout.steps, rows, strict=True):
        z = take(policy.backbone(step.tokens, step.known, rollout.condition), step.index).flatten(0, 1)
        x0 = take(rollout.tokens, step.index).flatten(0, 1)[row.token]
        sigma = sigmas[row.step][:, None]
        eps = (row.state - (1 - sigma) * x0) / sigma
        velocity = policy.head(row.state, policy.transition.times[row.step], z[row.token])
        std = 0.7 * (sigma / (1 - sigma)).sqrt()
        factor = (1 + std**2 * (1 - sigma) / (2 * sigma)) * 0.125 / (std * math.sqrt(0.125))
        error = 0.5 * factor**2 * (velocity - (eps - x0)) ** 2
        gain = ADVANTAGE[row.token // step.index.shape[1]]
        total = total + (gain * error.sum(-1) / switches.trajectories).sum()
        tokens += step.index.numel()
    (total / (tokens * len(STEPS))).backward()
    theirs = torch.cat([p.grad.flatten() for p in policy.backbone_parameters() if p.grad is not None])
    torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=1e-6)


def test_bridges_start_and_end_at_the_committed_token() -> None:
    policy, switches = make_policy(), many(200)
    rollout = roll(policy, switches)
    step, rows = rollout.steps[1], rows_of(policy, rollout, switches)[1]
    x0 = take(rollout.tokens, step.index).flatten(0, 1)
    for t in STEPS:  # E[x_t] = (1 - sigma) x0, std sigma, over the S bridges of a token
        sigma = 1 - t / 8
        states = rows.state[(rows.step == t) & (rows.token == 5)]
        assert len(states) == 200
        error = (states.mean(0) - (1 - sigma) * x0[5]).abs().max()
        assert float(error) < 4.5 * sigma / math.sqrt(200)
        assert float(states.std(0).mean()) == pytest.approx(sigma, rel=0.1)


def test_rao_blackwell_is_the_mean_of_sampled_bridges_with_less_noise() -> None:
    policy, switches = make_policy(), many(400)
    rollout = roll(policy, switches)
    closed, _ = gradient(policy, rollout, rows_of(policy, rollout, switches), switches)
    sampled_switches = switches.model_copy(update={"rao_blackwell": False})
    sampled, _ = gradient(policy, rollout, rows_of(policy, rollout, sampled_switches), sampled_switches)
    # same states, only the next state is drawn: unbiased, so close at S = 400 and equal in direction
    assert float(torch.cosine_similarity(closed, sampled, dim=0)) > 0.97
    few = switches.model_copy(update={"trajectories": 1})
    draws = {True: [], False: []}
    for rao_blackwell, found in draws.items():
        for seed in range(12):
            one = few.model_copy(update={"rao_blackwell": rao_blackwell})
            redrawn = Rollout(**{**rollout.__dict__, "seeds": tuple(1000 + 10 * seed + i for i in range(4))})
            found.append(gradient(policy, redrawn, rows_of(policy, redrawn, one), one)[0])
    spread = {key: torch.stack(found).var(0).sum() for key, found in draws.items()}
    assert float(spread[True]) < 0.85 * float(spread[False])


def _resampled_draws(samples: int, count: int) -> Tensor:
    policy = make_policy()
    switches = objective(
        trajectory_source="resampled",
        trajectories=samples,
        resample_condition="current",
        include_rollout=False,
        beta=0.0,
    )
    rollout = roll(policy, switches)
    found = []
    for number in range(count):  # a fixed rollout, only the fresh trajectories are redrawn
        redrawn = Rollout(
            **{**rollout.__dict__, "seeds": tuple(5000 + 10 * number + i for i in range(len(TEXTS)))}
        )
        found.append(gradient(policy, redrawn, rows_of(policy, redrawn, switches), switches)[0])
    return torch.stack(found).double()


def test_resampled_gradient_has_mean_zero_and_its_trace_falls_as_one_over_s() -> None:
    """At ratio 1 the expected score of fresh trajectories under the z that drew them is zero."""
    draws = {samples: _resampled_draws(samples, 60) for samples in (1, 4)}
    traces = {samples: float(values.var(0).sum()) for samples, values in draws.items()}
    # 60 draws: the trace's relative error is about .2 at worst; 1/S predicts a ratio of 4
    assert 2.8 < traces[1] / traces[4] < 5.7
    for values in draws.values():
        # |mean|^2 of n draws of mean zero has expectation trace / n; test every 50th coordinate too
        error = values.std(0) / math.sqrt(len(values))
        standard = (values.mean(0) / error)[error > 1e-12]
        share = float((standard.abs() < 3).double().mean())
        assert share > 0.985  # normal: .997, t with correlated coordinates: a little less
        assert float(values.mean(0).square().sum()) < 1.6 * float(values.var(0).sum()) / len(values)


def test_commit_draws_scored_under_another_z_have_a_mean() -> None:
    """As released: another z scores, so the term does not vanish on average (a distillation term)."""
    policy = make_policy()
    switches = objective(
        trajectory_source="resampled",
        trajectories=8,
        resample_condition="commit",
        include_rollout=False,
        beta=0.0,
    )
    rollout = roll(policy, switches)
    found = []
    for number in range(20):
        redrawn = Rollout(**{**rollout.__dict__, "seeds": tuple(7000 + 10 * number + i for i in range(4))})
        found.append(gradient(policy, redrawn, rows_of(policy, redrawn, switches), switches)[0])
    values = torch.stack(found).double()
    assert float(values.mean(0).square().sum()) > 5 * float(values.var(0).sum()) / len(values)


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_head_rows_are_only_those_in_the_loss(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, switches = make_policy(), objective(**VARIANTS[variant])
    rollout = roll(policy, switches)
    rows = rows_of(policy, rollout, switches)
    seen = []
    head = policy.head
    monkeypatch.setattr(policy, "head", lambda x, t, z: seen.append(len(x)) or head(x, t, z))
    gradient(policy, rollout, rows, switches)
    assert sum(seen) == sum(len(r.token) + len(r.kl_weight) for r in rows)
    unknown = 4 * (16 + 14 + 8)
    committed = 4 * (1 + 3 + 4)
    expected = {
        "grpo": unknown,
        "frozen_head": unknown,
        "frozen_head_committed": committed,
        "mte": 4 * unknown,
        "bridged": 4 * committed,
    }
    if variant in expected:
        assert sum(len(r.token) for r in rows) == 3 * expected[variant]


def test_replaced_trajectories_are_not_scored_without_a_kl_term() -> None:
    policy, switches = make_policy(), objective(**VARIANTS["released"], beta=0.0)
    rollout = roll(policy, switches)
    for rows in rows_of(policy, rollout, switches):
        assert (rows.weight > 0).all()


def test_inner_epochs_of_a_bridge_clip_the_token_not_the_pair() -> None:
    policy = make_policy()
    switches = objective(**VARIANTS["bridged"], beta=0.0, inner_epochs=2, clip_range=0.2)
    rollout = roll(policy, switches)
    rows = rows_of(policy, rollout, switches)
    _, first = gradient(policy, rollout, rows, switches)
    # shift the old log-probs of one token by +-1 on alternating pairs: its mean change stays 0, nothing clips
    old = [term.log_prob.clone() for term in first]
    mine = (rows[2].token == 3).nonzero().flatten()
    old[2][mine] += torch.tensor([1.0, -1.0]).repeat(len(mine) // 2)
    _, terms = gradient(policy, rollout, rows, switches, old=old)
    assert sum(term.clipped for term in terms) == 0
    # a common shift of -1 makes the token's ratio e: beyond 1.2, clipped where the advantage is positive (image 0)
    old[2] = first[2].log_prob.clone()
    old[2][mine] -= 1.0
    _, terms = gradient(policy, rollout, rows, switches, old=old)
    assert terms[2].clipped == len(mine)
