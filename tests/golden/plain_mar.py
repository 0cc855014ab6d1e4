"""A second MAR, written as plain functions of a released state dict: reference vectors for sizes of any kind.

It shares no code with the library: loops over single tokens and heads, float64, tables by their definitions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

State = Mapping[str, Tensor]


def random_state(config: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Return a state dict under the released names and shape rules."""
    generator = torch.Generator().manual_seed(seed)
    e, d, w = config["encoder_embed_dim"], config["decoder_embed_dim"], config["diffloss_w"]
    c = config["vae_embed_dim"] * config["patch_size"] ** 2
    length = (config["img_size"] // config["vae_stride"] // config["patch_size"]) ** 2
    rows = config["buffer_size"] + length
    shapes: dict[str, tuple[int, ...]] = {
        "class_emb.weight": (config["class_num"], e),
        "fake_latent": (1, e),
        "mask_token": (1, 1, d),
        "encoder_pos_embed_learned": (1, rows, e),
        "decoder_pos_embed_learned": (1, rows, d),
        "diffusion_pos_embed_learned": (1, length, d),
    }

    def linear(name: str, outputs: int, inputs: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (outputs, inputs), (outputs,)

    def norm(name: str, width: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (width,), (width,)

    linear("z_proj", e, c)
    norm("z_proj_ln", e)
    linear("decoder_embed", d, e)
    norm("encoder_norm", e)
    norm("decoder_norm", d)
    for part, width in (("encoder", e), ("decoder", d)):
        hidden = int(width * config["mlp_ratio"])
        for i in range(config[f"{part}_depth"]):
            at = f"{part}_blocks.{i}"
            norm(f"{at}.norm1", width)
            norm(f"{at}.norm2", width)
            linear(f"{at}.attn.qkv", 3 * width, width)
            linear(f"{at}.attn.proj", width, width)
            linear(f"{at}.mlp.fc1", hidden, width)
            linear(f"{at}.mlp.fc2", width, hidden)
    head = "diffloss.net"
    linear(f"{head}.time_embed.mlp.0", w, 256)
    linear(f"{head}.time_embed.mlp.2", w, w)
    linear(f"{head}.cond_embed", w, d)
    linear(f"{head}.input_proj", w, c)
    for i in range(config["diffloss_d"]):
        norm(f"{head}.res_blocks.{i}.in_ln", w)
        linear(f"{head}.res_blocks.{i}.mlp.0", w, w)
        linear(f"{head}.res_blocks.{i}.mlp.2", w, w)
        linear(f"{head}.res_blocks.{i}.adaLN_modulation.1", 3 * w, w)
    linear(f"{head}.final_layer.linear", 2 * c, w)
    linear(f"{head}.final_layer.adaLN_modulation.1", 2 * w, w)
    return {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def backbone(
    state: State, config: Mapping[str, Any], tokens: Tensor, mask: Tensor, condition: Tensor
) -> Tensor:
    """Return z [L, D] of ONE image: tokens [L, C], mask [L] (1 = unknown), condition [E]."""
    buffer = config["buffer_size"]
    rows = [condition for _ in range(buffer)] + [linear(state, "z_proj", token) for token in tokens]
    states = torch.stack(rows) + state["encoder_pos_embed_learned"][0]
    states = norm(state, "z_proj_ln", states)
    kept = list(range(buffer)) + [buffer + i for i in range(len(tokens)) if mask[i] == 0]
    h = states[kept]
    for i in range(config["encoder_depth"]):
        h = block(state, f"encoder_blocks.{i}", h, config["encoder_num_heads"])
    h = linear(state, "decoder_embed", norm(state, "encoder_norm", h))
    full = state["mask_token"][0].expand(buffer + len(tokens), -1).clone()
    for row, position in zip(h, kept, strict=True):
        full[position] = row
    h = full + state["decoder_pos_embed_learned"][0]
    for i in range(config["decoder_depth"]):
        h = block(state, f"decoder_blocks.{i}", h, config["decoder_num_heads"])
    return norm(state, "decoder_norm", h)[buffer:] + state["diffusion_pos_embed_learned"][0]


def head(state: State, x: Tensor, t: int, z: Tensor) -> Tensor:
    """Return [epsilon | v] [2C] of ONE token."""
    frequencies = torch.tensor([math.exp(-math.log(10_000) * i / 128) for i in range(128)]).double()
    features = torch.cat([(t * frequencies).cos(), (t * frequencies).sin()])
    at = "diffloss.net"
    time = linear(state, f"{at}.time_embed.mlp.2", silu(linear(state, f"{at}.time_embed.mlp.0", features)))
    y = time + linear(state, f"{at}.cond_embed", z)
    u = linear(state, f"{at}.input_proj", x)
    for i in range(sum(name.endswith("in_ln.weight") for name in state)):
        name = f"{at}.res_blocks.{i}"
        shift, scale, gate = linear(state, f"{name}.adaLN_modulation.1", silu(y)).chunk(3)
        inner = norm(state, f"{name}.in_ln", u) * (1 + scale) + shift
        u = u + gate * linear(state, f"{name}.mlp.2", silu(linear(state, f"{name}.mlp.0", inner)))
    shift, scale = linear(state, f"{at}.final_layer.adaLN_modulation.1", silu(y)).chunk(2)
    return linear(state, f"{at}.final_layer.linear", standardized(u) * (1 + scale) + shift)


def sample(
    state: State,
    spacing: list[int],
    z: Tensor,
    null: Tensor,
    scale: float,
    noise: list[Tensor],
    temperature: float,
) -> Tensor:
    """Return the token [C] that ONE guided chain ends in; noise: the start, then one draw per step."""
    bars = [alpha_bar(t) for t in spacing]
    x = noise[0]
    for k in reversed(range(len(spacing))):
        bar, previous = bars[k], bars[k - 1] if k else 1.0
        beta = 1 - bar / previous
        conditional, unconditional = head(state, x, spacing[k], z), head(state, x, spacing[k], null)
        size = len(x)
        epsilon = unconditional[:size] + scale * (conditional[:size] - unconditional[:size])
        x0 = (x - math.sqrt(1 - bar) * epsilon) / math.sqrt(bar)
        mean = (
            beta * math.sqrt(previous) / (1 - bar) * x0 + (1 - previous) * math.sqrt(1 - beta) / (1 - bar) * x
        )
        x = mean
        if k:
            share = (conditional[size:] + 1) / 2
            posterior = beta * (1 - previous) / (1 - bar)
            log_variance = share * math.log(beta) + (1 - share) * math.log(posterior)
            x = mean + (0.5 * log_variance).exp() * noise[len(spacing) - k] * temperature
    return x


def alpha_bar(t: int) -> float:
    """Return the cumulative alpha after training step t of the cosine schedule."""

    def curve(u: float) -> float:
        return math.cos((u + 0.008) / 1.008 * math.pi / 2) ** 2

    product = 1.0
    for i in range(t + 1):
        product *= 1 - min(1 - curve((i + 1) / 1000) / curve(i / 1000), 0.999)
    return product


def block(state: State, name: str, h: Tensor, heads: int) -> Tensor:
    """Return the transformer block's output [S, X], head by head."""
    width = h.shape[1]
    qkv = linear(state, f"{name}.attn.qkv", norm(state, f"{name}.norm1", h))
    size = width // heads
    parts = []
    for i in range(heads):
        q, k, v = (qkv[:, part * width + i * size : part * width + (i + 1) * size] for part in range(3))
        parts.append((q @ k.T / math.sqrt(size)).softmax(dim=1) @ v)
    h = h + linear(state, f"{name}.attn.proj", torch.cat(parts, dim=1))
    inner = linear(state, f"{name}.mlp.fc1", norm(state, f"{name}.norm2", h))
    inner = inner * 0.5 * (1 + (inner / math.sqrt(2)).erf())
    return h + linear(state, f"{name}.mlp.fc2", inner)


def linear(state: State, name: str, x: Tensor) -> Tensor:
    return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]


def norm(state: State, name: str, x: Tensor) -> Tensor:
    return standardized(x) * state[f"{name}.weight"] + state[f"{name}.bias"]


def standardized(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def silu(x: Tensor) -> Tensor:
    return x * x.sigmoid()


def write_folder(folder: Path, config: Mapping[str, Any], spacing: list[int], steps: int) -> None:
    """Write a golden folder of MAR: backbone, head and one guided rollout with a linear schedule."""
    state = random_state(config)
    exact = {name: value.double() for name, value in state.items()}
    generator = torch.Generator().manual_seed(1)
    p, channels = config["patch_size"], config["vae_embed_dim"]
    side = config["img_size"] // config["vae_stride"] // p
    length, images = side**2, 2

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    latents = draw(images, channels, side * p, side * p)
    tokens = torch.stack(
        [
            torch.stack(
                [
                    image[:, r * p : (r + 1) * p, q * p : (q + 1) * p].flatten()
                    for r in range(side)
                    for q in range(side)
                ]
            )
            for image in latents
        ]
    )
    labels = torch.tensor([1, 0])
    orders = torch.stack([torch.randperm(length, generator=generator) for _ in range(images)])
    vectors: dict[str, Tensor] = {
        "enc/latents": latents,
        "enc/tokens": tokens,
        "enc/labels": labels,
        "enc/orders": orders,
        "sched/gen/timestep_map": torch.tensor(spacing),
    }
    classes = [exact["class_emb.weight"][label] for label in labels]
    null = exact["fake_latent"][0]
    for name, unknown in (("all", length), ("some", length // 2), ("none", 0)):
        mask = torch.zeros(images, length).scatter(1, orders[:, :unknown], 1.0)
        vectors[f"enc/{name}/mask"] = mask
        for kind, conditions in (("label", classes), ("null", [null, null])):
            rows = zip(tokens.double(), mask, conditions, strict=True)
            z = torch.stack([backbone(exact, config, x, m, c) for x, m, c in rows])
            vectors[f"enc/{name}/{kind}/z"] = z.float()
    width = tokens.shape[-1]
    x_t, z_t, t = draw(4, width), draw(4, config["decoder_embed_dim"]), torch.tensor([0, 999, 37, 500])
    out = torch.stack(
        [head(exact, a.double(), int(b), c.double()) for a, b, c in zip(x_t, t, z_t, strict=True)]
    )
    vectors |= {"head/x_t": x_t, "head/z": z_t, "head/t": t, "head/out": out.float()}
    vectors |= rollout(exact, config, spacing, steps, orders, classes, null, draw)
    save_file({name: value.contiguous() for name, value in vectors.items()}, folder / "vectors.safetensors")
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"mar": dict(config)}))


def rollout(
    state: State,
    config: Mapping[str, Any],
    spacing: list[int],
    steps: int,
    orders: Tensor,
    classes: list[Tensor],
    null: Tensor,
    draw: Any,
) -> dict[str, Tensor]:
    """Return the vectors of a rollout at scale 2, linear, temperature 0.8."""
    images, length = orders.shape
    channels = len(state["z_proj.weight"][0])
    prefix = "rollout/cfg2_linear_T0.8"
    vectors = {f"{prefix}/orders": orders.clone()}
    tokens = torch.zeros(images, length, channels).double()
    masked = [list(order) for order in orders.tolist()]
    for s in range(steps):
        after = max(1, min(len(masked[0]) - 1, math.floor(length * math.cos(math.pi / 2 * (s + 1) / steps))))
        following = [order[:after] for order in orders.tolist()]
        last = s == steps - 1
        scale = 1 + (2 - 1) * (length - after) / length
        chosen = [
            sorted(set(before) if last else set(before) - set(rest))
            for before, rest in zip(masked, following, strict=True)
        ]
        count = sum(map(len, chosen))
        noise = [draw(count, channels)] + [draw(2 * count, channels) for _ in spacing]
        at = f"{prefix}/s{s}"
        vectors |= {
            f"{at}/cfg": torch.tensor(scale, dtype=torch.float64),
            f"{at}/noise_init": noise[0],
            f"{at}/noise_steps": torch.stack(noise[1:]),
            f"{at}/tokens": torch.cat([tokens, tokens]).float(),
        }
        after_tokens, row = tokens.clone(), 0
        for b in range(images):
            mask = torch.zeros(length)
            mask[masked[b]] = 1
            z = backbone(state, config, tokens[b], mask, classes[b])
            z_null = backbone(state, config, tokens[b], mask, null)
            for position in chosen[b]:
                draws = [value[row].double() for value in noise]
                after_tokens[b, position] = sample(
                    state, spacing, z[position], z_null[position], scale, draws, 0.8
                )
                row += 1
        tokens, masked = after_tokens, following
    side, p = math.isqrt(length), config["patch_size"]
    grid = tokens.view(images, side, side, config["vae_embed_dim"], p, p)
    latents = torch.zeros(images, config["vae_embed_dim"], side * p, side * p).double()
    for r in range(side):
        for q in range(side):
            latents[:, :, r * p : (r + 1) * p, q * p : (q + 1) * p] = grid[:, r, q]
    vectors[f"{prefix}/latents"] = latents.float()
    return vectors
