"""Size of the compressed image: needs no model and no prompt, and optimises away detail (Black et al. 2023)."""

from __future__ import annotations

import io
from collections.abc import Sequence

import torch
from torch import Tensor

from margrpo.config import RewardOptions
from margrpo.rewards.base import Info, Reward, Specs, register
from margrpo.rewards.images import to_pil

QUALITY = 95


@register(
    Info(
        "jpeg_size",
        "minus the kilobytes of the image as JPEG at quality 95 (DDPO's compressibility)",
        "none needed",
        high=0.0,
        step=0.001,
    )
)
def jpeg_size(options: RewardOptions) -> Reward:
    """Return the reward -kB of images [B, 3, H, W]; smooth images score higher."""
    return _score


def _score(images: Tensor, prompts: Sequence[str], specs: Specs) -> Tensor:
    sizes = []
    for image in to_pil(images):
        buffer = io.BytesIO()
        image.save(buffer, format="JPEG", quality=QUALITY)
        sizes.append(buffer.tell())
    return -torch.tensor(sizes, dtype=torch.float32) / 1000
