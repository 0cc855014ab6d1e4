"""PickScore v1: scaled cosine of a CLIP ViT-H fine-tuned on choices (Kirstain et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from margrpo.config import RewardOptions
from margrpo.rewards import weights
from margrpo.rewards.base import Info, Reward, Specs, register
from margrpo.rewards.clip import HF_FILES, Clip, load_hf
from margrpo.rewards.images import crop_center

REPOSITORY = "yuvalkirstain/PickScore_v1"


class PickScore:
    """exp(logit_scale) times the cosine, raw (some 17 .. 25); Flow-GRPO divides by 26: set `scale: 26`."""

    def __init__(self, clip: Clip, precision: str) -> None:
        self.clip, self.half = clip, precision == "float16"

    def __call__(self, images: Tensor, prompts: Sequence[str], specs: Specs) -> Tensor:
        """Return one score per image."""
        pixels = crop_center(images, self.clip.image_size, round_up=False)
        with torch.autocast(pixels.device.type, torch.float16, enabled=self.half):
            return self.clip.logit_scale() * self.clip.cosine(pixels, prompts)


@register(
    Info(
        "pickscore",
        "PickScore v1, raw (divide by 26 as Flow-GRPO does with scale: 26)",
        "code MIT, weights: none stated",
        files=("config.json",),
        source=f"{REPOSITORY}, in transformers' layout with a CLIP tokenizer",
        repository=REPOSITORY,
        batch_size=32,
    )
)
def pickscore(options: RewardOptions) -> Reward:
    """Return the scorer of a transformers folder."""
    folder = weights.folder("pickscore", options.path, REPOSITORY, HF_FILES)
    return PickScore(load_hf(folder, unescape=False), options.precision)
