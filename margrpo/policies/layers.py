"""Building blocks of MAR-type policies: timestep features, the AdaLN diffusion head, attention blocks.

Attribute names of the head are those of LTH14/mar `models/diffloss.py` (SimpleMLPAdaLN): its weights load as
they are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


def timestep_features(t: Tensor, dimension: int, max_period: float = 10_000.0) -> Tensor:
    """Return [cos(t f_i), sin(t f_i)], f_i = max_period^(-2i / dimension), as [N, dimension] for t [N].

    `dimension` is even. Source: LTH14/mar `TimestepEmbedder`.
    """
    half = dimension // 2
    exponents = torch.arange(half, dtype=torch.float32, device=t.device) * (-math.log(max_period) / half)
    angles = t[:, None] * exponents.exp()
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Return x (1 + scale) + shift."""
    return torch.addcmul(x + shift, x, scale)


class TimestepEmbedder(nn.Module):
    """Two-layer MLP of the timestep features: t [N] -> [N, width]."""

    def __init__(self, width: int, features: int = 256) -> None:
        super().__init__()
        self.features = features
        self.mlp = nn.Sequential(nn.Linear(features, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, t: Tensor) -> Tensor:
        """Return the embedding [N, width] of t [N]."""
        features = timestep_features(t, self.features)
        return self.mlp(features.to(next(self.mlp.parameters()).dtype))


class AdaLNBlock(nn.Module):
    """Residual MLP block whose norm is shifted, scaled and gated by the condition."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_ln = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 3 * width))

    def forward(self, u: Tensor, y: Tensor) -> Tensor:
        """Return the next state [N, width] of u [N, width] under the condition y [N, width]."""
        shift, scale, gate = self.adaLN_modulation(y).chunk(3, dim=-1)
        return torch.addcmul(u, gate, self.mlp(modulate(self.in_ln(u), shift, scale)))


class AdaLNOutput(nn.Module):
    """Norm without affine, shifted and scaled by the condition, then a linear map."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.linear = nn.Linear(width, outputs)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, u: Tensor, y: Tensor) -> Tensor:
        """Return [N, outputs] for u and y [N, width]."""
        shift, scale = self.adaLN_modulation(y).chunk(2, dim=-1)
        return self.linear(modulate(self.norm_final(u), shift, scale))


class AdaLNHead(nn.Module):
    """Diffusion head of MAR: an MLP on one token, conditioned on timestep and z.

    Args:
        channels: C of the noisy token.
        outputs: channels of the prediction (C, or 2C with variances).
        condition: D of z.
        width: width of the MLP.
        depth: AdaLN blocks.
        features: timestep features (even).

    Source: LTH14/mar `models/diffloss.py`; Li et al. 2024, section 4.2.
    """

    def __init__(
        self, channels: int, outputs: int, condition: int, width: int, depth: int, features: int = 256
    ) -> None:
        super().__init__()
        self.time_embed = TimestepEmbedder(width, features)
        self.cond_embed = nn.Linear(condition, width)
        self.input_proj = nn.Linear(channels, width)
        self.res_blocks = nn.ModuleList(AdaLNBlock(width) for _ in range(depth))
        self.final_layer = AdaLNOutput(width, outputs)

    def forward(self, x: Tensor, t: Tensor, z: Tensor) -> Tensor:
        """Return the prediction [N, outputs] for x [N, C], t [N] on the scale of the features, z [N, D]."""
        y = self.time_embed(t) + self.cond_embed(z)
        u = self.input_proj(x)
        for block in self.res_blocks:
            u = block(u, y)
        return self.final_layer(u, y)

    def zero_outputs(self) -> None:
        """Zero the modulations and the last layer: blocks start as the identity, the prediction as 0."""
        for layer in [*self.res_blocks, self.final_layer]:
            nn.init.zeros_(layer.adaLN_modulation[1].weight)
            nn.init.zeros_(layer.adaLN_modulation[1].bias)
        nn.init.zeros_(self.final_layer.linear.weight)
        nn.init.zeros_(self.final_layer.linear.bias)


class AttentionBlock(nn.Module):
    """Pre-norm transformer block: x + Proj(Attention(LN x)), then x + MLP(LN x); exact GELU."""

    def __init__(self, width: int, heads: int, mlp_ratio: float = 4.0) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        hidden = int(width * mlp_ratio)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor, mask: Tensor | None = None, start: int = 0) -> Tensor:
        """Return the next states of the positions from `start` on, [B, S - start, width].

        Args:
            x: [B, S, width].
            mask: added to the attention logits, broadcastable to [B, heads, S, S] (-inf = not attended).
            start: earlier positions are attended to but not updated (not needed after the last block).
        """
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q[:, :, start:], k, v, attn_mask=mask)
        x = x[:, start:] + self.proj(attended.transpose(1, 2).reshape(batch, length - start, width))
        return x + self.mlp(self.norm2(x))
