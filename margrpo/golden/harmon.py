"""Replay of Harmon's reference vectors: prompt, backbone, rollouts, loss, VAE and the released GRPO code."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, Qwen2Model

from margrpo.golden.chains import LOOSE, TIGHT, pretraining_loss, replay_rollout
from margrpo.golden.harmon_released import replay_objective, replay_sampler
from margrpo.golden.mar import replay_tables
from margrpo.golden.vectors import Check, Vectors
from margrpo.policies.base import Condition
from margrpo.policies.harmon import HarmonPolicy, read_harmon
from margrpo.policies.masked import known_index

# What older versions of transformers call the cache of `Qwen2Model.forward`.
_CACHE = "cache" if "cache" in inspect.signature(Qwen2Model.forward).parameters else "past_key_values"


def replay(folder: Path) -> list[Check]:
    """Return a check for every tensor of a golden folder of Harmon.

    Raises:
        MargrpoError: the folder is incomplete or does not fit its config.
    """
    policy = read_harmon(folder)
    vectors = Vectors(folder / "vectors.safetensors")
    text = Condition({"ids": vectors["text/input_ids"], "mask": vectors["text/attention_mask"]})
    replay_tables(vectors, policy.architecture.num_sampling_steps)
    with torch.no_grad():
        _prompt(vectors, policy, text)
        _backbone(vectors, policy, text)
        for match in vectors.matching(r"rollout/([^/]+)/orders"):
            tokens = replay_rollout(vectors, f"rollout/{match[1]}", policy, text)
            if policy.vae is not None:
                image = policy.vae.decode(policy.latents(tokens) / policy.vae.scale)
                vectors.check(f"rollout/{match[1]}/image", image, LOOSE)
        if "mg/orders" in vectors:
            replay_sampler(vectors, policy, text)
        _loss(vectors, policy, text)
        if "vae/z" in vectors and policy.vae is not None:
            vectors.check("vae/decode", policy.vae.decode(vectors["vae/z"]), TIGHT)
    if "train/rewards" in vectors:
        replay_objective(vectors, policy, text)
    return vectors.finish()


def _prompt(vectors: Vectors, policy: HarmonPolicy, text: Condition) -> None:
    """Check the language model alone: the released code's prompt pass, with its key-value cache."""
    if "text/prefill_hidden" not in vectors:
        return
    cache = DynamicCache(config=policy.llm.config)
    hidden = policy.llm(input_ids=text["ids"], use_cache=True, **{_CACHE: cache}).last_hidden_state
    vectors.check("text/prefill_hidden", hidden, TIGHT)
    layers: Any = cache.layers
    for i, layer in enumerate(layers):
        vectors.check(f"text/prefill_k{i}", layer.keys, TIGHT)
        vectors.check(f"text/prefill_v{i}", layer.values, TIGHT)


def _backbone(vectors: Vectors, policy: HarmonPolicy, text: Condition) -> None:
    mar = policy.mar
    vectors.check("enc/pos_enc", mar.positions(mar.encoder_pos_embed_learned), TIGHT)
    vectors.check("enc/pos_dec", mar.positions(mar.decoder_pos_embed_learned), TIGHT)
    vectors.check("enc/pos_diff", mar.positions(mar.diffusion_pos_embed_learned), TIGHT)
    tokens, orders = vectors["enc/tokens"], vectors["enc/orders"]
    for match in vectors.matching(r"enc/([^/]+)/mask"):
        mask, prefix = vectors[match[0]], f"enc/{match[1]}"
        ordered = torch.zeros_like(mask).scatter(1, orders[:, : int(mask[0].sum())], 1.0)
        vectors.check(match[0], ordered, 0.0)
        index = known_index(mask == 0)
        states = mar.encode(tokens, index, mar.fake_latent.expand(len(tokens), -1))
        vectors.check(f"{prefix}/x_enc", states, TIGHT)
        vectors.check(f"{prefix}/llm_in", policy.project(states), TIGHT)
        vectors.check(f"{prefix}/x_fused", policy.fuse(states, text), TIGHT)
        vectors.check(f"{prefix}/z", policy.backbone(tokens, mask == 0, text), TIGHT)


def _loss(vectors: Vectors, policy: HarmonPolicy, text: Condition) -> None:
    if "loss/value" not in vectors:
        return
    mask = vectors["loss/mask"]
    tokens = vectors["enc/tokens"][: len(mask)]
    z = policy.backbone(tokens, mask == 0, text.select(slice(0, len(mask))))
    value, _, _ = pretraining_loss(policy, z, tokens, vectors["loss/t"], vectors["loss/noise"], mask)
    vectors.check("loss/value", value, TIGHT)
