"""What the released MAR-GRPO code computes for Harmon, defects included: checked here, never trained with.

The masks, stale tokens and reductions below are those of AMAP-ML/mar-grpo (`harmon_generate_image_with_logp.py`,
`grpo_trainer_harmon_v1_2.py`). Their inputs are recorded, so a match shows that our backbone, head, transition
and gradients are right; the objective that trains is `margrpo.objective`.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor

from margrpo.diffusion import Gaussian
from margrpo.golden.chains import LOOSE, Chain, released_chain, transition_of
from margrpo.golden.vectors import Vectors
from margrpo.objective import advantages
from margrpo.policies.base import Condition
from margrpo.policies.harmon import HarmonPolicy
from margrpo.policies.masked import own_name, spaced_ddpm

BETA, UNCERTAIN, REFERENCE = 0.01, 0.3, 1.01
"""Weight of the KL term; share of uncertain tokens; factor on the reference's weights (of the reference run)."""
_KL, _POLICY = 2e-3, 1e-6  # exp(d) - d - 1 cancels in float32; the policy term is a sum of advantages near 0


def replay_sampler(vectors: Vectors, policy: HarmonPolicy, both: Condition) -> None:
    """Check the released rollout with its log-probs and seed chains.

    Its null branch misses the newest tokens, and the mask it logs is the one after the step.
    """
    policy.transition = spaced_ddpm(policy.architecture.num_sampling_steps)
    images, length = len(both) // 2, policy.tokens
    orders = vectors["mg/orders"][:images]
    steps = len(vectors.matching(r"mg/s\d+/noise_init"))
    selected = set(vectors["mg/selected"].tolist())
    kept = [s for s in range(steps) if s in selected or s + 1 in selected or s == steps - 1]
    vectors.check("mg/kept_steps", torch.tensor(kept), 0.0)
    tokens = torch.zeros(images, length, policy.channels)
    stale, mask = tokens, torch.ones(images, length, dtype=torch.bool)
    commit_z = torch.zeros(2 * images, length, policy.architecture.decoder_embed_dim)
    scale = 1.0
    for s in range(steps):
        at = f"mg/s{s}"
        after = max(
            1, min(int(mask[0].sum()) - 1, math.floor(length * math.cos(math.pi / 2 * (s + 1) / steps)))
        )
        following = torch.zeros_like(mask).scatter(1, orders[:, :after], True)  # one token even at the end
        chosen = mask if s == steps - 1 else mask ^ following
        scale = float(vectors[f"{at}/cfg"])
        rows = torch.cat([tokens, stale])
        z = policy.backbone(rows, ~mask.repeat(2, 1), both)
        vectors.check(f"{at}/mask", mask.repeat(2, 1).float(), 0.0)
        vectors.check(f"{at}/tokens", rows, LOOSE)
        vectors.check(f"{at}/z", z, LOOSE)
        everywhere = torch.ones_like(mask) if s in kept else chosen
        start, noise = vectors[f"{at}/noise_init"], vectors[f"{at}/noise_steps"]
        chain = released_chain(policy, z[everywhere.repeat(2, 1)], scale, start, noise)
        vectors.check(f"{at}/sampled", chain.following[-1], LOOSE)
        if s in kept:
            _check_log(vectors, f"mg/log{s}", tokens, following, chosen, chain)
        commit_z = commit_z + z * chosen.repeat(2, 1)[..., None]
        stale = tokens
        tokens = tokens.clone()
        tokens[chosen] = chain.following[-1][: len(start)][chosen[everywhere]]
        mask = following
    vectors.check("mg/all_ar_latents", commit_z, LOOSE)
    if policy.vae is not None:
        vectors.check("mg/final_diff_latents", tokens / policy.vae.scale, LOOSE)
        vectors.check("mg/image", policy.vae.decode(policy.latents(tokens) / policy.vae.scale), LOOSE)
    for match in vectors.matching(r"(mg/seed\d+)/noise_steps"):
        start, noise = vectors[f"{match[1]}/noise_init"], vectors[match[0]]
        chain = released_chain(policy, commit_z.flatten(0, 1), scale, start, noise)
        vectors.check(f"{match[1]}/diff_xt_prev", _images(chain.following, images, length), LOOSE)


def replay_objective(vectors: Vectors, policy: HarmonPolicy, both: Condition) -> None:
    """Check the released training pass: conditions, log-probs, losses and gradients of the MAR part."""
    policy.transition = spaced_ddpm(policy.architecture.num_sampling_steps)
    rewards = vectors["train/rewards"]
    gain = advantages(rewards, torch.zeros(len(rewards), dtype=torch.int64))
    vectors.check("train/advantages", gain, LOOSE)
    text = both.select(slice(0, len(rewards)))
    _check_conditions(vectors, policy, text)
    picked = vectors["train/diff_idx"]
    vectors.check("train/diff_t", transition_of(policy).steps - 1 - picked, 0.0)
    uncertain = _check_uncertainty(vectors)
    reference = copy.deepcopy(policy)
    for parameter in reference.mar.parameters():
        parameter.data.mul_(REFERENCE)
    for preset in sorted({match[1] for match in vectors.matching(r"train/([^/]+)/\d+/logp")}):
        policy.zero_grad(set_to_none=True)
        for step in vectors["mg/selected"].tolist():
            _check_step(vectors, policy, reference, text, gain, preset, step, uncertain)
        named = {own_name(match[1]): match[0] for match in vectors.matching(rf"train/{preset}/grad/(.+)")}
        for name, parameter in policy.mar.named_parameters():
            if name in named:
                assert parameter.grad is not None
                vectors.check(named[name], parameter.grad, LOOSE)
    if "train/clamp_std" in vectors:
        _check_clamps(vectors, policy)


def _check_log(
    vectors: Vectors, at: str, tokens: Tensor, following: Tensor, chosen: Tensor, chain: Chain
) -> None:
    images, length = chosen.shape
    vectors.check(f"{at}/tokens", tokens, LOOSE)
    vectors.check(f"{at}/mask_list", following, 0.0)
    vectors.check(f"{at}/mask_to_pred", chosen, 0.0)
    vectors.check(f"{at}/diff_xt0", _images(chain.states, images, length)[0], LOOSE)
    vectors.check(f"{at}/diff_xt_prev", _images(chain.following, images, length), LOOSE)
    vectors.check(f"{at}/out_mean", _images(chain.means, images, length), LOOSE)
    vectors.check(f"{at}/out_std_dev_t", _images(chain.stds, images, length), LOOSE)
    vectors.check(f"{at}/log_prob", _images(chain.log_prob, images, length), LOOSE)


def _images(values: Tensor, images: int, length: int) -> Tensor:
    """Return the conditional rows of [T, rows, C] as [T, B, L, C]."""
    return values[:, : images * length].unflatten(1, (images, length))


@torch.no_grad()
def _check_conditions(vectors: Vectors, policy: HarmonPolicy, text: Condition) -> None:
    for match in vectors.matching(r"train/z(\d+)_(released|inputmask)"):
        log = f"mg/log{match[1]}"
        unknown = vectors[f"{log}/mask_list"].bool()
        if match[2] == "inputmask":  # what the rollout's encoder saw
            unknown = unknown | vectors[f"{log}/mask_to_pred"].bool()
        vectors.check(match[0], policy.backbone(vectors[f"{log}/tokens"], ~unknown, text), LOOSE)


def _check_uncertainty(vectors: Vectors) -> Tensor:
    """Return the released critic mask [B, L, 1]: the tokens whose seed chains end furthest apart."""
    seeds = vectors.matching(r"mg/(seed\d+)/diff_xt_prev")
    finals = torch.stack([vectors[match[0]][-1] for match in seeds])
    spread = finals.std(dim=0, unbiased=False).mean(-1, keepdim=True)
    vectors.check("train/critic_std", spread, LOOSE)
    count = max(1, int(UNCERTAIN * spread.shape[1]))
    mask = torch.zeros_like(spread).scatter(1, spread.topk(count, dim=1).indices, 1.0)
    vectors.check("train/critic_mask", mask, 0.0)
    return mask


def _check_step(
    vectors: Vectors,
    policy: HarmonPolicy,
    reference: HarmonPolicy,
    text: Condition,
    gain: Tensor,
    preset: str,
    step: int,
    uncertain: Tensor,
) -> None:
    """Check one AR step of one preset; its gradient is added to the policy's."""
    log, at = f"mg/log{step}", f"train/{preset}/{step}"
    picked = vectors["train/diff_idx"]
    tokens, unknown = vectors[f"{log}/tokens"], vectors[f"{log}/mask_list"].bool()
    z = policy.backbone(tokens, ~unknown, text)
    with torch.no_grad():
        reference_z = reference.backbone(tokens, ~unknown, text)
    chain = vectors[f"{log}/diff_xt_prev"]
    states = torch.cat([vectors[f"{log}/diff_xt0"][None], chain])[:-1]
    std = vectors[f"{log}/out_std_dev_t"][picked]
    mean, log_prob = _score(policy, z, picked, states[picked], chain[picked], std)
    with torch.no_grad():
        reference_mean, _ = _score(reference, reference_z, picked, states[picked], chain[picked], std)
    vectors.check(f"{at}/logp", log_prob.flatten(0, 1), LOOSE)
    vectors.check(f"{at}/mean", mean.flatten(0, 1), LOOSE)
    vectors.check(f"{at}/ref_mean", reference_mean.flatten(0, 1), LOOSE)

    advantage = gain[:, None, None]
    surrogate = (log_prob - log_prob.detach()).exp() * advantage  # [t, B, L, C]
    mask = unknown[..., None].float()
    keep = mask
    if "mte" in preset:
        fresh = []
        for match in vectors.matching(r"mg/(seed\d+)/diff_xt_prev"):
            drawn = vectors[match[0]]
            start = vectors[f"mg/{match[1]}/noise_init"].view(drawn.shape[1:])
            before = torch.cat([start[None], drawn])[:-1]
            fresh.append(_score(policy, z, picked, before[picked], drawn[picked], std)[1])
        vectors.check(f"{at}/logp_critic_last_seed", fresh[-1].flatten(0, 1), LOOSE)
        averaged = torch.stack([(value - value.detach()).exp() for value in fresh]).mean(0) * advantage
        surrogate = surrogate * (1 - uncertain) + averaged * uncertain
    if "sim" in preset and step > 1:
        final = vectors["mg/final_diff_latents"]
        now = torch.cosine_similarity(chain[-1], final, dim=-1)
        before_step = torch.cosine_similarity(vectors[f"mg/log{step - 1}/diff_xt_prev"][-1], final, dim=-1)
        closer = (now - before_step > 0).float()[..., None] * mask
        similar = (closer + vectors[f"{log}/mask_to_pred"][..., None].float()).clamp(0, 1)
        copies = (len(picked), 1, 1)
        vectors.check(f"{at}/sim_mask", similar.repeat(copies), 0.0)
        keep = mask * similar
    vectors.check(f"{at}/completion_mask", keep.repeat(len(picked), 1, 1), 0.0)
    difference = reference_mean - mean
    divergence = difference.exp() - difference - 1
    # the released reduction: the numerator sums channels, the denominator counts tokens
    value = (surrogate * keep).sum() / (keep.sum() * len(picked))
    kl = (divergence * mask).sum() / (mask.sum() * len(picked))
    loss = -(value - BETA * kl)
    vectors.check(f"{at}/policy_loss", value, _POLICY, relative=False)
    vectors.check(f"{at}/kl_loss", kl, _KL)
    vectors.check(f"{at}/total_loss", loss, _POLICY, relative=False)
    loss.backward()


def _score(
    policy: HarmonPolicy, z: Tensor, picked: Tensor, states: Tensor, following: Tensor, std: Tensor
) -> tuple[Tensor, Tensor]:
    """Return unguided means and log-probs [t, B, L, C] under the recorded std, clamped as released."""
    ddpm = transition_of(policy)
    shape = states.shape
    step = picked[:, None, None].expand(shape[:-1]).flatten()
    x = states.reshape(-1, shape[-1])
    output = policy.head(x, ddpm.times[step], z.expand(len(picked), -1, -1, -1).reshape(len(x), -1))
    mean = ddpm.kernel(step, x, output).mean.view(shape)
    return mean, _clamped_log_prob(mean, following, std)


def _clamped_log_prob(mean: Tensor, value: Tensor, std: Tensor) -> Tensor:
    """Return the released log-prob: the square floors std at 1e-3, the logarithm at 1e-6."""
    plain = Gaussian(mean, std.clamp_min(1e-3)).log_prob(value)
    return plain + std.clamp_min(1e-3).log() - std.clamp_min(1e-6).log()


@torch.no_grad()
def _check_clamps(vectors: Vectors, policy: HarmonPolicy) -> None:
    ddpm = transition_of(policy)
    step = ddpm.steps - 1 - vectors["train/clamp_t"]
    x, z, std = vectors["train/clamp_xt"], vectors["train/clamp_z"], vectors["train/clamp_std"]
    mean = ddpm.kernel(step, x, policy.head(x, ddpm.times[step], z)).mean
    vectors.check("train/clamp_mean", mean, LOOSE)
    vectors.check("train/clamp_logp", _clamped_log_prob(mean, vectors["train/clamp_xprev"], std), LOOSE)
    vectors.check("train/clamp_std_after", std.clamp_min(1e-6), LOOSE)
