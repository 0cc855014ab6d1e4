"""Replay of NOVA rollouts from recorded noise: noiseless and stochastic, flow and DDPM, guided or not."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from margrpo.config import Sampler
from margrpo.golden.manifest import Golden
from margrpo.policies.base import Condition
from margrpo.policies.nova import NovaPolicy, schedule
from margrpo.policies.nova.positions import patchify, unpatchify
from margrpo.policies.nova.sampling import NovaGuidance, sample_latent_tokens
from margrpo.rollout import denoise, guided_head

_FLOW, _LOG_PROB, _DDPM = 1e-4, 5e-4, 1e-3  # of the tensor's maximum, from the manifest


@dataclass
class Replayed:
    """One rollout in token space: A AR steps, T denoising steps.

    Attributes:
        c: condition tokens, conditional rows first. z: per AR step, likewise.
        states, means, log_probs: [A, T, B, L, C], after each denoising step, per channel.
        samples: [A, B, L, C], the last states. before: [A, B, L, C], the tokens before each AR step.
        known: [A, B, L]. final: [B, L, C]. commit_z: [B, L, D], conditional.
    """

    c: Tensor
    z: Tensor
    states: Tensor
    means: Tensor
    log_probs: Tensor
    samples: Tensor
    before: Tensor
    known: Tensor
    final: Tensor
    commit_z: Tensor


def to_tokens(latents: Tensor, patch: int) -> Tensor:
    """Return tokens [.., L, P] of latents [.., C, H, W]."""
    return patchify(latents.flatten(0, -4), patch).unflatten(0, latents.shape[:-3])


def from_tokens(tokens: Tensor, policy: NovaPolicy) -> Tensor:
    """Return latents [.., C, H, W] of tokens [.., L, P]."""
    latents = unpatchify(tokens.flatten(0, -3), policy.config.patch, policy.config.grid)
    return latents.unflatten(0, tokens.shape[:-2])


def conditions(golden: Golden, policy: NovaPolicy) -> tuple[Condition, Condition]:
    """Return the prompts' and the null prompt's condition, prefilled."""
    states = prompt_states(golden)
    null = policy.pad([torch.zeros(0, 0)] * len(states))
    return policy.prefill(policy.pad(states)), policy.prefill(null)


def prompt_states(golden: Golden) -> list[Tensor]:
    """Return the language model states of the folder's prompts."""
    return [golden[f"text.raw_{i}"] for i in range(golden.manifest["config"]["B"])]


@torch.no_grad()
def roll_out(
    golden: Golden, policy: NovaPolicy, scale: float, step_noise: Tensor | None, every_token: bool
) -> Replayed:
    """Run the backbone and `margrpo.rollout.denoise` along the recorded order and noise.

    Args:
        scale: CFG scale, 1 = off. step_noise: [A, T, B, L, C]; None = noiseless.
        every_token: denoise all tokens at every AR step (as the released trainer) or the committed ones.
    """
    condition, null = conditions(golden, policy)
    order, patch = golden["order"], policy.config.patch
    initial = to_tokens(golden["noise.init"], patch)
    tokens, known = torch.zeros_like(initial[0]), torch.zeros_like(order, dtype=torch.bool)
    commit_z = torch.zeros(0)
    records: dict[str, list[Tensor]] = {key: [] for key in ("z", "states", "means", "log_probs", "samples")}
    befores, knowns = [], []
    start = 0
    for step, count in enumerate(policy.ar_schedule(golden.manifest["config"]["ar_steps"])):
        befores.append(tokens)
        knowns.append(known)
        z = policy.backbone(tokens, known, condition)
        null_z = policy.backbone(tokens, known, null) if scale > 1 else None
        records["z"].append(z if null_z is None else torch.cat([z, null_z]))
        written = order[:, start : start + count]
        index = torch.arange(policy.tokens).expand_as(order) if every_token else written
        columns = index[..., None]
        parts = [None if value is None else value.take_along_dim(columns, 1) for value in (z, null_z)]
        noise = None if step_noise is None else step_noise[step].take_along_dim(columns[None], 2)
        x = initial[step].take_along_dim(columns, 1)
        assert parts[0] is not None
        keep = range(policy.transition.steps) if noise is not None else ()
        drawn = denoise(policy, parts[0], parts[1], scale, x, noise, tuple(keep))
        if drawn.states is not None and drawn.next_states is not None:
            records["states"].append(drawn.next_states)
            means, log_probs = score(policy, parts[0], parts[1], scale, drawn.states, drawn.next_states)
            records["means"].append(means)
            records["log_probs"].append(log_probs)
        sample = initial[step].scatter(1, columns.expand_as(drawn.final), drawn.final)
        records["samples"].append(sample)
        place = written[..., None]
        if step == 0:
            commit_z = torch.zeros_like(z)
        commit_z = commit_z.scatter(1, place.expand(-1, -1, z.shape[-1]), z.take_along_dim(place, 1))
        values = sample.take_along_dim(place, 1)
        tokens = tokens.scatter(1, place.expand_as(values), values)
        known = known.scatter(1, written, True)
        start += count
    stacked = {key: torch.stack(values) if values else torch.zeros(0) for key, values in records.items()}
    c = condition["c"] if scale == 1 else torch.cat([condition["c"], null["c"]])
    return Replayed(
        c=c,
        before=torch.stack(befores),
        known=torch.stack(knowns),
        final=tokens,
        commit_z=commit_z,
        **stacked,
    )


def score(
    policy: NovaPolicy, z: Tensor, null_z: Tensor | None, scale: float, states: Tensor, reached: Tensor
) -> tuple[Tensor, Tensor]:
    """Return means and log-probs per channel [T, B, n, C] of recorded transitions states -> reached."""
    means, log_probs = [], []
    flat_null = None if null_z is None else null_z.flatten(0, 1)
    for step, (state, following) in enumerate(zip(states, reached, strict=True)):
        x = state.flatten(0, 1)
        output = guided_head(policy, x, step, z.flatten(0, 1), flat_null, scale)
        kernel = policy.transition.kernel(step, x, output)
        means.append(kernel.mean.view_as(state))
        log_probs.append(kernel.log_prob(following.flatten(0, 1)).view_as(state))
    return torch.stack(means), torch.stack(log_probs)


def check_rollouts(golden: Golden, policy: NovaPolicy) -> None:
    """Compare all rollouts of a golden folder."""
    use_flow(golden, policy)
    _check_ode(golden, policy, 1.0, "ode_g1")
    _check_ode(golden, policy, 5.0, "ode_g5")
    if golden.has("noise.step", "sde_g1.x"):
        noise = to_tokens(golden["noise.step"], policy.config.patch)
        plain = roll_out(golden, policy, 1.0, noise, every_token=True)
        golden.close("sde_g1.c", plain.c)
        golden.of_maximum("sde_g1.x", from_tokens(plain.final, policy), _FLOW)
        golden.of_maximum("sde_g1.logp", from_tokens(plain.log_probs, policy), _LOG_PROB)
    if golden.has("noise.step", "sde_g5.x"):
        _check_sde(golden, policy, to_tokens(golden["noise.step"], policy.config.patch))
    _check_options(golden, policy)
    if golden.has("noise.ddpm_step", "ddpm_g5.x"):
        _check_ddpm(golden, policy)


def _check_ode(golden: Golden, policy: NovaPolicy, scale: float, name: str) -> None:
    if f"{name}.x" not in golden:
        return
    run = roll_out(golden, policy, scale, None, every_token=False)
    golden.close(f"{name}.c", run.c)
    golden.of_maximum(f"{name}.z", run.z, _FLOW)
    golden.of_maximum(f"{name}.x", from_tokens(run.final, policy), _FLOW)
    if f"{name}.sample" in golden:
        # The source feeds x itself as the head's output where nothing is written: x <- x + x dt there.
        x = to_tokens(golden["noise.init"], policy.config.patch)
        for step in range(policy.transition.steps):
            x = policy.transition.ode(step, x, x)
        committed = torch.cat([run.known[1:], torch.ones_like(run.known[:1])]) & ~run.known
        golden.of_maximum(f"{name}.sample", torch.where(committed[..., None], run.samples, x), _FLOW)


def _check_sde(golden: Golden, policy: NovaPolicy, noise: Tensor) -> None:
    """Compare the guided stochastic rollout and its fresh trajectories (MTE)."""
    run = roll_out(golden, policy, 5.0, noise, every_token=True)
    golden.close("sde_g5.c", run.c)
    golden.of_maximum("sde_g5.z", run.z, _FLOW)
    for key, values, tolerance in (
        ("xs", run.states, _FLOW),
        ("mean", run.means, _FLOW),
        ("logp", run.log_probs, _LOG_PROB),
        ("x_latent", run.before, _FLOW),
        ("x", run.final, _FLOW),
    ):
        golden.of_maximum(f"sde_g5.{key}", from_tokens(values, policy), tolerance)
    start = 0
    for step, count in enumerate(policy.ar_schedule(golden.manifest["config"]["ar_steps"])):
        golden.equal(f"sde_g5.prev_ids.{step}", golden["order"][:, :start, None])
        golden.equal(f"sde_g5.pred_ids.{step}", golden["order"][:, start : start + count, None])
        start += count
    golden.of_maximum("mte.all_z", run.commit_z, _FLOW)
    if not golden.has("noise.seed_init", "noise.seed_step"):
        return
    patch = policy.config.patch
    starts, steps = to_tokens(golden["noise.seed_init"], patch), to_tokens(golden["noise.seed_step"], patch)
    keep = tuple(range(policy.transition.steps))
    with torch.no_grad():
        drawn = [
            denoise(policy, run.commit_z, None, 1.0, x, noise, keep)
            for x, noise in zip(starts, steps, strict=True)
        ]
    states = torch.stack([part.next_states for part in drawn if part.next_states is not None])
    golden.of_maximum("mte.xs", from_tokens(states, policy), _FLOW)
    golden.of_maximum("mte.latents", from_tokens(states[:, -1], policy), _FLOW)


def _check_options(golden: Golden, policy: NovaPolicy) -> None:
    """Compare NOVA's pipeline with a guidance ramp, renorm, truncation and a shifted schedule."""
    name = "ode_g5_opts.x"
    if name not in golden:
        return
    options = NovaGuidance(
        scale=golden.number(name, r"guidance ([\d.]+)", 5.0),
        minimum=golden.number(name, r"min_guidance_scale ([\d.]+)", 2.0),
        renorm=golden.number(name, r"guidance_renorm ([\d.]+)", 0.7),
        trunc=golden.number(name, r"guidance_trunc ([\d.]+)", 300.0),
    )
    config = {**golden.manifest["flow_scheduler_shift3"], "_class_name": "FlowMatchEulerDiscreteScheduler"}
    policy.transition = schedule.transition(config, Sampler(denoising_steps=policy.transition.steps))
    condition, null = conditions(golden, policy)
    noise = to_tokens(golden["noise.init"], policy.config.patch)
    final = sample_latent_tokens(policy, condition["text"], null["text"], golden["order"], noise, options)
    golden.close("ode_g5_opts.c", torch.cat([condition["c"], null["c"]]))
    golden.of_maximum(name, from_tokens(final, policy), _FLOW)


def _check_ddpm(golden: Golden, policy: NovaPolicy) -> None:
    use_ddpm(golden, policy)
    drawn = to_tokens(golden["noise.ddpm_step"], policy.config.patch)
    # the last step is noiseless: the reference draws nothing for it
    noise = torch.cat([drawn, torch.zeros_like(drawn[:, :1])], dim=1)
    run = roll_out(golden, policy, 5.0, noise, every_token=True)
    golden.close("ddpm_g5.c", run.c)
    for key, values in (("xs", run.states), ("mean", run.means), ("x", run.final)):
        golden.of_maximum(f"ddpm_g5.{key}", from_tokens(values, policy), _DDPM)
    if "ddpm_g5.logp" in golden:
        wanted = golden["ddpm_g5.logp"][:, :-1]
        golden.of_maximum("ddpm_g5.logp", from_tokens(run.log_probs, policy)[:, :-1], _LOG_PROB, wanted)
        golden.skip("ddpm_g5.logp[t = 0]", "a noiseless step has no density (the source floors it at 1e-12)")


def use_flow(golden: Golden, policy: NovaPolicy) -> None:
    """Give the policy the golden folder's flow scheduler, the last one stochastic."""
    steps = golden.manifest["config"]["diff_steps"]
    config = {**golden.manifest["flow_scheduler"], "_class_name": "FlowMatchEulerDiscreteScheduler"}
    policy.transition = schedule.transition(config, Sampler(denoising_steps=steps, final_step="stochastic"))


def use_ddpm(golden: Golden, policy: NovaPolicy) -> None:
    """Give the policy the golden folder's DDPM scheduler."""
    config = {**golden.manifest["ddpm_scheduler"], "_class_name": "DDPMScheduler"}
    steps = golden.manifest["config"]["ddpm_steps"]
    policy.transition = schedule.transition(config, Sampler(denoising_steps=steps))
