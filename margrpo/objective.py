"""The loss: group-relative advantages, one policy term with switches, a KL term (arXiv 2604.06966).

    loss = -(policy term - beta * KL)

summed over channels, averaged over the selected (token, denoising step) pairs under the token mask.

The bridged estimate averages over diffusion noise eps: with x_t = diffuse(X_k, eps) and the next state from
the true q(x_{t-1} | x_t, X_k) it scores E[log pi(x_{t-1} | x_t)]: an evidence-lower-bound surrogate of
log pi(X_k), biased, of low variance, tied to the rewarded token. At negative advantage it pushes a lower
bound down, which clipping and the KL term must watch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from margrpo.config import Objective
from margrpo.diffusion import Gaussian
from margrpo.policies.base import Condition, Policy
from margrpo.prefills import Prefills
from margrpo.rollout import RecordedStep, Rollout, guided_head, take
from margrpo.trajectories import Rows


def advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return (r - mean) / (std + 1e-4) within each group, unbiased std (GRPO; released code).

    Args:
        rewards: [B]; an image whose reward is NaN gets 0 and doesn't count in its group.
        groups: int64 [B]; images of one prompt slot share an id.

    Raises:
        ValueError: a group of one image, whose std is undefined.
    """
    ids, member = groups.unique(return_inverse=True)
    size = torch.bincount(member).to(rewards)
    if (size < 2).any():
        raise ValueError(
            f"groups: ids {ids[size < 2].tolist()} have one image; allowed: at least 2 per group"
        )
    known = ~rewards.isnan()
    if not known.all():
        known &= torch.bincount(member[known], minlength=len(ids))[member] >= 2
        result = torch.zeros_like(rewards)
        if known.any():
            result[known] = advantages(rewards[known], groups[known])
        return result
    mean = rewards.new_zeros(len(ids)).index_add(0, member, rewards) / size
    centred = rewards - mean[member]
    variance = rewards.new_zeros(len(ids)).index_add(0, member, centred.square()) / (size - 1)
    return centred / (variance.sqrt()[member] + 1e-4)


def consistency_mask(step: RecordedStep, final: Tensor, threshold: float | None) -> Tensor:
    """Return bool [B, n]: tokens whose head sample moved towards the final image, or that are committed now.

    Kept where cos(x_k, final) - cos(x_{k-1}, final) > threshold, x_k the full head sample of AR step k;
    at k = 0 there is nothing to compare and all are kept. `None` keeps all.

    Args:
        final: [B, L, C], the final tokens.
    """
    keep = torch.ones_like(step.index, dtype=torch.bool)
    if threshold is None or step.k == 0:
        return keep
    keep[:, step.committed :] = (approach(step, final) > threshold)[:, step.committed :]
    return keep


def approach(step: RecordedStep, final: Tensor) -> Tensor:
    """Return cos(x_k, final) - cos(x_{k-1}, final) [B, n]: how much closer AR step k came to the final token.

    Args:
        step: recorded with consistency, k > 0. final: [B, L, C].
    """
    assert step.previous is not None
    target = take(final, step.index)
    now = torch.cosine_similarity(step.trajectories.final, target, dim=-1)
    return now - torch.cosine_similarity(step.previous, target, dim=-1)


def surrogate(change: Tensor, advantage: Tensor, clip_range: float | None) -> Tensor:
    """Return ratio * advantage, ratio = exp(change in log-prob), clipped as in PPO where asked."""
    ratio = change.exp()
    if clip_range is None:
        return ratio * advantage
    return torch.minimum(ratio * advantage, ratio.clamp(1 - clip_range, 1 + clip_range) * advantage)


def kl_divergence(kind: str, policy: Gaussian, reference: Gaussian, target: Gaussian) -> Tensor:
    """Return the KL term [M] of transitions to the reference's, summed over channels.

    `gaussian` is exact; `released` is exp(d) - d - 1 on the difference of means (not scaled by the variance);
    `k3` is the same expression of the log-ratio at the reached state.
    """
    if kind == "gaussian":
        return policy.kl(reference).sum(-1)
    if kind == "released":
        difference = reference.mean - policy.mean
        return (difference.exp() - difference - 1).sum(-1)
    log_ratio = (reference.expected_log_prob(target) - policy.expected_log_prob(target)).sum(-1)
    return log_ratio.exp() - log_ratio - 1


@dataclass(frozen=True)
class Totals:
    """Numbers of (token, denoising step) pairs over which the two terms are averaged."""

    policy: int
    kl: int


@dataclass(frozen=True)
class Terms:
    """What one AR step contributes: loss (with graph), and sums for the logs (without)."""

    loss: Tensor
    kl: float
    log_prob: Tensor
    ratio_deviation: float
    clipped: float
    units: int


def anchor_of(
    reference: Policy,
    objective: Objective,
    rollout: Rollout,
    step: RecordedStep,
    rows: Rows,
    prefills: Prefills | None = None,
) -> Gaussian | None:
    """Return the reference's transitions at the rows of the KL term, None if there is no such term.

    They are the same in every inner epoch.
    """
    scored = len(rows.kl_weight)
    if objective.beta == 0 or not scored:
        return None
    with torch.no_grad():
        return _score(reference, objective, rollout, step, rows, scored, prefills)


def step_terms(
    policy: Policy,
    reference: Policy | Gaussian | None,
    objective: Objective,
    rollout: Rollout,
    step: RecordedStep,
    rows: Rows,
    keep: Tensor,
    advantage: Tensor,
    totals: Totals,
    old_log_prob: Tensor | None = None,
    prefills: Prefills | None = None,
) -> Terms:
    """Return the contribution of one recorded AR step to the loss.

    Args:
        reference: the base policy, or what `anchor_of` returned.
        rows: the transitions to score. keep: bool [B, n], tokens in the policy term. advantage: [B].
        old_log_prob: [M], log-probs before the first inner epoch; None on that epoch, where the ratio is 1.
        prefills: shared by the AR steps of a micro-batch, whose gradient then needs its `backward`; None: this
            AR step computes its own, and `loss.backward()` is all.
    """
    count = step.index.shape[1]
    kernel = _score(policy, objective, rollout, step, rows, len(rows.token), prefills)
    log_prob = kernel.expected_log_prob(rows.target).sum(-1)
    change = log_prob - (log_prob.detach() if old_log_prob is None else old_log_prob)

    gain = advantage[rows.token // count]
    kept = keep.flatten()[rows.token]
    if objective.trajectory_source == "bridged" and old_log_prob is not None:
        # A token's ratio is exp(mean change over its pairs): clipping must act on the token, not on pairs.
        pairs = len(step.trajectories.steps)
        change = change.new_zeros(keep.numel()).index_add(0, rows.token, change * rows.weight / pairs)[
            rows.token
        ]
    policy_sum = (surrogate(change, gain, objective.clip_range) * rows.weight * kept).sum()

    kl_sum = policy_sum.new_zeros(())
    scored = len(rows.kl_weight)
    anchor = reference
    if isinstance(anchor, Policy):
        anchor = anchor_of(anchor, objective, rollout, step, rows, prefills)
    if objective.beta > 0 and anchor is not None:
        head = Gaussian(kernel.mean[:scored], kernel.std[:scored])
        target = Gaussian(rows.target.mean[:scored], rows.target.std[:scored])
        kl_sum = (kl_divergence(objective.kl, head, anchor, target) * rows.kl_weight).sum()

    loss = -(policy_sum / totals.policy - objective.beta * kl_sum / totals.kl)
    clipped, units = 0.0, 0
    if objective.clip_range is not None:
        with torch.no_grad():
            ratio, free = change.exp(), surrogate(change, gain, None)
            clipped = float((surrogate(change, gain, objective.clip_range) < free).sum())
            units = len(ratio)
    return Terms(
        loss,
        float(kl_sum.detach()) / totals.kl,
        log_prob.detach(),
        _ratio_deviation(objective, log_prob.detach(), rows),
        clipped,
        units,
    )


def _score(
    policy: Policy,
    objective: Objective,
    rollout: Rollout,
    step: RecordedStep,
    rows: Rows,
    count: int,
    prefills: Prefills | None,
) -> Gaussian:
    """Return the policy's transitions at the first `count` rows under its current z."""
    z = _condition(policy, rollout.condition, step, prefills)[rows.token[:count]]
    null_z = None
    if objective.guidance.logprob == "guided":
        assert rollout.null is not None
        null_z = _condition(policy, rollout.null, step, prefills)[rows.token[:count]]
    state, when = rows.state[:count], rows.step[:count]
    output = guided_head(policy, state, when, z, null_z, objective.guidance.rollout)
    return policy.transition.kernel(when, state, output)


def _condition(policy: Policy, condition: Condition, step: RecordedStep, prefills: Prefills | None) -> Tensor:
    """Return z [B * n, D] of the step's tokens."""
    ready = policy.prefill(condition) if prefills is None else prefills.get(policy, condition)
    z = policy.backbone(step.tokens, step.known, ready)
    return take(z, step.index).flatten(0, 1)


def _ratio_deviation(objective: Objective, log_prob: Tensor, rows: Rows) -> float:
    """Return max |ratio - 1| against the rollout's record, where the same distribution drew and scores."""
    same = objective.guidance.rollout == 1.0 or objective.guidance.logprob == "guided"
    if not same or rows.recorded == 0:
        return 0.0
    return float((log_prob[: rows.recorded] - rows.log_prob).exp().sub(1).abs().max())
