"""The KL-16 autoencoder of MAR and Harmon through diffusers' AutoencoderKL, under its released key names.

Source: LTH14/mar `models/vae.py` (the LDM autoencoder; its decoder has attention in the middle alone).
"""

from __future__ import annotations

import re
from typing import Any

import torch
from diffusers import AutoencoderKL
from diffusers.models.resnet import ResnetBlock2D
from pydantic import Field, model_validator
from torch import Tensor, nn

from margrpo.config import Section
from margrpo.policies.released import Cause, Weights, load_strictly

_CAUSES = [
    Cause("attentions", "vae.attn_resolutions", "vae.ch_mult"),
    Cause("", "vae.ch_mult and vae.num_res_blocks", "vae.ch, vae.ch_mult and vae.z_channels"),
]
_ATTENTION = {"q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "to_out.0", "norm": "group_norm"}


class VaeArchitecture(Section):
    """Constructor arguments of the released autoencoder; the defaults are KL-16."""

    ch: int = Field(128, ge=32, le=1024, multiple_of=32, description="base width")
    ch_mult: list[int] = Field([1, 1, 2, 2, 4], min_length=1, max_length=8, description="width per level")
    num_res_blocks: int = Field(2, ge=1, le=8, description="residual blocks per level")
    attn_resolutions: list[int] = Field([16], max_length=8, description="encoder levels with attention")
    resolution: int = Field(256, ge=8, le=4096, description="image side that attn_resolutions refers to")
    z_channels: int = Field(16, ge=1, le=256, description="latent channels")
    note: str = Field("", description="ignored")

    @model_validator(mode="after")
    def widths_are_positive(self) -> VaeArchitecture:
        """Refuse levels without width."""
        if min(self.ch_mult) < 1 or max(self.ch_mult) > 64:
            raise ValueError(f"ch_mult\0{self.ch_mult}\0factors 1..64")
        return self


class KlVae(nn.Module):
    """Autoencoder on the meta device until `load`; frozen.

    Args:
        architecture: the sizes. scale: tokens are latents * scale (0.2325 in the released code).
        encoder: whether the encoder is there (a policy needs only the decoder).
    """

    def __init__(self, architecture: VaeArchitecture, scale: float, encoder: bool) -> None:
        super().__init__()
        self.architecture, self.scale = architecture, scale
        with torch.device("meta"):
            self.model: Any = _build(architecture, encoder)
        self.requires_grad_(False)

    def load(self, weights: Weights) -> None:
        """Read released weights (keys of `kl16.ckpt["model"]`); MargrpoError if they do not fit."""
        levels = len(self.model.config.up_block_types)
        if self.model.encoder is None:
            spare = [n for n in weights.shapes if n.startswith(("encoder.", "quant_conv."))]
            weights = weights.without(spare)
        load_strictly(
            self.model, _squeezed(weights.rename(lambda name: diffusers_name(name, levels))), _CAUSES
        )
        self.requires_grad_(False)

    def decode(self, latents: Tensor) -> Tensor:
        """Return images [B, 3, H, W] in about [-1, 1], not clamped, of unscaled latents [B, z, h, w]."""
        return self.model.decode(latents).sample

    def moments(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log variance (clamped to -30..20) [B, z, h, w] of images in [-1, 1]."""
        mean, log_variance = self.raw_moments(images).chunk(2, dim=1)
        return mean, log_variance.clamp(-30.0, 20.0)

    def raw_moments(self, images: Tensor) -> Tensor:
        """Return mean | log variance [B, 2z, h, w], not clamped."""
        return self.model.quant_conv(self.model.encoder(images))


def has_encoder(weights: Weights) -> bool:
    """Return whether a state dict carries the encoder."""
    return any(name.startswith("encoder.") for name in weights.shapes)


def diffusers_name(name: str, levels: int) -> str:
    """Return the AutoencoderKL name of a released key, for `levels` resolutions."""
    name = re.sub(r"mid\.block_([12])", lambda m: f"mid_block.resnets.{int(m[1]) - 1}", name)
    name = name.replace("mid.attn_1", "mid_block.attentions.0")
    name = re.sub(r"down\.(\d+)\.block\.", r"down_blocks.\1.resnets.", name)
    name = re.sub(r"down\.(\d+)\.attn\.", r"down_blocks.\1.attentions.", name)
    name = re.sub(r"down\.(\d+)\.downsample", r"down_blocks.\1.downsamplers.0", name)
    name = re.sub(r"up\.(\d+)\.block\.", lambda m: f"up_blocks.{levels - 1 - int(m[1])}.resnets.", name)
    name = re.sub(r"up\.(\d+)\.upsample", lambda m: f"up_blocks.{levels - 1 - int(m[1])}.upsamplers.0", name)
    if ".attentions." in name:
        start, part, kind = name.rsplit(".", 2)
        name = f"{start}.{_ATTENTION.get(part, part)}.{kind}"
    return name.replace("nin_shortcut", "conv_shortcut").replace("norm_out", "conv_norm_out")


def _build(architecture: VaeArchitecture, encoder: bool) -> nn.Module:
    widths = [architecture.ch * factor for factor in architecture.ch_mult]
    down = [
        "AttnDownEncoderBlock2D"
        if architecture.resolution // 2**level in architecture.attn_resolutions
        else "DownEncoderBlock2D"
        for level in range(len(widths))
    ]
    model: Any = AutoencoderKL(
        down_block_types=tuple(down),
        up_block_types=("UpDecoderBlock2D",) * len(widths),
        block_out_channels=tuple(widths),
        layers_per_block=architecture.num_res_blocks,
        latent_channels=architecture.z_channels,
        norm_num_groups=32,
    )
    if not encoder:
        model.encoder = model.quant_conv = None
        return model
    if architecture.ch_mult[0] != 1:  # AutoencoderKL ties the first convolution to the first level's width
        model.encoder.conv_in = nn.Conv2d(3, architecture.ch, 3, padding=1)
        model.encoder.down_blocks[0].resnets[0] = ResnetBlock2D(
            in_channels=architecture.ch,
            out_channels=widths[0],
            temb_channels=None,  # type: ignore[arg-type]
            eps=1e-6,
            groups=32,
        )
    return model


def _squeezed(weights: Weights) -> Weights:
    """Return the weights with attention's 1x1 convolutions as the matrices that diffusers expects."""

    def is_matrix(name: str) -> bool:
        return ".attentions." in name and weights.shapes[name][2:] == [1, 1]

    shapes = {n: shape[:2] if is_matrix(n) else shape for n, shape in weights.shapes.items()}
    readers = {n: (lambda n=n: weights.read(n).reshape(shapes[n])) for n in shapes}
    return Weights(weights.source, shapes, readers)
