from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from margrpo.config import Objective
from margrpo.golden.nova_released import released_latents
from tests.policies.nova_support import load, record, score


@pytest.mark.parametrize("ddpm", [False, True])
@pytest.mark.parametrize("guidance", [{}, {"rollout": 3.0, "logprob": "guided"}])
@pytest.mark.parametrize("name", ["abs", "rope"])
def test_scoring_repeats_the_rollout(name: str, guidance: dict[str, Any], ddpm: bool) -> None:
    policy = load(name, ddpm)
    switches = Objective.model_validate({"guidance": guidance, "beta": 0.0})
    rollout, rows = record(policy, switches, images=8)
    _, terms = score(policy, policy, switches, rollout, rows, torch.ones(8))
    assert max(term.ratio_deviation for term in terms) < 5e-4  # float32 rounding over the smallest std
    squares = []
    for term, part in zip(terms, rows, strict=True):
        std = policy.transition.kernel(part.step, part.state, torch.zeros_like(part.state)).std
        constant = policy.channels * (std[:, 0].log() + 0.5 * math.log(2 * math.pi))
        squares.append(-2 * (term.log_prob + constant))
    z2 = torch.cat(squares).sum() / (torch.cat(squares).numel() * policy.channels)
    error = math.sqrt(2 / (torch.cat(squares).numel() * policy.channels))
    assert float(z2) == pytest.approx(1.0, abs=3 * error)


def test_scoring_under_the_released_condition_describes_another_distribution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = load()
    switches = Objective.model_validate({"beta": 0.0})
    rollout, rows = record(policy, switches, ar_steps=(2,))
    monkeypatch.setattr(
        policy,
        "backbone",
        lambda tokens, known, condition: released_latents(policy, condition["text"], tokens, known),
    )
    _, terms = score(policy, policy, switches, rollout, rows, torch.ones(4))
    assert max(term.ratio_deviation for term in terms) > 0.1


PROBED = [
    "text_embed.proj.weight",
    "text_embed.norm.bias",
    "mask_embed.bos_token",
    "mask_embed.mask_token",
    "video_encoder.blocks.0.attn.qkv.weight",
    "image_encoder.patch_embed.proj.weight",
    "image_encoder.blocks.0.mlp.fc1.weight",
    "image_encoder.blocks.1.norm2.weight",
    "image_decoder.blocks.0.norm1.proj.weight",
    "image_decoder.time_cond_embed.condition_proj.fc1.weight",
]
OBJECTIVES: dict[str, dict[str, Any]] = {
    "rollout": {"trainable": "all", "beta": 5.0},
    "released_kl": {"trainable": "all", "beta": 50.0, "kl": "released"},
    "guided": {"trainable": "all", "beta": 1.0, "guidance": {"rollout": 2.0, "logprob": "guided"}},
    "resampled": {
        "trainable": "all",
        "trajectory_source": "resampled",
        "trajectories": 2,
        "resample_condition": "current",
        "include_rollout": True,
    },
    "bridged": {
        "trainable": "all",
        "token_mask": "committed",
        "trajectory_source": "bridged",
        "trajectories": 2,
        "rao_blackwell": True,
        "beta": 5.0,
    },
}


@pytest.mark.parametrize(
    ("name", "kind", "ddpm"),
    [("abs", kind, False) for kind in OBJECTIVES] + [("rope", "rollout", False), ("abs", "bridged", True)],
)
def test_gradient_is_that_of_finite_differences(name: str, kind: str, ddpm: bool) -> None:
    policy = load(name, ddpm)
    switches = Objective.model_validate(OBJECTIVES[kind])
    rollout, rows = record(policy, switches, ar_steps=(1, 3), images=2)
    policy = policy.double()
    reference = copy.deepcopy(policy).requires_grad_(False)
    for parameter in reference.parameters():
        parameter.mul_(0.98)
    advantage = torch.tensor([1.0, -0.7], dtype=torch.float64)
    loss, terms = score(policy, reference, switches, rollout, rows, advantage)
    loss.backward()
    # the ratio is 1 by construction: to differ, the old log-probs must stay where they are
    old = [term.log_prob for term in terms]
    parameters = dict(policy.transformer.named_parameters())
    checked = 0
    for key in PROBED:
        gradient = parameters[key].grad
        assert gradient is not None
        for place in (int(gradient.abs().argmax()), gradient.numel() // 3):
            flat = parameters[key].data.view(-1)
            values, before = [], float(flat[place])
            for shift in (1e-6, -1e-6):
                flat[place] = before + shift
                with torch.no_grad():
                    values.append(score(policy, reference, switches, rollout, rows, advantage, old)[0])
            flat[place] = before
            numeric = float(values[0] - values[1]) / 2e-6
            assert float(gradient.view(-1)[place]) == pytest.approx(numeric, rel=1e-5, abs=1e-7)
            checked += abs(numeric) > 1e-4
    assert checked >= len(PROBED)  # the comparison is not one of zeros


def test_a_large_beta_adds_beta_times_the_kl() -> None:
    policy = load()
    reference = copy.deepcopy(policy).requires_grad_(False)
    for parameter in reference.parameters():
        parameter.mul_(0.98)
    plain = Objective.model_validate({"beta": 0.0})
    rollout, rows = record(policy, plain, ar_steps=(2,))
    step, part, advantage = rollout.steps[0], rows[0], torch.tensor([1.0, -1.0, 0.5, 2.0])
    without, _ = score(policy, reference, plain, rollout, rows, advantage)
    heavy = Objective.model_validate({"beta": 100.0})
    with_kl, _ = score(policy, reference, heavy, rollout, rows, advantage)
    # by hand: (difference of velocities * factor)^2 / (2 s^2), summed over channels, averaged over tokens
    outputs = []
    for model in (policy, reference):
        with torch.no_grad():
            z = model.backbone(step.tokens, step.known, model.prefill(rollout.condition))
            z = z.take_along_dim(step.index[..., None], 1).flatten(0, 1)[part.token]
            outputs.append(model.head(part.state, model.transition.times[part.step], z))
    zero = torch.zeros_like(part.state)
    unit = policy.transition.kernel(part.step, zero, zero + 1)
    kl = 0.5 * ((outputs[0] - outputs[1]) * unit.mean / unit.std).square().sum()
    assert float((with_kl - without).detach()) == pytest.approx(
        100 * float(kl) / step.index.numel(), rel=1e-4
    )
    assert float(kl) > 0.1


def test_head_rows_are_those_of_tokens_in_the_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = load()
    switches = Objective.model_validate({"token_mask": "committed", "beta": 0.0})
    rollout, rows = record(policy, switches, ar_steps=(1,))
    committed = policy.ar_schedule(4)[1]
    counted: list[int] = []
    head = policy.transformer.image_decoder.forward
    monkeypatch.setattr(
        policy.transformer.image_decoder,
        "forward",
        lambda x, t, z: counted.append(len(x)) or head(x, t, z),
    )
    score(policy, policy, switches, rollout, rows, torch.ones(4))
    assert counted == [4 * committed * len(policy.transition.scored)]
