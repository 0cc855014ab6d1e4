"""HPSv2 and HPSv2.1: cosine of a fine-tuned CLIP ViT-H-14 (Wu et al. 2023; tgxs002/HPSv2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from margrpo.config import RewardOptions
from margrpo.rewards import weights
from margrpo.rewards.base import Info, Reward, Specs, register
from margrpo.rewards.clip import Clip, load_open_clip
from margrpo.rewards.images import pad_longest
from margrpo.rewards.tokenizers import CLIP_FILES

REPOSITORY = "xswu/HPSv2"
TOWER = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
FILES = {"hpsv2": "HPS_v2_compressed.pt", "hpsv2.1": "HPS_v2.1_compressed.pt"}


class CosineReward:
    """Raw cosine of image and prompt, no logit scale, on images padded to a square: float [B] in -1 .. 1."""

    def __init__(self, clip: Clip, precision: str) -> None:
        self.clip, self.half = clip, precision == "float16"

    def __call__(self, images: Tensor, prompts: Sequence[str], specs: Specs) -> Tensor:
        """Return one cosine per image."""
        pixels = pad_longest(images, self.clip.image_size)
        with torch.autocast(pixels.device.type, torch.float16, enabled=self.half):
            return self.clip.cosine(pixels, prompts)


def _build(name: str, options: RewardOptions) -> Reward:
    file = FILES[name]
    folder = weights.folder(name, options.path, REPOSITORY, [file])
    tokenizer = folder if options.path else weights.folder(name, None, TOWER, CLIP_FILES)
    return CosineReward(load_open_clip(folder / file, folder / "config.json", tokenizer), options.precision)


def _info(name: str, version: str) -> Info:
    return Info(
        name,
        f"Human Preference Score {version}, raw cosine (benchmark tables show it times 100)",
        "Apache-2.0",
        low=-1.0,
        high=1.0,
        files=(FILES[name],),
        source=f"{REPOSITORY}; tokenizer of {TOWER}",
        repository=REPOSITORY,
        batch_size=32,
        step=2**-12,  # the original's float16 between 0.25 and 0.5
    )


@register(_info("hpsv2", "v2"))
def hpsv2(options: RewardOptions) -> Reward:
    """Return the v2 scorer; not comparable with v2.1."""
    return _build("hpsv2", options)


@register(_info("hpsv2.1", "v2.1"))
def hpsv21(options: RewardOptions) -> Reward:
    """Return the v2.1 scorer; not comparable with v2."""
    return _build("hpsv2.1", options)
