"""Replay of MAR's reference vectors: tables, backbone, head, transitions, rollouts, loss, gradients, VAE."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from margrpo.ddpm import respace
from margrpo.golden.chains import (
    LOOSE,
    TIGHT,
    guided_rows,
    pretraining_loss,
    released_chain,
    replay_rollout,
    transition_of,
)
from margrpo.golden.vectors import Check, Vectors
from margrpo.policies.base import Condition
from margrpo.policies.mar import MarPolicy, read_mar, read_vae
from margrpo.policies.masked import spaced_ddpm
from margrpo.policies.released import read_json

_TABLE = 1e-8  # float64 tables: rounding of the schedule's differences alone
_LAST = "k = 0 is deterministic here: no spread, no log-prob"


def replay(folder: Path) -> list[Check]:
    """Return a check for every tensor of a golden folder of MAR.

    Raises:
        MargrpoError: the folder is incomplete or does not fit its config.
    """
    policy = read_mar(folder)
    vectors = Vectors(folder / "vectors.safetensors")
    labels = Condition({"labels": vectors["enc/labels"]})
    null = Condition({"labels": torch.full_like(vectors["enc/labels"], -1)})
    replay_tables(vectors, policy.architecture.num_sampling_steps)
    with torch.no_grad():
        _backbone(vectors, policy, labels, null)
        _head(vectors, policy)
        _steps(vectors, policy)
        for match in vectors.matching(r"rollout/([^/]+)/orders"):
            first = null if match[1].startswith("null") else labels
            tokens = replay_rollout(vectors, f"rollout/{match[1]}", policy, Condition.join([first, null]))
            vectors.check(f"rollout/{match[1]}/latents", policy.latents(tokens), LOOSE)
        _autoencoder(vectors, folder)
    _loss(vectors, policy, labels)
    return vectors.finish()


def replay_tables(vectors: Vectors, spacing: str) -> None:
    """Check the respaced tables: `train` has all steps, `gen` the config's spacing, `gen25` 25 steps."""
    for match in vectors.matching(r"sched/([^/]+)/timestep_map"):
        label = match[1]
        count = re.search(r"\d+$", label)
        wanted = "1000" if label == "train" else (count[0] if count else spacing)
        tables = spaced_ddpm(wanted).tables
        prefix = f"sched/{label}"
        vectors.check(f"{prefix}/timestep_map", torch.tensor(respace(wanted)), 0.0)
        for name, value in (
            ("betas", tables.betas),
            ("alphas_cumprod", tables.alphas_cumprod),
            ("posterior_mean_coef1", tables.x0_factor),
            ("posterior_mean_coef2", tables.x_factor),
            ("posterior_log_variance_clipped", tables.log_variance),
            ("sqrt_recip_alphas_cumprod", (1 / tables.alphas_cumprod).sqrt()),
            ("sqrt_recipm1_alphas_cumprod", (1 / tables.alphas_cumprod - 1).sqrt()),
        ):
            vectors.check(f"{prefix}/{name}", value, _TABLE)


def _backbone(vectors: Vectors, policy: MarPolicy, labels: Condition, null: Condition) -> None:
    tokens, latents, orders = vectors["enc/tokens"], vectors["enc/latents"], vectors["enc/orders"]
    vectors.check("enc/tokens", policy.patches(latents), 0.0)
    vectors.check("enc/unpatchify", policy.latents(tokens), 0.0)
    for match in vectors.matching(r"enc/([^/]+)/mask"):
        mask = vectors[match[0]]
        ordered = torch.zeros_like(mask).scatter(1, orders[:, : int(mask[0].sum())], 1.0)
        vectors.check(match[0], ordered, 0.0)
        known = mask == 0
        index = known.nonzero()[:, 1].view(len(known), -1)
        for name, condition in (("label", labels), ("null", null)):
            states = policy.mar.encode(tokens, index, policy.buffer(condition))
            vectors.check(f"enc/{match[1]}/{name}/x", states, TIGHT)
            vectors.check(f"enc/{match[1]}/{name}/z", policy.backbone(tokens, known, condition), TIGHT)


def _head(vectors: Vectors, policy: MarPolicy) -> None:
    x, t, z = vectors["head/x_t"], vectors["head/t"], vectors["head/z"]
    vectors.check("head/time_embed", policy.mar.denoiser.time_embed(t), TIGHT)
    vectors.check("head/out", policy.head(x, t, z), TIGHT)
    for match in vectors.matching(r"head/out_cfg([\d.]+)"):
        vectors.check(match[0], guided_rows(policy, x, t, z, float(match[1])), TIGHT)


def _steps(vectors: Vectors, policy: MarPolicy) -> None:
    x, z = vectors["head/x_t"], vectors["head/z"]
    own = policy.architecture.num_sampling_steps
    for match in vectors.matching(r"(step(\d*))/t"):
        spacing = match[2] or own
        tolerance = LOOSE if match[2] else TIGHT
        rows = len(vectors[match[0]])
        _transition(vectors, policy, match[1], spacing, x[:rows], z[:rows], tolerance)
    if "step_cfg/noise" in vectors:
        _guided_transition(vectors, policy, own)
    for match in vectors.matching(r"chain(\d+)/noise_init"):
        policy.transition = spaced_ddpm(match[1])
        start, noise = vectors[match[0]], vectors[f"chain{match[1]}/noise_steps"]
        chain = released_chain(policy, z[: len(start)], 1.0, start, noise)
        vectors.check(f"chain{match[1]}/xs", chain.following, LOOSE)


def _transition(
    vectors: Vectors, policy: MarPolicy, name: str, spacing: str, x: Tensor, z: Tensor, tolerance: float
) -> None:
    k = vectors[f"{name}/t"]
    policy.transition = spaced_ddpm(spacing)
    ddpm = transition_of(policy)
    step = ddpm.steps - 1 - k
    output = policy.head(x, ddpm.times[step], z)
    vectors.check(f"{name}/mean", ddpm.kernel(step, x, output).mean, tolerance)
    vectors.check(f"{name}/log_variance", ddpm.log_variance(step, output), tolerance)
    vectors.check(f"{name}/pred_xstart", ddpm.predict(step, x, output), tolerance)
    for match in vectors.matching(rf"{name}/sample_T([\d.]+)"):
        kernel = spaced_ddpm(spacing, float(match[1])).kernel(step, x, output)
        sample = kernel.sample(vectors[f"{name}/noise"])
        vectors.check(match[0], sample, tolerance)
        vectors.check_rows(f"{name}/std_T{match[1]}", kernel.std, k > 0, tolerance, _LAST)
        vectors.check_rows(f"{name}/log_prob_T{match[1]}", kernel.log_prob(sample), k > 0, tolerance, _LAST)


def _guided_transition(vectors: Vectors, policy: MarPolicy, spacing: str) -> None:
    k = vectors["step/t"].repeat(2)
    x, z = vectors["head/x_t"], vectors["head/z"]
    policy.transition = spaced_ddpm(spacing)
    ddpm = transition_of(policy)
    step = ddpm.steps - 1 - k
    scales = [float(match[1]) for match in vectors.matching(r"head/out_cfg([\d.]+)")]
    output = guided_rows(policy, x, ddpm.times[step], z, scales[0] if scales else 3.0)
    kernel = ddpm.kernel(step, x, output)
    sample = kernel.sample(vectors["step_cfg/noise"])
    vectors.check("step_cfg/mean", kernel.mean, TIGHT)
    vectors.check("step_cfg/log_variance", ddpm.log_variance(step, output), TIGHT)
    vectors.check("step_cfg/sample", sample, TIGHT)
    vectors.check_rows("step_cfg/log_prob", kernel.log_prob(sample), k > 0, TIGHT, _LAST)


def _loss(vectors: Vectors, policy: MarPolicy, labels: Condition) -> None:
    if "loss/value" not in vectors:
        return
    tokens, mask = vectors["enc/tokens"], vectors["loss/mask"]
    with torch.no_grad():
        z = policy.backbone(tokens, mask == 0, labels)
    vectors.check("loss/z", z, TIGHT)
    z.requires_grad_(True)
    value, error, bound = pretraining_loss(policy, z, tokens, vectors["loss/t"], vectors["loss/noise"], mask)
    vectors.check("loss/value", value, TIGHT)
    vectors.check("loss/mse", error, TIGHT)
    vectors.check("loss/vb", bound, TIGHT)
    value.backward()
    assert z.grad is not None
    vectors.check("loss/grad_z", z.grad, TIGHT)
    for name, parameter in policy.mar.denoiser.named_parameters():
        label = name.replace("final_layer.", "final.").replace(".", "_")
        assert parameter.grad is not None
        vectors.check(f"loss/grad_{label}", parameter.grad, TIGHT)


def _autoencoder(vectors: Vectors, folder: Path) -> None:
    if "vae/z" not in vectors:
        return
    file = folder / "config.json"
    vae = read_vae(folder, read_json(file) if file.is_file() else {}, encoder="vae/image" in vectors)
    if vae is None:
        return
    vectors.check("vae/decode", vae.decode(vectors["vae/z"]), TIGHT)
    if "vae/image" in vectors:
        mean, log_variance = vae.moments(vectors["vae/image"])
        vectors.check("vae/moments", vae.raw_moments(vectors["vae/image"]), TIGHT)
        vectors.check("vae/mean", mean, TIGHT)
        vectors.check("vae/logvar", log_variance, TIGHT)
        sample = mean + (0.5 * log_variance).exp() * vectors["vae/enc_noise"]
        vectors.check("vae/sample", sample, TIGHT)
