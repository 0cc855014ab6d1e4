"""The scores that publications call CLIPScore: four models and scalings under four names."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from margrpo.config import RewardOptions
from margrpo.rewards import weights
from margrpo.rewards.base import Info, Reward, Specs, register
from margrpo.rewards.clip import HF_FILES, Clip, load_hf
from margrpo.rewards.hps import TOWER, CosineReward
from margrpo.rewards.images import crop_center

VIT_B_32 = "openai/clip-vit-base-patch32"
VIT_L_14 = "openai/clip-vit-large-patch14"


class CroppedCosine:
    """Cosine of image and prompt on a centre crop; `factor` and `clipped` make it Hessel's CLIPScore."""

    def __init__(self, clip: Clip, precision: str, factor: float = 1.0, clipped: bool = False) -> None:
        self.clip, self.half = clip, precision == "float16"
        self.factor, self.clipped = factor, clipped

    def __call__(self, images: Tensor, prompts: Sequence[str], specs: Specs) -> Tensor:
        """Return one score per image."""
        pixels = crop_center(images, self.clip.image_size, round_up=True)
        with torch.autocast(pixels.device.type, torch.float16, enabled=self.half):
            cosine = self.clip.cosine(pixels, prompts)
        return self.factor * (cosine.clamp(min=0) if self.clipped else cosine)


def _info(name: str, summary: str, low: float, high: float, source: str) -> Info:
    files = ("config.json",)
    layout = f"{source}, in transformers' layout with its tokenizer"
    return Info(name, summary, "MIT", low, high, files, layout, source, batch_size=32)


def _clip(name: str, options: RewardOptions, repository: str) -> Clip:
    return load_hf(weights.folder(name, options.path, repository, HF_FILES), unescape=True)


@register(_info("clipscore", "CLIPScore of Hessel et al.: 2.5 max(cos, 0), ViT-B/32", 0.0, 2.5, VIT_B_32))
def clipscore(options: RewardOptions) -> Reward:
    """Return 2.5 max(cos, 0) of ViT-B/32."""
    return CroppedCosine(_clip("clipscore", options, VIT_B_32), options.precision, 2.5, clipped=True)


@register(_info("clip_t2i", "T2I-CompBench's non-spatial score: raw cosine, ViT-B/32", -1.0, 1.0, VIT_B_32))
def clip_t2i(options: RewardOptions) -> Reward:
    """Return the raw cosine of ViT-B/32."""
    return CroppedCosine(_clip("clip_t2i", options, VIT_B_32), options.precision)


@register(_info("clip_l14", "ImageReward's CLIPScore: raw cosine, ViT-L/14", -1.0, 1.0, VIT_L_14))
def clip_l14(options: RewardOptions) -> Reward:
    """Return the raw cosine of ViT-L/14."""
    return CroppedCosine(_clip("clip_l14", options, VIT_L_14), options.precision)


@register(
    _info("clip_h14", "MAR-GRPO's CLIP reward: raw cosine, ViT-H/14, padded as HPSv2", -1.0, 1.0, TOWER)
)
def clip_h14(options: RewardOptions) -> Reward:
    """Return the raw cosine of ViT-H/14 on images padded to a square."""
    return CosineReward(_clip("clip_h14", options, TOWER), options.precision)
