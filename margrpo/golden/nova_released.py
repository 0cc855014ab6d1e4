"""Replay of AMAP-ML/mar-grpo's training path on NOVA, with its two-frame condition.

Training never takes this path: released scoring conditions on bos and on the partial image, which is not how
the rollout conditions. It is here to show that the reference's numbers are understood to the last digit.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from margrpo.golden.manifest import Golden
from margrpo.golden.nova_rollouts import prompt_states, score, to_tokens, use_ddpm, use_flow
from margrpo.objective import advantages
from margrpo.policies.nova import NovaPolicy
from margrpo.policies.nova.positions import patchify, unpatchify

_UNCERTAIN = 0.3


@dataclass
class Scored:
    """Means and log-probs [t, B, L, C] of transitions, and the mean map's distance to the reference's."""

    mean: Tensor
    log_prob: Tensor
    std: Tensor
    kl: Tensor


def released_latents(policy: NovaPolicy, text: Tensor, tokens: Tensor, known: Tensor) -> Tensor:
    """Return z [B, L, D] under the condition of two frames: bos, and the partial image [B, L, P]."""
    transformer, config = policy.transformer, policy.config
    latents = unpatchify(tokens, config.patch, config.grid)
    image = transformer.video_encoder.patch_embed(patchify(latents, 2 * config.patch))
    bos = transformer.mask_embed.bos_token.expand_as(image)
    return transformer.latents(tokens, known, transformer.encode_frames(text, torch.stack([bos, image], 1)))


def check_released(golden: Golden, policy: NovaPolicy) -> None:
    """Compare advantages, masks, latents, log-probs, losses and gradients of the released trainer."""
    if golden.has("grpo.rewards", "grpo.advantages"):
        rewards = golden["grpo.rewards"]
        groups = torch.arange(len(rewards)).repeat_interleave(rewards.shape[1])
        golden.close("grpo.advantages", advantages(rewards.flatten(), groups).view_as(rewards))
    if "mte.latents" in golden:
        spread = golden["mte.latents"].std(dim=0, unbiased=False).mean(dim=1, keepdim=True)
        golden.close("mte.std", spread)
        pixels = spread.flatten(1)
        chosen = pixels.topk(int(_UNCERTAIN * pixels.shape[1]), dim=1).indices
        golden.equal("mte.critic_mask", torch.zeros_like(pixels).scatter(1, chosen, 1.0).view_as(spread))
    if not golden.has("sde_g5.x_latent", "sde_g5.xs", "noise.init", "order"):
        return
    use_flow(golden, policy)
    text = policy.pad(prompt_states(golden))["text"]
    before = to_tokens(golden["sde_g5.x_latent"], policy.config.patch)
    counts = policy.ar_schedule(golden.manifest["config"]["ar_steps"])
    with torch.no_grad():
        for step in range(len(counts)):
            z = released_latents(policy, text, before[step], _known(golden, sum(counts[:step])))
            golden.close(f"train.z.{step}", z)
    for step in range(len(counts)):
        for kind in ("plain", "mte"):
            _check_loss(golden, policy, text, kind, step, counts)
    if golden.has("ddpm_g5.xs", "ddpm.train.mean"):
        _check_ddpm(golden, policy, text, counts)


def _check_loss(
    golden: Golden, policy: NovaPolicy, text: Tensor, kind: str, step: int, counts: list[int]
) -> None:
    """Compare -(policy term - beta KL) of one AR step, its parts and its gradients."""
    name = f"grpo.{kind}.{step}"
    if not golden.has(f"{name}.loss", "grpo.adv", "grpo.diff_idx"):
        return
    student = _student(policy)
    reference = _reference(policy, golden.number(f"{name}.loss", r"ref weights = ([\d.]+)", 0.98))
    before = to_tokens(golden["sde_g5.x_latent"], policy.config.patch)[step]
    known = _known(golden, sum(counts[:step]))
    latents = released_latents(student, text, before, known)
    with torch.no_grad():
        anchor = released_latents(reference, text, before, known)
    unknown = known.logical_not()[..., None].float().expand_as(before)
    advantage = golden["grpo.adv"][:, None, None]
    chosen = golden["grpo.diff_idx"]

    def run(start: Tensor, states: Tensor) -> Scored:
        visited = torch.cat([start[None], states[:-1]])
        return _score(student, reference, latents, anchor, visited, states, chosen)

    states = to_tokens(golden["sde_g5.xs"], policy.config.patch)[step]
    plain = run(to_tokens(golden["noise.init"], policy.config.patch)[step], states)
    gain = _ratio(plain) * advantage
    mask = unknown.expand_as(gain)
    kept, divergence = mask, plain.kl
    if kind == "mte":
        critic = to_tokens(golden["mte.critic_mask"].expand_as(golden["lat.x"]), policy.config.patch)
        starts = to_tokens(golden["noise.seed_init"], policy.config.patch)
        paths = to_tokens(golden["mte.xs"], policy.config.patch)
        fresh = [run(start, path) for start, path in zip(starts, paths, strict=True)]
        average = torch.stack([_ratio(part) * advantage for part in fresh]).mean(0)
        gain = gain * (1 - critic) + average * critic
        divergence = divergence * (1 - critic) + torch.stack([part.kl for part in fresh]).mean(0) * critic
        if step > 1:
            threshold = golden.number(f"{name}.loss", r"thresh ([-\d.]+)", 0.0)
            similar = _similarity_mask(golden, policy, unknown, step, counts, threshold)
            golden.equal(f"{name}.sim_mask", _rows(similar.expand_as(mask), policy))
            kept = mask * similar
    policy_term = (gain * kept).sum() / kept.sum()
    kl = (divergence * mask).sum() / mask.sum()
    loss = -(policy_term - golden.number(f"{name}.loss", r"beta ([\d.]+)", 0.01) * kl)
    loss.backward()
    golden.close(f"{name}.policy", policy_term, atol=5e-7, rtol=1e-6)
    golden.close(f"{name}.kl", kl, atol=0.0)
    golden.close(f"{name}.loss", loss, atol=5e-7, rtol=1e-6)  # beta KL is about 3e-6: a loss without it fails
    golden.gradients(name, dict(student.transformer.named_parameters()))
    if kind == "plain":
        completion = unpatchify(unknown, policy.config.patch, policy.config.grid)
        golden.equal(f"{name}.completion", completion)
        golden.close(f"{name}.mean", _rows(plain.mean, policy))
        golden.of_maximum(f"{name}.logp", _rows(plain.log_prob, policy), 5e-4)
        std = plain.std.repeat_interleave(len(before))
        golden.close(f"{name}.std", std[:, None, None, None])


def _check_ddpm(golden: Golden, policy: NovaPolicy, text: Tensor, counts: list[int]) -> None:
    """Compare released scoring with a DDPM scheduler at the last AR step."""
    use_ddpm(golden, policy)
    states = to_tokens(golden["ddpm_g5.xs"], policy.config.patch)
    order, last = golden["order"], len(counts) - 1
    tokens, start = torch.zeros_like(states[0, -1]), 0
    for step, count in enumerate(counts[:-1]):
        place = order[:, start : start + count, None].expand(-1, -1, policy.channels)
        tokens = tokens.scatter(1, place, states[step, -1].take_along_dim(place, 1))
        start += count
    visited = torch.cat([to_tokens(golden["noise.init"], policy.config.patch)[last][None], states[last, :-1]])
    with torch.no_grad():
        z = released_latents(policy, text, tokens, _known(golden, start))
        means, log_probs = score(policy, z, None, 1.0, visited, states[last])
    golden.close("ddpm.train.mean", _rows(means, policy))
    scored = len(policy.transition.scored) * len(order)
    wanted = golden["ddpm.train.logp"][:scored]
    golden.of_maximum("ddpm.train.logp", _rows(log_probs, policy)[:scored], 5e-4, wanted)
    golden.skip("ddpm.train.logp[t = 0]", "a noiseless step has no density (the source floors it at 1e-12)")
    std = torch.stack([_std(policy, step) for step in range(policy.transition.steps)])
    wanted = golden["ddpm.train.std"][:scored]
    ours = std.repeat_interleave(len(order))[:scored, None, None, None]
    golden.of_maximum("ddpm.train.std", ours, 1e-4, wanted)
    golden.skip("ddpm.train.std[t = 0]", "the source's floor of a variance that is 0")


def _score(
    student: NovaPolicy,
    reference: NovaPolicy,
    z: Tensor,
    anchor: Tensor,
    visited: Tensor,
    reached: Tensor,
    chosen: Tensor,
) -> Scored:
    """Score the chosen denoising steps (int64 [t]) of trajectories [T, B, L, C] under z [B, L, D]."""
    means, log_probs, divergences, stds = [], [], [], []
    for step in chosen.tolist():
        x = visited[step].flatten(0, 1)
        times = student.transition.times[step].expand(len(x))
        kernel = student.transition.kernel(step, x, student.head(x, times, z.flatten(0, 1)))
        with torch.no_grad():
            other = reference.transition.kernel(step, x, reference.head(x, times, anchor.flatten(0, 1)))
        distance = other.mean - kernel.mean
        divergences.append((distance.exp() - distance - 1).view_as(visited[step]))
        means.append(kernel.mean.view_as(visited[step]))
        log_probs.append(kernel.log_prob(reached[step].flatten(0, 1)).view_as(visited[step]))
        stds.append(kernel.std.flatten()[0])
    return Scored(torch.stack(means), torch.stack(log_probs), torch.stack(stds), torch.stack(divergences))


def _ratio(scored: Scored) -> Tensor:
    return (scored.log_prob - scored.log_prob.detach()).exp()


def _similarity_mask(
    golden: Golden, policy: NovaPolicy, unknown: Tensor, step: int, counts: list[int], threshold: float
) -> Tensor:
    """Return [B, L, P]: latent pixels whose sample moved towards the final image, or committed now."""
    channels = policy.config.latent[0]
    last = to_tokens(golden["sde_g5.xs"], policy.config.patch)[:, -1].unflatten(-1, (-1, channels))
    final = to_tokens(golden["sde_g5.x"], policy.config.patch).unflatten(-1, (-1, channels))
    now, earlier = (torch.cosine_similarity(last[i], final, dim=-1) for i in (step, step - 1))
    closer = (now - earlier > threshold).float()[..., None].expand_as(final).flatten(-2) * unknown
    start = sum(counts[:step])
    written = golden["order"][:, start : start + counts[step], None].expand(-1, -1, unknown.shape[-1])
    return (closer + torch.zeros_like(unknown).scatter(1, written, 1.0)).clamp(0, 1)


def _known(golden: Golden, count: int) -> Tensor:
    order = golden["order"]
    return torch.zeros_like(order, dtype=torch.bool).scatter(1, order[:, :count], True)


def _student(policy: NovaPolicy) -> NovaPolicy:
    """Return a copy whose head is frozen and whose bos and mask tokens are detached, as in the source."""
    student = copy.deepcopy(policy)
    student.zero_grad(set_to_none=True)
    for parameter in [*student.head_parameters(), *student.transformer.mask_embed.parameters()]:
        parameter.requires_grad_(False)
    return student


def _reference(policy: NovaPolicy, factor: float) -> NovaPolicy:
    reference = copy.deepcopy(policy).requires_grad_(False)
    for parameter in reference.parameters():
        parameter.mul_(factor)
    return reference


def _std(policy: NovaPolicy, step: int) -> Tensor:
    zero = torch.zeros(1, policy.channels)
    return policy.transition.kernel(step, zero, zero).std.flatten()[0]


def _rows(tokens: Tensor, policy: NovaPolicy) -> Tensor:
    """Return latents [t * B, C, H, W] of [t, B, L, P]."""
    return unpatchify(tokens.flatten(0, 1), policy.config.patch, policy.config.grid)
