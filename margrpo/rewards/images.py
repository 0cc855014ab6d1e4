"""Image preprocessing of the published scorers, each exactly as its original does it.

All see images rounded to 8 bit, as the originals read them from files.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)


def to_uint8(images: Tensor) -> Tensor:
    """Return images [B, 3, H, W] in [0, 1] as uint8, rounded to the nearest level; outliers are clipped."""
    return (images.clamp(0, 1) * 255).round().to(torch.uint8)


def to_pil(images: Tensor) -> list[Image.Image]:
    """Return images [B, 3, H, W] in [0, 1] as RGB pictures."""
    arrays = to_uint8(images).permute(0, 2, 3, 1).cpu().numpy()
    return [Image.fromarray(array) for array in arrays]


def normalize(images: Tensor) -> Tensor:
    """Return (x - mean) / std with the constants of CLIP."""
    mean, std = images.new_tensor(MEAN), images.new_tensor(STD)
    return (images - mean[:, None, None]) / std[:, None, None]


def pad_longest(images: Tensor, side: int, antialias: bool = True) -> Tensor:
    """Return normalised images [B, 3, side, side]: HPSv2's preprocessing.

    Longest side to `side`, bicubic on the tensor, then black padding, centred; an image whose longest side
    fits already is not padded. Source: tgxs002/HPSv2, `ResizeMaxSize`.

    Args:
        antialias: as torchvision does since 0.17; before, tensors were resized without.
    """
    images = to_uint8(images).float() / 255
    height, width = images.shape[-2:]
    scale = side / float(max(height, width))
    if scale != 1.0:
        size = round(height * scale), round(width * scale)
        images = F.interpolate(images, size, mode="bicubic", align_corners=False, antialias=antialias)
        rows, cols = side - size[0], side - size[1]
        images = F.pad(images, (cols // 2, cols - cols // 2, rows // 2, rows - rows // 2))
    return normalize(images)


def crop_center(images: Tensor, side: int, round_up: bool) -> Tensor:
    """Return normalised images [B, 3, side, side]: shortest side to `side` with PIL's bicubic, middle cut out.

    Args:
        round_up: an odd margin is split as torchvision does (ImageReward, OpenAI's CLIP): half of it rounded
            to even; False: rounded down, as transformers' CLIP processor does (PickScore).
    """
    pictures = [_crop(picture, side, round_up) for picture in to_pil(images)]
    stacked = np.stack([np.asarray(picture) for picture in pictures])
    tensor = torch.from_numpy(stacked).permute(0, 3, 1, 2).to(images.device)
    return normalize(tensor.float() / 255)


def _crop(picture: Image.Image, side: int, round_up: bool) -> Image.Image:
    width, height = picture.size
    short = min(width, height)
    size = int(side * width / short), int(side * height / short)
    picture = picture.resize(size, Image.Resampling.BICUBIC)
    margins = [extent - side for extent in picture.size]
    left, top = (round(margin / 2) if round_up else margin // 2 for margin in margins)
    return picture.crop((left, top, left + side, top + side))
