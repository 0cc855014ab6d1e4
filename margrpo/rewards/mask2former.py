"""GenEval on transformers: Mask2Former finds the objects, CLIP ViT-L/14 names their colors.

GenEval itself runs mmdet's checkpoint of the same model family, with other training and post-processing: the
values are close to the published ones, not equal, and the names say so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from margrpo.benchmarks.rules.geneval import THRESHOLD, Detection, Verdict, evaluate, keep
from margrpo.config import RewardOptions
from margrpo.errors import MargrpoError
from margrpo.rewards import weights
from margrpo.rewards.base import Info, Reward, Specs, register
from margrpo.rewards.clip import Clip, load_hf
from margrpo.rewards.images import crop_center, to_pil

COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
TEMPLATES = (
    "a photo of a {color} {name}",
    "a photo of a {color}-colored {name}",
    "a photo of a {color} object",
)
GRAY = 0x99 / 255
"""Behind an object's mask when its color is asked for."""

_log = logging.getLogger("margrpo.rewards")


@dataclass(frozen=True)
class Instance:
    """A detection and its mask, bool [H, W]."""

    detection: Detection
    mask: Tensor


class Mask2Former:
    """Instances of COCO's classes in images, by a transformers folder of Mask2Former.

    Class names are those of `object_names.txt` in the folder (GenEval's file, a name a line) if it is there,
    else the model's own.
    """

    def __init__(self, folder: Path, precision: str) -> None:
        from transformers.models.mask2former.image_processing_pil_mask2former import (
            Mask2FormerImageProcessorPil,
        )

        self.model: Any = weights.hf_model(folder, "Mask2FormerConfig", "Mask2FormerForUniversalSegmentation")
        self.processor: Any = Mask2FormerImageProcessorPil.from_pretrained(str(folder), local_files_only=True)
        labels = self.model.config.id2label
        self.names = [labels[index] for index in range(len(labels))]
        own = folder / "object_names.txt"
        if own.is_file():
            given = own.read_text(encoding="utf-8").split("\n")[: len(self.names)]
            if len(given) < len(self.names) or not all(given):
                raise MargrpoError(f"{own}: {len(given)} names; allowed: the {len(self.names)} of the model")
            self.names = given
        self.half = precision == "float16"

    @torch.no_grad()
    def __call__(self, images: Tensor) -> list[list[Instance]]:
        """Return the instances of images [B, 3, H, W] with a score above GenEval's lower threshold."""
        self.model.to(images.device)
        inputs = self.processor(to_pil(images), return_tensors="pt").to(images.device)
        with torch.autocast(images.device.type, torch.float16, enabled=self.half):
            output = self.model(pixel_values=inputs["pixel_values"], pixel_mask=inputs["pixel_mask"])
        sizes = [tuple(images.shape[-2:])] * len(images)
        found = self.processor.post_process_instance_segmentation(
            output, threshold=THRESHOLD, target_sizes=sizes, return_binary_maps=True
        )
        return [self._instances(result) for result in found]

    def _instances(self, result: Mapping[str, Any]) -> list[Instance]:
        if not result["segments_info"]:
            return []
        pairs = zip(result["segmentation"], result["segments_info"], strict=True)
        return [
            Instance(Detection(self.names[info["label_id"]], _box(mask), info["score"]), mask.bool())
            for mask, info in pairs
        ]


class ColorNamer:
    """The color of an object among ten, by CLIP on its cut-out before gray (zero-shot, three templates)."""

    def __init__(self, clip: Clip) -> None:
        self.clip = clip
        self.classifiers: dict[str, Tensor] = {}

    @torch.no_grad()
    def __call__(self, image: Tensor, instance: Instance) -> str:
        """Return the color of an instance in an image [3, H, W]."""
        x0, y0, x1, y1 = (int(edge) for edge in instance.detection.box)
        isolated = torch.where(instance.mask.to(image.device), image, torch.full_like(image, GRAY))
        pixels = crop_center(isolated[None, :, y0:y1, x0:x1], self.clip.image_size, round_up=True)
        classes = self._classes(instance.detection.label, pixels.device)
        return COLORS[int((self.clip.embed_images(pixels) @ classes.T).argmax())]

    def _classes(self, name: str, device: torch.device) -> Tensor:
        """Return a unit vector [10, D] per color: the normalised mean over the templates."""
        if name not in self.classifiers:
            texts = [t.format(color=color, name=name) for color in COLORS for t in TEMPLATES]
            embedded = self.clip.embed_texts(texts, device).unflatten(0, (len(COLORS), len(TEMPLATES)))
            self.classifiers[name] = F.normalize(embedded.mean(1), dim=-1)
        return self.classifiers[name]


class GenEval:
    """GenEval's verdict on each image: float [B]; NaN, with a warning, for a spec that is no metadata line.

    Args:
        detect: images -> instances. name_color: (image, instance) -> color; asked only for classes whose
            color the prompt names. value: verdict -> score. label: for warnings.
    """

    def __init__(
        self,
        detect: Callable[[Tensor], list[list[Instance]]],
        name_color: Callable[[Tensor, Instance], str],
        value: Callable[[Verdict], float],
        label: str,
    ) -> None:
        self.detect, self.name_color, self.value, self.label = detect, name_color, value, label

    def __call__(self, images: Tensor, prompts: Sequence[str], specs: Specs) -> Tensor:
        """Return one score per image."""
        scores = []
        for image, prompt, spec, found in zip(images, prompts, specs, self.detect(images), strict=True):
            if spec.get("include"):
                scores.append(self.value(evaluate(spec, self._colored(image, spec, found))))
            else:
                _log.warning("margrpo: reward %s: skipped %r: its spec lacks include", self.label, prompt)
                scores.append(float("nan"))
        return torch.tensor(scores, dtype=torch.float32)

    def _colored(self, image: Tensor, spec: Mapping[str, Any], found: Sequence[Instance]) -> list[Detection]:
        wanted = {clause["class"] for clause in spec["include"] if clause.get("color") is not None}
        counted = keep([instance.detection for instance in found], THRESHOLD)
        result = []
        for instance in found:
            detection = instance.detection
            if detection.label in wanted and detection in counted.get(detection.label, []):
                detection = replace(detection, color=self.name_color(image, instance))
            result.append(detection)
        return result


def _box(mask: Tensor) -> tuple[float, float, float, float]:
    """Return the box of a mask, its far edges beyond the last pixel."""
    rows, columns = torch.nonzero(mask.any(1)).flatten(), torch.nonzero(mask.any(0)).flatten()
    x0, y0, x1, y1 = (int(edge) for edge in (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1))
    return x0, y0, x1, y1


def _info(name: str, summary: str) -> Info:
    files = ("mask2former/config.json", "mask2former/preprocessor_config.json", "clip/config.json")
    source = "facebook/mask2former-swin-small-coco-instance in mask2former/, openai/clip-vit-large-patch14 in clip/"
    license_ = "MIT (Mask2Former, CLIP)"
    return Info(name, summary, license_, 0.0, 1.0, files, source, batch_size=8)


def _build(name: str, options: RewardOptions, value: Callable[[Verdict], float]) -> Reward:
    if options.path is None:
        raise MargrpoError(
            f"reward.options.{name}.path: null; allowed: a folder that holds mask2former/ and clip/"
        )
    folder = weights.folder(name, options.path, "", ())
    namer = ColorNamer(load_hf(folder / "clip", unescape=True))
    return GenEval(Mask2Former(folder / "mask2former", options.precision), namer, value, name)


@register(_info("geneval.mask2former", "GenEval's official verdict, 0 or 1, on Mask2Former and CLIP"))
def geneval(options: RewardOptions) -> Reward:
    """Return the scorer of the published metric."""
    return _build("geneval.mask2former", options, lambda verdict: float(verdict.official))


@register(_info("geneval_partial.mask2former", "GenEval's clean partial credit on Mask2Former and CLIP"))
def geneval_partial(options: RewardOptions) -> Reward:
    """Return the scorer for training."""
    return _build("geneval_partial.mask2former", options, lambda verdict: verdict.partial_clean)
