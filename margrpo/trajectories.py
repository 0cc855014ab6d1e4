"""The transitions that estimate the policy at one AR step: the rollout's own, resampled or bridged ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from margrpo import noise
from margrpo.config import Objective
from margrpo.diffusion import Gaussian
from margrpo.policies.base import Policy
from margrpo.rollout import RecordedStep, Rollout, Trajectories, denoise, take


@dataclass(frozen=True)
class Rows:
    """M transitions to score, flat; the first `recorded` are the rollout's own.

    Attributes:
        token: int64 [M], which of the B * n tokens. step: int64 [M], the denoising step.
        state: [M, C]. target: the next state [M, C] (std 0), or its distribution (Rao-Blackwell).
        weight: [M], share in the estimate of its (token, step) pair; sums to 1 per pair.
        kl_weight: [K <= M], the same for the KL term, which the first K rows enter.
        log_prob: [recorded], what the rollout recorded.
    """

    token: Tensor
    step: Tensor
    state: Tensor
    target: Gaussian
    weight: Tensor
    kl_weight: Tensor
    log_prob: Tensor

    @property
    def recorded(self) -> int:
        """How many rows are the rollout's own."""
        return len(self.log_prob)


@dataclass(frozen=True)
class Fresh:
    """S fresh trajectories of every token under the z that committed it, and who is uncertain.

    Attributes:
        trajectories: of the tokens [B, S * L], S-major.
        uncertain: bool [B, L].
    """

    trajectories: Trajectories
    uncertain: Tensor


def token_uncertainty(final: Tensor) -> Tensor:
    """Return [B, n]: the std over the S samples [B, S, n, C] of a token, averaged over channels."""
    return final.std(dim=1, unbiased=False).mean(-1)


def most_uncertain(score: Tensor, fraction: float) -> Tensor:
    """Return bool [B, L]: the round(fraction * L) tokens per image of the highest uncertainty [B, L]."""
    chosen = score.topk(round(fraction * score.shape[1]), dim=1).indices
    return torch.zeros_like(score, dtype=torch.bool).scatter(1, chosen, True)


def uncertain_tokens(final: Tensor, fraction: float) -> Tensor:
    """Return bool [B, L]: the round(fraction * L) tokens per image whose S samples [B, S, L, C] differ most."""
    return most_uncertain(token_uncertainty(final), fraction)


@torch.no_grad()
def draw_fresh(
    policy: Policy, rollout: Rollout, objective: Objective, steps: tuple[int, ...]
) -> Fresh | None:
    """Return fresh trajectories under the commit z where the objective asks for them, else None."""
    commits = objective.trajectory_source == "resampled" and objective.resample_condition == "commit"
    if objective.uncertain_fraction == 1.0 and not commits:
        return None
    images, length, channels = rollout.tokens.shape
    samples = objective.trajectories
    everything = torch.arange(length, device=rollout.tokens.device).expand(images, length)
    null_z = rollout.commit_null_z if objective.guidance.logprob == "guided" else None
    trajectories = resample(
        policy, rollout, objective, "fresh", rollout.commit_z, null_z, everything, steps if commits else ()
    )
    final = trajectories.final.view(images, samples, length, channels)
    return Fresh(trajectories, uncertain_tokens(final, objective.uncertain_fraction))


@torch.no_grad()
def build_rows(
    policy: Policy, rollout: Rollout, step: RecordedStep, objective: Objective, fresh: Fresh | None
) -> Rows:
    """Return the transitions that estimate the policy for the tokens of one recorded AR step."""
    own = _own_rows(step)
    if objective.trajectory_source == "rollout":
        return own
    chosen = (
        take(fresh.uncertain, step.index)
        if fresh is not None
        else torch.ones_like(step.index, dtype=torch.bool)
    )
    if objective.trajectory_source == "bridged":
        others = _subset(own, ~chosen.flatten()[own.token])
        return _concatenate(others, _bridged_rows(policy, rollout, step, objective, chosen))
    extra = _resampled_rows(policy, rollout, step, objective, fresh, chosen)
    share = 1.0 / (objective.trajectories + 1) if objective.include_rollout else 0.0
    weight = torch.where(chosen.flatten()[own.token], share, 1.0)
    own = replace(own, weight=weight)
    if objective.beta == 0.0:  # a replaced trajectory then enters no term: do not score it
        own = _subset(own, weight > 0)
    return _concatenate(own, extra)


def _own_rows(step: RecordedStep) -> Rows:
    trajectories = step.trajectories
    assert trajectories.states is not None
    assert trajectories.next_states is not None
    assert trajectories.log_prob is not None
    times, images, count, channels = trajectories.states.shape
    ones = torch.ones(times * images * count, device=step.index.device)
    return Rows(
        token=torch.arange(images * count, device=ones.device).repeat(times),
        step=_steps(trajectories.steps, images * count, ones.device),
        state=trajectories.states.reshape(-1, channels),
        target=_reached(trajectories.next_states.reshape(-1, channels)),
        weight=ones,
        kl_weight=ones,
        log_prob=trajectories.log_prob.flatten(),
    )


def _resampled_rows(
    policy: Policy,
    rollout: Rollout,
    step: RecordedStep,
    objective: Objective,
    fresh: Fresh | None,
    chosen: Tensor,
) -> Rows:
    """Return S fresh transitions per recorded denoising step of the chosen tokens (bool [B, n])."""
    image, column = chosen.nonzero(as_tuple=True)
    samples, (_, length, channels) = objective.trajectories, rollout.tokens.shape
    steps = step.trajectories.steps
    if objective.resample_condition == "commit":
        assert fresh is not None
        assert fresh.trajectories.states is not None
        assert fresh.trajectories.next_states is not None
        position = step.index[image, column]
        slots = torch.cat([position + sample * length for sample in range(samples)])
        states = fresh.trajectories.states[:, image.repeat(samples), slots]
        next_states = fresh.trajectories.next_states[:, image.repeat(samples), slots]
    else:
        null_z = step.null_z if objective.guidance.logprob == "guided" else None
        drawn = resample(
            policy, rollout, objective, f"fresh-{step.k}", step.z, null_z, step.index, steps, chosen
        )
        assert drawn.states is not None
        assert drawn.next_states is not None
        states, next_states = drawn.states[:, 0], drawn.next_states[:, 0]
    token = (image * step.index.shape[1] + column).repeat(samples)
    own_share = 1 if objective.include_rollout else 0
    weight = torch.full((len(steps) * len(token),), 1.0 / (samples + own_share), device=token.device)
    none = weight[:0]
    return Rows(
        token.repeat(len(steps)),
        _steps(steps, len(token), token.device),
        states.reshape(-1, channels),
        _reached(next_states.reshape(-1, channels)),
        weight,
        none,
        none,
    )


def resample(
    policy: Policy,
    rollout: Rollout,
    objective: Objective,
    purpose: str,
    z: Tensor,
    null_z: Tensor | None,
    index: Tensor,
    keep: tuple[int, ...],
    chosen: Tensor | None = None,
) -> Trajectories:
    """Draw S trajectories for tokens `index` [B, n] under z [B, n, D], S-major; of the chosen ones if given.

    The noise depends on the image's seed, `purpose`, the sample and the token alone.

    Returns trajectories of [B, S * n] tokens, or of [1, S * m] for m true entries of `chosen` (bool [B, n]).
    """
    _, length, channels = rollout.tokens.shape
    denoising, device = policy.transition.steps, index.device
    parts = []
    for sample in range(objective.trajectories):
        drawn = noise.normal(rollout.seeds, purpose, sample, (length, denoising + 1, channels)).to(device)
        picked = take(drawn, index)  # [B, n, T + 1, C]
        parts.append(picked if chosen is None else picked[chosen][None])
    if chosen is not None:
        z, null_z = z[chosen][None], None if null_z is None else null_z[chosen][None]
    x, *step_noise = torch.cat(parts, dim=1).unbind(2)
    z = z.repeat(1, objective.trajectories, 1)
    null_z = None if null_z is None else null_z.repeat(1, objective.trajectories, 1)
    return denoise(policy, z, null_z, objective.guidance.rollout, x, torch.stack(step_noise), keep)


def _bridged_rows(
    policy: Policy, rollout: Rollout, step: RecordedStep, objective: Objective, chosen: Tensor
) -> Rows:
    """Return S independent bridges per recorded denoising step from noise to the committed token.

    x_t diffuses the token X_k, the next state follows the true q(. | x_t, X_k): the pairs tie the estimate of
    log pi(X_k) to the rewarded token (an evidence lower bound, see docs in `objective`).
    """
    image, column = chosen.nonzero(as_tuple=True)
    position = step.index[image, column]
    samples, steps = objective.trajectories, step.trajectories.steps
    _, length, channels = rollout.tokens.shape
    shape = (samples, len(steps), 2, length, channels)
    drawn = noise.normal(rollout.seeds, "bridge", step.k, shape).to(position.device)
    pairs = drawn.permute(0, 4, 1, 2, 3, 5)[image, position]  # [m, S, t, 2, C]
    start, following = pairs.permute(3, 2, 1, 0, 4).reshape(2, -1, channels)  # t-major, then S, then token
    token = (image * step.index.shape[1] + column).repeat(len(steps) * samples)
    when = _steps(steps, len(image) * samples, position.device)
    x0 = rollout.tokens[image, position].repeat(len(steps) * samples, 1)
    state = policy.transition.diffuse(when, x0, start)
    target = policy.transition.bridge(when, state, x0, start)
    weight = torch.full((len(token),), 1.0 / samples, device=token.device)
    if not objective.rao_blackwell:
        target = _reached(target.sample(following))
    return Rows(token, when, state, target, weight, weight, weight[:0])


def _reached(next_state: Tensor) -> Gaussian:
    """Return the distribution of a next state that is known: no spread."""
    return Gaussian(next_state, next_state.new_zeros(len(next_state), 1))


def _steps(steps: tuple[int, ...], each: int, device: torch.device) -> Tensor:
    return torch.tensor(steps, device=device).repeat_interleave(each)


def _subset(own: Rows, keep: Tensor) -> Rows:
    """Return those of the rollout's own rows for which `keep` (bool [M]) holds."""
    target = Gaussian(own.target.mean[keep], own.target.std[keep])
    return Rows(
        own.token[keep],
        own.step[keep],
        own.state[keep],
        target,
        own.weight[keep],
        own.kl_weight[keep],
        own.log_prob[keep],
    )


def _concatenate(own: Rows, extra: Rows) -> Rows:
    """Put the rollout's own rows before the extra ones."""
    return Rows(
        torch.cat([own.token, extra.token]),
        torch.cat([own.step, extra.step]),
        torch.cat([own.state, extra.state]),
        Gaussian(
            torch.cat([own.target.mean, extra.target.mean]), torch.cat([own.target.std, extra.target.std])
        ),
        torch.cat([own.weight, extra.weight]),
        torch.cat([own.kl_weight, extra.kl_weight]),
        own.log_prob,
    )
