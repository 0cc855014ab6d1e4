"""The K x T generation of images, with what the update needs recorded."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from margrpo import noise
from margrpo.policies.base import Condition, Policy


@dataclass(frozen=True)
class Trajectories:
    """Head trajectories of n tokens of each image.

    Attributes:
        final: [B, n, C], the tokens they end in.
        steps: the recorded denoising steps t.
        states: [t, B, n, C], the state before each recorded step; `next_states` the one after.
        log_prob: [t, B, n], summed over channels, under the distribution that drew them.
    """

    final: Tensor
    steps: tuple[int, ...] = ()
    states: Tensor | None = None
    next_states: Tensor | None = None
    log_prob: Tensor | None = None

    def select(self, images: slice) -> Trajectories:
        """Return the trajectories of some images."""
        if self.states is None or self.next_states is None or self.log_prob is None:
            return Trajectories(self.final[images])
        recorded = self.states[:, images], self.next_states[:, images], self.log_prob[:, images]
        return Trajectories(self.final[images], self.steps, *recorded)


@dataclass(frozen=True)
class RecordedStep:
    """One AR step k of a rollout.

    Attributes:
        k: its index.
        tokens, known: [B, L, C] and bool [B, L], the backbone's input at this step.
        index: int64 [B, n], the tokens under the token mask; the first `committed` columns are written here.
        trajectories: those the head drew for `index` at this step.
        z, null_z: [B, n, D], the conditions that drew them (no gradient; null_z under guidance).
        previous: [B, n, C], the same tokens' samples at AR step k - 1 (None at k = 0 or if not needed).
    """

    k: int
    tokens: Tensor
    known: Tensor
    index: Tensor
    committed: int
    trajectories: Trajectories
    z: Tensor
    null_z: Tensor | None
    previous: Tensor | None

    def select(self, images: slice) -> RecordedStep:
        """Return the record of some images."""
        return replace(
            self,
            tokens=self.tokens[images],
            known=self.known[images],
            index=self.index[images],
            trajectories=self.trajectories.select(images),
            z=self.z[images],
            null_z=_optional(self.null_z, images),
            previous=_optional(self.previous, images),
        )


@dataclass(frozen=True)
class Recording:
    """What `generate` keeps: AR steps, denoising steps, and whose trajectories."""

    ar_steps: Collection[int] = ()
    denoising_steps: tuple[int, ...] = ()
    unknown: bool = False
    consistency: bool = False

    def needs_all(self, k: int) -> bool:
        """Return whether the head must run on every unknown token at AR step k."""
        compares = self.consistency and k + 1 in self.ar_steps
        return self.unknown and (k in self.ar_steps or compares)


@dataclass(frozen=True)
class Rollout:
    """Generated images and their record.

    Attributes:
        tokens: [B, L, C], the final tokens. commit_z: [B, L, D], the z that wrote each token.
        condition, null: the prompts' condition and, under guidance, the null prompt's (before `prefill`).
        seeds: one per image. steps: the recorded AR steps.
    """

    tokens: Tensor
    commit_z: Tensor
    commit_null_z: Tensor | None
    condition: Condition
    null: Condition | None
    seeds: tuple[int, ...]
    steps: list[RecordedStep] = field(default_factory=list)

    def select(self, images: slice) -> Rollout:
        """Return the rollout of some images."""
        return Rollout(
            self.tokens[images],
            self.commit_z[images],
            _optional(self.commit_null_z, images),
            self.condition.select(images),
            None if self.null is None else self.null.select(images),
            self.seeds[images],
            [step.select(images) for step in self.steps],
        )


def take(values: Tensor, index: Tensor) -> Tensor:
    """Return values[b, index[b, j]] as [B, n, ...] for values [B, L, ...] and index [B, n]."""
    return values[torch.arange(len(index), device=index.device)[:, None], index]


def guided_head(
    policy: Policy, x: Tensor, step: Tensor | int, z: Tensor, null_z: Tensor | None, scale: float
) -> Tensor:
    """Return the head's output [M, C or 2C], at least float32, for states x [M, C] at `step`.

    It is guided where null_z is given.
    """
    times = policy.transition.times.to(x.device)[step].expand(len(x))
    if null_z is None:
        return _wide(policy.head(x, times, z))
    both = _wide(policy.head(torch.cat([x, x]), torch.cat([times, times]), torch.cat([z, null_z])))
    conditional, null = both.chunk(2)
    return policy.transition.guide(conditional, null, scale)


def denoise(
    policy: Policy,
    z: Tensor,
    null_z: Tensor | None,
    scale: float,
    x: Tensor,
    step_noise: Tensor | None,
    keep: Sequence[int] = (),
) -> Trajectories:
    """Run the head from x to a token, recording the steps in `keep`.

    Args:
        z, null_z: [B, n, D]. x: [B, n, C], standard normal. scale: CFG scale, used with null_z.
        step_noise: [T, B, n, C]; None follows the noiseless ODE.
    """
    shape = x.shape
    z, x = z.flatten(0, 1), x.flatten(0, 1)
    null_z = None if null_z is None else null_z.flatten(0, 1)
    states, next_states, log_probs = [], [], []
    for step in range(policy.transition.steps):
        output = guided_head(policy, x, step, z, null_z, scale)
        if step_noise is None:
            x = policy.transition.ode(step, x, output)
            continue
        kernel = policy.transition.kernel(step, x, output)
        x_next = kernel.sample(step_noise[step].flatten(0, 1))
        if step in keep:
            states.append(x.view(shape))
            next_states.append(x_next.view(shape))
            log_probs.append(kernel.log_prob(x_next).sum(-1).view(shape[:2]))
        x = x_next
    final = x.view(shape)
    if not states:
        return Trajectories(final)
    return Trajectories(
        final, tuple(sorted(keep)), torch.stack(states), torch.stack(next_states), torch.stack(log_probs)
    )


@torch.no_grad()
def generate(
    policy: Policy,
    prompts: Sequence[str],
    seeds: Sequence[int],
    ar_steps: int,
    guidance: float = 1.0,
    stochastic: bool = True,
    recording: Recording | None = None,
) -> Rollout:
    """Generate one image per prompt.

    The draws of an image depend on its seed alone: not on the batch, nor on what is recorded; ODE and SDE
    share the commit order and the initial noise.

    Args:
        prompts, seeds: one each per image. ar_steps: K. guidance: CFG scale, 1 = off.
        stochastic: SDE (True) or ODE sampling.
    """
    recording = recording or Recording()
    device = next(policy.parameters()).device
    images, length, channels = len(seeds), policy.tokens, policy.channels
    condition = policy.encode(list(prompts))
    null = policy.encode([None] * images) if guidance != 1.0 else None
    prefilled = policy.prefill(condition)
    null_prefilled = None if null is None else policy.prefill(null)
    order = noise.orders(seeds, length).to(device)
    tokens = torch.zeros(images, length, channels, device=device)
    known = torch.zeros(images, length, dtype=torch.bool, device=device)
    commit_z: Tensor | None = None
    commit_null_z: Tensor | None = None
    steps: list[RecordedStep] = []
    earlier: Tensor | None = None  # head samples of the previous AR step, for the tokens unknown now
    start = 0
    for k, count in enumerate(policy.ar_schedule(ar_steps)):
        needs_all = recording.needs_all(k)
        index = order[:, start:] if needs_all else order[:, start : start + count]
        z = take(policy.backbone(tokens, known, prefilled), index)
        null_z = (
            None if null_prefilled is None else take(policy.backbone(tokens, known, null_prefilled), index)
        )
        x = take(noise.normal(seeds, "initial", k, (length, channels)).to(device), index)
        step_noise = _step_noise(seeds, k, policy, index) if stochastic else None
        recorded = k in recording.ar_steps
        keep = recording.denoising_steps if recorded else ()
        scale = policy.guidance_at(guidance, length - start - count)
        trajectories = denoise(policy, z, null_z, scale, x, step_noise, keep)
        if recorded:
            steps.append(RecordedStep(k, tokens, known, index, count, trajectories, z, null_z, earlier))
        earlier = trajectories.final[:, count:] if needs_all else None
        committed = order[:, start : start + count]
        tokens = _put(tokens, committed, trajectories.final[:, :count])
        known = known.scatter(1, committed, True)
        if commit_z is None:
            commit_z = z.new_zeros(images, length, z.shape[-1])
        commit_z = _put(commit_z, committed, z[:, :count])
        if null_z is not None:
            commit_null_z = _put(
                torch.zeros_like(commit_z) if k == 0 else commit_null_z, committed, null_z[:, :count]
            )
        start += count
    assert commit_z is not None  # every schedule commits at least one token
    return Rollout(tokens, commit_z, commit_null_z, condition, null, tuple(seeds), steps)


def _step_noise(seeds: Sequence[int], k: int, policy: Policy, index: Tensor) -> Tensor:
    """Return the noise of all denoising steps [T, B, n, C] for the tokens `index` [B, n]."""
    shape = (policy.tokens, policy.transition.steps, policy.channels)
    return take(noise.normal(seeds, "step", k, shape).to(index.device), index).permute(2, 0, 1, 3)


def _put(values: Tensor | None, index: Tensor, update: Tensor) -> Tensor:
    """Return values [B, L, C] with values[b, index[b, j]] = update[b, j]; the input is not changed."""
    assert values is not None
    return values.scatter(1, index[..., None].expand_as(update), update)


def _wide(output: Tensor) -> Tensor:
    """Return the output in float32 or wider: transitions and log-probs are never computed in 16 bit."""
    return output.to(torch.promote_types(output.dtype, torch.float32))


def _optional(values: Tensor | None, images: slice) -> Tensor | None:
    return None if values is None else values[images]
