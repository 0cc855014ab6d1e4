"""Replay of a NOVA golden folder: single calls, schedules, rollouts from recorded noise, official losses."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from margrpo.diffusion import FlowSDE
from margrpo.golden.manifest import Golden
from margrpo.golden.nova_released import check_released
from margrpo.golden.nova_rollouts import check_rollouts, prompt_states, use_flow
from margrpo.golden.vectors import Check
from margrpo.policies.nova import NovaPolicy, read_nova
from margrpo.policies.nova.policy import commit_counts
from margrpo.policies.nova.positions import coordinates, patchify, rotate, rotation, space_embedding
from margrpo.policies.nova.sampling import guide
from margrpo.policies.nova.schedule import ddpm_tables, flow_tables


def replay(folder: Path) -> list[Check]:
    """Return the comparison of every tensor of a NOVA golden folder with our own numbers (float32).

    Raises:
        MargrpoError: the checkpoint or the golden files are missing, damaged or inconsistent.
    """
    golden = Golden(folder)
    policy = read_nova(folder).eval()
    policy.transformer.video_encoder.patch_embed.requires_grad_(True)  # the reference lists its zero gradient
    check_schedules(golden, policy)
    check_modules(golden, policy)
    check_losses(golden, policy)
    check_rollouts(golden, policy)
    check_released(golden, policy)
    return golden.finish()


def check_schedules(golden: Golden, policy: NovaPolicy) -> None:
    """Compare commit counts, sigmas, timesteps and the stochastic flow step."""
    steps = golden.manifest["config"]["ar_steps"]
    golden.equal("num_preds", torch.tensor(policy.ar_schedule(steps)))
    tables = golden.info.get("num_preds_tables", {})
    for name, counts in tables.items():
        tokens, ar_steps = (int(part) for part in name.removeprefix("N").split("_steps"))
        ours = torch.tensor(commit_counts(tokens, ar_steps))
        golden.compare(f"info.num_preds_tables.{name}", ours, torch.tensor(counts), 1e-12, 0.0)
    for shift, key in ((1, "flow_scheduler"), (3, "flow_scheduler_shift3")):
        prefix = f"sched.flow_shift{shift}"
        if f"{prefix}.sigmas" not in golden:
            continue
        config = {**golden.manifest[key], "_class_name": "FlowMatchEulerDiscreteScheduler"}
        sigmas, scale = flow_tables(config, len(golden[f"{prefix}.sigmas"]) - 1)
        golden.close(f"{prefix}.sigmas", sigmas)
        golden.close(f"{prefix}.timesteps", FlowSDE(sigmas, 0.7, "stochastic", scale).times)
        golden.close(f"{prefix}.sigmas25", flow_tables(config, 25)[0])
    if "sched.ddpm.timesteps" in golden:
        config = {**golden.manifest["ddpm_scheduler"], "_class_name": "DDPMScheduler"}
        alphas_cumprod, timesteps = ddpm_tables(config, len(golden["sched.ddpm.timesteps"]))
        golden.close("sched.ddpm.alphas_cumprod", alphas_cumprod)
        golden.equal("sched.ddpm.timesteps", torch.tensor(timesteps[::-1]))
    _check_flow_step(golden, policy)


def _check_flow_step(golden: Golden, policy: NovaPolicy) -> None:
    if not golden.has("sde.sample", "sde.model_output", "sde.noise"):
        return
    use_flow(golden, policy)
    steps = policy.transition.steps
    # [.., C, H, W] -> channels last, as transitions have them
    x, v, noise = (golden[f"sde.{name}"].movedim(1, -1) for name in ("sample", "model_output", "noise"))
    kernels = [policy.transition.kernel(step, x, v) for step in range(steps)]
    back = [(k.mean.movedim(-1, 1), k.sample(noise).movedim(-1, 1)) for k in kernels]
    golden.close("sde.mean", torch.stack([mean for mean, _ in back]))
    golden.close("sde.prev", torch.stack([following for _, following in back]))
    std = torch.stack([kernel.std.expand(len(x)) for kernel in kernels])
    golden.close("sde.std", std[..., None, None, None])
    drawn = torch.stack([k.log_prob(k.sample(noise)).movedim(-1, 1) for k in kernels])
    golden.of_maximum("sde.logp", drawn, 5e-4)
    given = torch.stack([k.log_prob(noise).movedim(-1, 1) for k in kernels])
    golden.of_maximum("sde.logp_given_prev", given, 5e-4)


@torch.no_grad()
def check_modules(golden: Golden, policy: NovaPolicy) -> None:
    """Compare padding, positions, patches, head and guidance."""
    config, transformer = policy.config, policy.transformer
    text = policy.pad(prompt_states(golden))["text"]
    null = policy.pad([torch.zeros(0, 0)] * len(text))["text"]
    golden.close("text.padded_cond", text)
    golden.close("text.padded_uncond", null)
    golden.close("text.c", transformer.text_embed(torch.cat([text, null])))
    golden.close("pos.image_space", space_embedding(config.grid, config.width))
    golden.close("pos.video_space", space_embedding(config.video_grid, config.width))
    golden.close("pos.image_pos", coordinates(config.grid)[None])
    golden.close("pos.video_pos_T2", coordinates(config.video_grid, 2)[None])
    if not config.rotary:
        golden.close("pos.time_T1", transformer.video_pos_embed(1, config.frames))
        golden.close("pos.time_T2", transformer.video_pos_embed(2, config.frames))
    if "pos.q_image" in golden:
        q, places = golden["pos.q_image"], coordinates(config.grid)
        front = places.new_zeros(q.shape[2] - len(places), 3)
        turn = rotation(torch.cat([front, places]), config.rotary_split)
        golden.close("pos.q_image_rot", rotate(q, *turn))
    if "lat.x" in golden:
        tokens = patchify(golden["lat.x"], config.patch)
        video = patchify(golden["lat.x"], 2 * config.patch)
        golden.close("lat.patchify", tokens)
        golden.close("lat.patch_embed_image", transformer.image_encoder.patch_embed(tokens))
        golden.close("lat.patch_embed_video", transformer.video_encoder.patch_embed(video))
    _check_head(golden, policy)
    if "cfg.in" in golden:
        conditional, unconditional = golden["cfg.in"].chunk(2)
        golden.close("cfg.g5", guide(conditional, unconditional, 5.0))
        golden.close("cfg.g5_renorm07", guide(conditional, unconditional, 5.0, 0.7))


def _check_head(golden: Golden, policy: NovaPolicy) -> None:
    if not golden.has("head.x_t", "head.z", "head.t"):
        return
    x, z = patchify(golden["head.x_t"], policy.config.patch), golden["head.z"]

    def run(x: Tensor, t: Tensor, z: Tensor) -> Tensor:
        return policy.head(x.flatten(0, 1), t.flatten(), z.flatten(0, 1)).view_as(x)

    times = golden["head.t"][:, None].expand(x.shape[:2])
    golden.close("head.out", run(x, times, z))
    if "head.t_tok" in golden:
        golden.close("head.out_tok", run(x, golden["head.t_tok"], z))
    if "head.out_pred" in golden:
        columns = golden["order"][:, : x.shape[1] // 2, None]
        part = run(x.take_along_dim(columns, 1), times[:, : x.shape[1] // 2], z.take_along_dim(columns, 1))
        golden.close("head.out_pred", x.scatter(1, columns.expand_as(part), part))


def check_losses(golden: Golden, policy: NovaPolicy) -> None:
    """Compare the pretraining losses of baaivision/NOVA (flow and DDPM) and their gradients."""
    for kind in ("flow", "ddpm"):
        name = f"loss.{kind}"
        if not golden.has(name, "loss.x0", "loss.mask_rand", "loss.noise", "loss.t_index"):
            continue
        policy.zero_grad(set_to_none=True)
        order = golden["loss.mask_rand"][..., 0].argsort(dim=1)
        ratio = golden.number(name, r"mask ratio ([\d.]+)", 0.78)
        visible = order[:, : round((1 - ratio) * policy.tokens)]
        known = torch.zeros_like(order, dtype=torch.bool).scatter(1, visible, True)
        golden.equal(f"{name}.mask", known.logical_not()[..., None].float())
        value = pretraining_loss(golden, policy, known, kind)
        golden.close(name, value, atol=0.0)
        value.backward()
        golden.gradients(name, dict(policy.transformer.named_parameters()))


def pretraining_loss(golden: Golden, policy: NovaPolicy, known: Tensor, kind: str) -> Tensor:
    """Return the masked denoising loss; x0 and z are repeated for every copy of the noise, copy-major."""
    condition = policy.prefill(policy.pad(prompt_states(golden)))
    x0, noise, index = (golden[f"loss.{name}"] for name in ("x0", "noise", "t_index"))
    x0 = patchify(x0, policy.config.patch)
    copies = len(noise) // len(x0)
    z = policy.backbone(x0, known, condition).repeat(copies, 1, 1)
    x0, unknown = x0.repeat(copies, 1, 1), known.logical_not().repeat(copies, 1)
    if kind == "flow":
        t = golden.manifest["flow_scheduler"]["num_train_timesteps"] - index
        sigma = (t / golden.manifest["flow_scheduler"]["num_train_timesteps"])[..., None]
        x, target = sigma * noise + (1 - sigma) * x0, noise - x0
    else:
        t = index
        config = {**golden.manifest["ddpm_scheduler"], "_class_name": "DDPMScheduler"}
        signal = ddpm_tables(config, 2)[0][index][..., None]
        x, target = signal.sqrt() * x0 + (1 - signal).sqrt() * noise, noise
    output = policy.head(x.flatten(0, 1), t.flatten().float(), z.flatten(0, 1)).view_as(x)
    error = (output - target).square().mean(-1)
    return (error * unknown).sum() / (unknown.sum() + 1e-5)
