"""T2I-CompBench's 3D-spatial rule on OWLv2's detections and DPT's depth (behind a `Depth` protocol)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from margrpo.benchmarks.rules.t2i_spatial import SIDE, scale_boxes, spatial_3d_released
from margrpo.config import RewardOptions
from margrpo.errors import MargrpoError
from margrpo.rewards import weights
from margrpo.rewards.base import Info, Reward, Specs, register
from margrpo.rewards.images import to_pil
from margrpo.rewards.owlv2 import Detector, Owlv2, pair

REPOSITORY = "Intel/dpt-hybrid-midas"
NAME = "t2i_3d_spatial.owlv2_dpt"
_KEYS = ("obj1", "obj2", "locality")

_log = logging.getLogger("margrpo.rewards")


class Depth(Protocol):
    """Estimates depth."""

    def __call__(self, images: Tensor) -> Tensor:
        """Return inverse depth [B, H, W] of images [B, 3, H, W]: 0 .. 1 within each image, larger is nearer."""
        ...


class Dpt:
    """DPT of a transformers folder at its own input size (T2I-CompBench runs its hybrid at 480 px)."""

    def __init__(self, folder: Path, precision: str) -> None:
        self.model: Any = weights.hf_model(folder, "DPTConfig", "DPTForDepthEstimation")
        self.side = int(self.model.config.image_size)
        self.half = precision == "float16"

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Return depth in 255 steps, as the original stores it between its scripts."""
        self.model.to(images.device)
        size = self.side, self.side
        pictures = [picture.resize(size, Image.Resampling.BICUBIC) for picture in to_pil(images)]
        stacked = torch.from_numpy(np.stack([np.asarray(p) for p in pictures])).permute(0, 3, 1, 2)
        pixels = (stacked.to(images.device).float() / 255 - 0.5) / 0.5
        with torch.autocast(images.device.type, torch.float16, enabled=self.half):
            depth = self.model(pixel_values=pixels).predicted_depth.float()
        low, high = depth.amin((1, 2), keepdim=True), depth.amax((1, 2), keepdim=True)
        scaled = (depth - low) / (high - low).clamp(min=1e-12)
        resized = F.interpolate(scaled[:, None], images.shape[-2:], mode="bilinear", align_corners=True)
        return (resized[:, 0] * 255).round() / 255


class Spatial3d:
    """The released 3D rule: float [B] in [0, 1]; NaN, with a warning, where a spec lacks objects or locality."""

    def __init__(self, detector: Detector, depth: Depth) -> None:
        self.detector, self.depth = detector, depth

    def __call__(self, images: Tensor, prompts: Sequence[str], specs: Specs) -> Tensor:
        """Return one score per image."""
        usable = [all(spec.get(key) for key in _KEYS) for spec in specs]
        for prompt in sorted({p for p, fine in zip(prompts, usable, strict=True) if not fine}):
            _log.warning("margrpo: reward %s: skipped %r: its spec lacks %s", NAME, prompt, _KEYS)
        nouns = [pair(spec) if fine else [] for spec, fine in zip(specs, usable, strict=True)]
        side = max(images.shape[-2:])
        found = [scale_boxes(boxes, side) for boxes in self.detector(images, nouns)]
        frame = [round(extent * SIDE / side) for extent in images.shape[-2:]]
        depth = F.interpolate(self.depth(images)[:, None], frame, mode="bilinear", antialias=True)[:, 0]
        scores = [
            spatial_3d_released(
                spec["obj1"], spec["obj2"], spec["locality"], boxes, image.cpu().numpy()
            ).score
            if fine
            else float("nan")
            for spec, boxes, image, fine in zip(specs, found, depth, usable, strict=True)
        ]
        return torch.tensor(scores, dtype=torch.float32)


@register(
    Info(
        NAME,
        "T2I-CompBench's 3D-spatial rule on OWLv2's detections and DPT's depth",
        "Apache-2.0",
        low=0.0,
        high=1.0,
        files=("owlv2/config.json", "owlv2/preprocessor_config.json", "dpt/config.json"),
        source=f"google/owlv2-base-patch16-ensemble in owlv2/ and {REPOSITORY} in dpt/",
        batch_size=8,
    )
)
def t2i_3d_spatial(options: RewardOptions) -> Reward:
    """Return the scorer of a folder with the transformers folders `owlv2` and `dpt`."""
    if options.path is None:
        raise MargrpoError(f"reward.options.{NAME}.path: null; allowed: a folder that holds owlv2/ and dpt/")
    folder = weights.folder(NAME, options.path, "", ())
    return Spatial3d(Owlv2(folder / "owlv2", options.precision), Dpt(folder / "dpt", options.precision))
