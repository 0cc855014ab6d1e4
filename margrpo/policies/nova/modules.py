"""Modules of NOVA under the attribute names of its checkpoints (`transformer/*.safetensors`)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from margrpo.policies.layers import modulate, timestep_features
from margrpo.policies.nova.positions import rotate, time_features

Rotation = tuple[Tensor, Tensor]


class PatchEmbed(nn.Module):
    """The patch convolution as a linear map of patchified tokens (equal: stride = kernel size)."""

    def __init__(self, channels: int, width: int, patch: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, width, patch, stride=patch)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return [.., width] of tokens [.., p * p * channels], channel fastest."""
        weight = self.proj.weight.permute(0, 2, 3, 1).flatten(1)
        return functional.linear(tokens, weight, self.proj.bias)


class Mlp(nn.Module):
    """fc2(activation(fc1(x)))."""

    def __init__(self, inputs: int, hidden: int, outputs: int, activation: nn.Module) -> None:
        super().__init__()
        self.fc1 = nn.Linear(inputs, hidden)
        self.fc2 = nn.Linear(hidden, outputs)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """Return [.., outputs] of x [.., inputs]."""
        return self.fc2(self.activation(self.fc1(x)))


class Attention(nn.Module):
    """Multi-head self-attention with optional rotary positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, turn: Rotation | None, mask: Tensor | None) -> Tensor:
        """Return [B, S, width]; see `Block.forward`."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if turn is not None:
            q, k = rotate(q, *turn), rotate(k, *turn)
        attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.proj(attended.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Transformer block normed after its branches: x + LN(Attention(x)), then x + LN(MLP(x))."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width, 4 * width, width, nn.GELU())

    def forward(self, x: Tensor, turn: Rotation | None = None, mask: Tensor | None = None) -> Tensor:
        """Return the next states [B, S, width].

        Args:
            x: [B, S, width]. turn: cos and sin, each broadcastable to [B, heads, S, d / 2].
            mask: bool, broadcastable to [B, heads, S, S]; False = not attended to.
        """
        x = x + self.norm1(self.attn(x, turn, mask))
        return x + self.norm2(self.mlp(x))


class Encoder(nn.Module):
    """Patch embedding, blocks and final norm of the video or the image transformer."""

    def __init__(self, channels: int, width: int, heads: int, depth: int, patch: int) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(channels, width, patch)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)


class TextEmbed(nn.Module):
    """Projection of the language model's states, and the table that pads them."""

    weight: Tensor

    def __init__(self, text_dim: int, width: int, rows: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(rows, text_dim))
        self.proj = nn.Linear(text_dim, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, text: Tensor) -> Tensor:
        """Return text tokens [B, L, width] of padded states [B, L, text_dim]."""
        return self.norm(self.proj(text))

    def pad(self, states: Iterable[Tensor], length: int) -> Tensor:
        """Return [B, length, text_dim]: each prompt's states [n, text_dim], then rows n.. of the table."""
        table = self.weight[:length]
        return torch.stack([torch.cat([part[:length].to(table), table[len(part) :]]) for part in states])


class MaskEmbed(nn.Module):
    """The learned token of an unknown position and that of a frame to generate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bos_token = nn.Parameter(torch.empty(1, width))
        self.mask_token = nn.Parameter(torch.empty(1, width))


class TimeEmbed(nn.Module):
    """Time embedding of frames, for models with absolute positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.time_proj = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.norm = nn.LayerNorm(width)

    def forward(self, frames: int, base: int) -> Tensor:
        """Return [frames, 1, width] for the positions j * base / frames."""
        weight = self.norm.weight
        return self.norm(self.time_proj(time_features(frames, base, weight.device).to(weight)))[:, None]


class TimeConditionEmbed(nn.Module):
    """What modulates the head: MLP(z) + MLP(features of the timestep)."""

    def __init__(self, condition: int, width: int) -> None:
        super().__init__()
        self.timestep_proj = Mlp(256, width, width, nn.SiLU())
        self.condition_proj = Mlp(condition, width, width, nn.SiLU())

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        """Return [N, width] for t [N] in [0, 1000] and z [N, condition]."""
        return self.condition_proj(z) + self.timestep_proj(timestep_features(t, 256).to(z))


class Modulation(nn.Module):
    """Linear map of SiLU(u) to scales and shifts of a norm without affine."""

    def __init__(self, width: int, parts: int) -> None:
        super().__init__()
        self.parts = parts
        self.proj = nn.Linear(width, parts * width)
        self.norm = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)

    def forward(self, h: Tensor, u: Tensor) -> tuple[Tensor, ...]:
        """Return LN(h) (1 + scale) + shift and the remaining parts (the gate), each [N, width]."""
        scale, shift, *rest = self.proj(functional.silu(u)).chunk(self.parts, dim=-1)
        return modulate(self.norm(h), shift, scale), *rest


class HeadBlock(nn.Module):
    """Gated residual MLP block of the diffusion head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = Modulation(width, 3)
        self.proj = Mlp(width, width, width, nn.SiLU())
        self.norm2 = nn.LayerNorm(width)

    def forward(self, h: Tensor, u: Tensor) -> Tensor:
        """Return the next state [N, width] of h [N, width] under u [N, width]."""
        modulated, gate = self.norm1(h, u)
        return h + gate * self.norm2(self.proj(modulated))


class DiffusionHead(nn.Module):
    """Diffusion MLP on single tokens; tokens do not interact."""

    def __init__(self, channels: int, condition: int, width: int, depth: int, patch: int) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(channels, width, patch)
        self.time_cond_embed = TimeConditionEmbed(condition, width)
        self.blocks = nn.ModuleList(HeadBlock(width) for _ in range(depth))
        self.norm = Modulation(width, 2)
        self.head = nn.Linear(width, patch * patch * channels)

    def forward(self, x: Tensor, t: Tensor, z: Tensor) -> Tensor:
        """Return the prediction [N, P] for noisy tokens x [N, P], t [N] in [0, 1000], z [N, D]."""
        u = self.time_cond_embed(t, z)
        h = self.patch_embed(x)
        for block in self.blocks:
            h = block(h, u)
        return self.head(self.norm(h, u)[0])
