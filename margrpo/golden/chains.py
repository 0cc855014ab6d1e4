"""Replays that MAR and Harmon share: the released head chain, rollouts and the pretraining loss."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from margrpo.ddpm import DDPM
from margrpo.diffusion import Gaussian
from margrpo.golden.vectors import Vectors, guidance_scale, temperature
from margrpo.policies.base import Condition
from margrpo.policies.masked import MaskedPolicy, spaced_ddpm
from margrpo.rollout import denoise

TIGHT, LOOSE = 1e-5, 2e-4
"""Relative tolerances of the manifests: single calls; whole chains."""


@dataclass(frozen=True)
class Chain:
    """The released sampler's states of n rows, [T, n, C] each; `following` after the step."""

    states: Tensor
    means: Tensor
    stds: Tensor
    following: Tensor

    @property
    def log_prob(self) -> Tensor:
        """Elementwise log-density of the reached states under the released code's std (also at k = 0)."""
        return Gaussian(self.means, self.stds).log_prob(self.following)


def transition_of(policy: MaskedPolicy) -> DDPM:
    """Return the policy's transition as what it is."""
    assert isinstance(policy.transition, DDPM)
    return policy.transition


def guided_rows(policy: MaskedPolicy, x: Tensor, t: Tensor, z: Tensor, scale: float) -> Tensor:
    """Return the released `forward_with_cfg` [2n, 2C]: rows [cond; null], x of the first half used twice.

    Both halves get the guided epsilon, each keeps its own variance.
    """
    half = len(x) // 2
    conditional, null = policy.head(torch.cat([x[:half], x[:half]]), t, z).chunk(2)
    guided = policy.transition.guide(conditional, null, scale)
    channels = guided.shape[1] // 2
    return torch.cat([guided, torch.cat([guided[:, :channels], null[:, channels:]], dim=1)])


def released_chain(policy: MaskedPolicy, z: Tensor, scale: float, start: Tensor, noise: Tensor) -> Chain:
    """Run the released sampler: with guidance the null rows drift apart from the conditional ones.

    Args:
        z: [rows, D], [cond; null] where scale != 1. start: [n, C]. noise: [T, rows, C].
    """
    ddpm = transition_of(policy)
    x = torch.cat([start, start]) if scale != 1 else start
    states, means, stds, following = [], [], [], []
    for step in range(ddpm.steps):
        t = ddpm.times[step].expand(len(x))
        output = policy.head(x, t, z) if scale == 1 else guided_rows(policy, x, t, z, scale)
        kernel = ddpm.kernel(step, x, output)
        states.append(x)
        x = kernel.sample(noise[step])
        means.append(kernel.mean)
        stds.append((0.5 * ddpm.log_variance(step, output)).exp() * ddpm.temperature)
        following.append(x)
    return Chain(torch.stack(states), torch.stack(means), torch.stack(stds), torch.stack(following))


@torch.no_grad()
def replay_rollout(vectors: Vectors, prefix: str, policy: MaskedPolicy, both: Condition) -> Tensor:
    """Replay an image rollout from its recorded noise through our backbone and `denoise`; return the tokens.

    Args:
        both: condition of the B images, then of their B null prompts.
    """
    orders = vectors[f"{prefix}/orders"]
    steps = len(vectors.matching(rf"{prefix}/s\d+/noise_init".replace(".", r"\.")))
    length, images = policy.tokens, len(both) // 2
    orders = orders[:images]
    name = prefix.rsplit("/", 1)[-1]
    policy.transition = spaced_ddpm(policy.architecture.num_sampling_steps, temperature(name))
    tokens = torch.zeros(images, length, policy.channels)
    mask = torch.ones(images, length, dtype=torch.bool)
    for s in range(steps):
        at = f"{prefix}/s{s}"
        remaining = int(mask[0].sum())
        after = max(1, min(remaining - 1, math.floor(length * math.cos(math.pi / 2 * (s + 1) / steps))))
        following = torch.zeros_like(mask).scatter(1, orders[:, :after], True)
        chosen = mask if s == steps - 1 else mask ^ following
        scale = float(vectors[f"{at}/cfg"])
        asked = guidance_scale(name, length, after)
        if asked is not None:
            vectors.check(f"{at}/cfg", asked, TIGHT)
        copies = 1 if scale == 1 else 2
        condition = both.select(slice(0, copies * images))
        z = policy.backbone(tokens.repeat(copies, 1, 1), ~mask.repeat(copies, 1), condition)
        picked = z[chosen.repeat(copies, 1)]
        vectors.check(f"{at}/mask", mask.repeat(copies, 1).float(), 0.0)
        vectors.check(f"{at}/tokens", tokens.repeat(copies, 1, 1), LOOSE)
        vectors.check(f"{at}/z", z, LOOSE)
        vectors.check(f"{at}/z_pred", picked, LOOSE)
        start, noise = vectors[f"{at}/noise_init"], vectors[f"{at}/noise_steps"]
        conditional = picked[: len(start)][None]
        null = None if scale == 1 else picked[len(start) :][None]
        ours = denoise(policy, conditional, null, scale, start[None], noise[:, None, : len(start)]).final[0]
        if f"{at}/sampled" in vectors:
            chain = released_chain(policy, picked, scale, start, noise).following[-1]
            # the conditional rows come from our sampler, the null rows that it never draws from the replay
            vectors.check(f"{at}/sampled", torch.cat([ours, chain[len(start) :]]), LOOSE)
        tokens = tokens.clone()
        tokens[chosen] = ours
        mask = following
    return tokens


def pretraining_loss(
    policy: MaskedPolicy, z: Tensor, tokens: Tensor, t: Tensor, noise: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return MAR's diffusion loss and its rows' two terms [R]: epsilon error and variational bound (bits).

    Args:
        z, tokens: [B, L, ..]. t, noise: [R] and [R, C], whole copies of the (b, position) list. mask: [B, L].
    """
    copies = len(t) // mask.numel()
    target = tokens.flatten(0, 1).repeat(copies, 1)
    weight = mask.flatten().repeat(copies)
    ddpm = spaced_ddpm("1000")
    step = ddpm.steps - 1 - t
    x = ddpm.diffuse(step, target, noise)
    output = policy.head(x, t, z.flatten(0, 1).repeat(copies, 1))
    epsilon, v = output.chunk(2, dim=-1)
    error = (noise - epsilon).square().mean(-1)
    frozen = torch.cat([epsilon.detach(), v], dim=-1)
    # Source: LTH14/mar `gaussian_diffusion.py`. The mean of k = 0 is the predicted token itself.
    mean, log_variance = ddpm.kernel(step, x, frozen).mean, ddpm.log_variance(step, frozen)
    true_mean = ddpm.bridge(step, x, target, noise).mean
    true_log_variance = ddpm.tables.log_variance.flip(0).float()[step][:, None]
    divergence = 0.5 * (
        log_variance
        - true_log_variance
        - 1
        + (true_log_variance - log_variance).exp()
        + (true_mean - mean).square() * (-log_variance).exp()
    )
    bits = torch.where((t == 0)[:, None], _discrete_nll(target, mean, log_variance), divergence)
    bound = bits.mean(-1) / math.log(2.0)
    return ((error + bound) * weight).sum() / weight.sum(), error, bound


def _discrete_nll(x0: Tensor, mean: Tensor, log_variance: Tensor) -> Tensor:
    """Return the elementwise negative log-likelihood of x0 in bins of +- 1/255 under the normal."""
    inverse = (-0.5 * log_variance).exp()
    upper = _normal_cdf(inverse * (x0 - mean + 1 / 255))
    lower = _normal_cdf(inverse * (x0 - mean - 1 / 255))
    inside = torch.where(x0 > 0.999, 1 - lower, upper - lower)
    return -torch.where(x0 < -0.999, upper, inside).clamp_min(1e-12).log()


def _normal_cdf(a: Tensor) -> Tensor:
    """Return the source's tanh approximation of the normal distribution function."""
    return 0.5 * (1 + (math.sqrt(2 / math.pi) * (a + 0.044715 * a**3)).tanh())
