"""T2I-CompBench's 2D-spatial and numeracy rules on OWLv2's detections (behind a `Detector` protocol).

The published scores come from UniDet with its own vocabulary and confidences; OWLv2 is asked for the nouns
themselves, so more prompts can score: the values are not comparable with published ones, and the names say so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from margrpo.benchmarks.rules import t2i_numeracy, t2i_spatial
from margrpo.benchmarks.rules.boxes import from_cxcywh, suppress
from margrpo.benchmarks.rules.geneval import Detection
from margrpo.config import RewardOptions
from margrpo.rewards import weights
from margrpo.rewards.base import Info, Reward, Specs, register
from margrpo.rewards.images import to_pil
from margrpo.rewards.tokenizers import CLIP_FILES

REPOSITORY = "google/owlv2-base-patch16-ensemble"
THRESHOLD = 0.1
"""Detections of a lower score don't count; UniDet's head has the same limit in T2I-CompBench."""
NMS = 0.5
MAX_DETECTIONS = 300
_FILES = ("config.json", "preprocessor_config.json", "model.safetensors", "pytorch_model.bin", *CLIP_FILES)
_LENGTH = 16  # tokens of a query, fixed in OWL's text tower

_log = logging.getLogger("margrpo.rewards")


class Detector(Protocol):
    """Finds named objects in images."""

    def __call__(self, images: Tensor, names: Sequence[Sequence[str]]) -> list[list[Detection]]:
        """Return each image's detections of its own names, best first, boxes in px of the image."""
        ...


class Owlv2:
    """OWLv2 of a transformers folder, asked for "a photo of a <name>"."""

    def __init__(self, folder: Path, precision: str) -> None:
        from transformers import CLIPTokenizer
        from transformers.models.owlv2.image_processing_pil_owlv2 import Owlv2ImageProcessorPil

        self.model: Any = weights.hf_model(folder, "Owlv2Config", "Owlv2ForObjectDetection")
        self.tokenizer: Any = CLIPTokenizer.from_pretrained(str(folder), local_files_only=True)
        self.processor: Any = Owlv2ImageProcessorPil.from_pretrained(str(folder), local_files_only=True)
        self.half = precision == "float16"

    @torch.no_grad()
    def __call__(self, images: Tensor, names: Sequence[Sequence[str]]) -> list[list[Detection]]:
        """Return the detections of images [B, 3, H, W] in [0, 1]; images of equal names go together."""
        groups: dict[tuple[str, ...], list[int]] = {}
        for index, wanted in enumerate(names):
            groups.setdefault(tuple(wanted), []).append(index)
        found: list[list[Detection]] = [[] for _ in names]
        for wanted, members in groups.items():
            if wanted:
                for index, detections in zip(members, self._find(images[members], wanted), strict=True):
                    found[index] = detections
        return found

    def _find(self, images: Tensor, names: tuple[str, ...]) -> list[list[Detection]]:
        logits, boxes = self._raw(images, names)
        side = max(images.shape[-2:])  # boxes are relative to the image padded to a square
        scores, labels = torch.sigmoid(logits).max(-1)
        result = []
        for image in range(len(images)):
            keep = torch.nonzero(scores[image] > THRESHOLD).flatten().tolist()
            detections = [
                Detection(
                    names[int(labels[image, i])], _scaled(boxes[image, i], side), float(scores[image, i])
                )
                for i in keep
            ]
            result.append(distinct(detections))
        return result

    def _raw(self, images: Tensor, names: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        """Return logits [B, P, Q] of each of P places for Q names, and boxes [B, P, 4], cxcywh in 0 .. 1."""
        self.model.to(images.device)
        texts = [f"a photo of a {name}" for name in names]
        limits = {"padding": "max_length", "truncation": True, "max_length": _LENGTH}
        tokens = self.tokenizer(texts, **limits, return_tensors="pt").to(images.device)
        pixels = self.processor(to_pil(images), return_tensors="pt")["pixel_values"].to(images.device)
        with torch.autocast(images.device.type, torch.float16, enabled=self.half):
            output = self.model(
                pixel_values=pixels,
                input_ids=tokens["input_ids"].repeat(len(images), 1),
                attention_mask=tokens["attention_mask"].repeat(len(images), 1),
            )
        return output.logits.float(), output.pred_boxes.float()


def distinct(detections: Sequence[Detection]) -> list[Detection]:
    """Return the detections that suppression within each label leaves, best first, at most 300."""
    kept: list[Detection] = []
    for label in dict.fromkeys(detection.label for detection in detections):
        same = [detection for detection in detections if detection.label == label]
        kept += [same[i] for i in suppress([d.box for d in same], [d.score for d in same], NMS)]
    return sorted(kept, key=lambda detection: -detection.score)[:MAX_DETECTIONS]


class RuleReward:
    """A rule on a detector: float [B] in [0, 1]; NaN, with a warning, where a spec lacks what it needs.

    Args:
        names: spec -> what to look for. rule: (spec, detections in the rule's frame) -> score.
        keys: of the spec. label: for warnings.
    """

    def __init__(
        self,
        detector: Detector,
        names: Callable[[Any], list[str]],
        rule: Callable[[Any, list[Detection]], float],
        keys: tuple[str, ...],
        label: str,
    ) -> None:
        self.detector, self.names, self.rule, self.keys, self.label = detector, names, rule, keys, label

    def __call__(self, images: Tensor, prompts: Sequence[str], specs: Specs) -> Tensor:
        """Return one score per image."""
        usable = [all(spec.get(key) for key in self.keys) for spec in specs]
        for prompt in sorted({p for p, fine in zip(prompts, usable, strict=True) if not fine}):
            _log.warning("margrpo: reward %s: skipped %r: its spec lacks %s", self.label, prompt, self.keys)
        wanted = [self.names(spec) if fine else [] for spec, fine in zip(specs, usable, strict=True)]
        side = max(images.shape[-2:])
        found = [t2i_spatial.scale_boxes(boxes, side) for boxes in self.detector(images, wanted)]
        scores = [
            self.rule(spec, boxes) if fine else float("nan")
            for spec, boxes, fine in zip(specs, found, usable, strict=True)
        ]
        return torch.tensor(scores, dtype=torch.float32)


def pair(spec: Mapping[str, Any]) -> list[str]:
    """Return the names to look for of a spec's obj1 and obj2: people are "person"."""
    nouns: list[str] = [spec["obj1"], spec["obj2"]]
    return sorted({t2i_spatial.PERSON.get(noun, noun) for noun in nouns})


def spatial_2d(detector: Detector) -> RuleReward:
    """Return the released 2D rule; specs need obj1, obj2 and locality."""

    def rule(spec: Any, found: list[Detection]) -> float:
        return t2i_spatial.spatial_2d_released(spec["obj1"], spec["obj2"], spec["locality"], found).score

    return RuleReward(detector, pair, rule, ("obj1", "obj2", "locality"), "t2i_spatial.owlv2")


def numeracy(detector: Detector) -> RuleReward:
    """Return the released counting rule; specs need objects and counts."""

    def names(spec: Any) -> list[str]:
        return sorted({t2i_numeracy.ALIASES_RELEASED.get(name, name) for name in spec["objects"]})

    def rule(spec: Any, found: list[Detection]) -> float:
        pairs = zip(spec["objects"], spec["counts"], strict=True)
        return t2i_numeracy.numeracy_released([t2i_numeracy.Counted(n, c) for n, c in pairs], found)

    return RuleReward(detector, names, rule, ("objects", "counts"), "t2i_numeracy.owlv2")


def _scaled(box: Tensor, side: int) -> tuple[float, float, float, float]:
    x0, y0, x1, y1 = from_cxcywh((box * side).tolist())
    return x0, y0, x1, y1


def _info(name: str, summary: str) -> Info:
    files = ("config.json", "preprocessor_config.json")
    source = f"{REPOSITORY}, in transformers' layout"
    return Info(name, summary, "Apache-2.0", 0.0, 1.0, files, source, REPOSITORY, batch_size=8)


def _detector(name: str, options: RewardOptions) -> Owlv2:
    return Owlv2(weights.folder(name, options.path, REPOSITORY, _FILES), options.precision)


@register(_info("t2i_spatial.owlv2", "T2I-CompBench's 2D-spatial rule on OWLv2's detections"))
def t2i_spatial_owlv2(options: RewardOptions) -> Reward:
    """Return the scorer of a transformers folder."""
    return spatial_2d(_detector("t2i_spatial.owlv2", options))


@register(_info("t2i_numeracy.owlv2", "T2I-CompBench's numeracy rule on OWLv2's detections"))
def t2i_numeracy_owlv2(options: RewardOptions) -> Reward:
    """Return the scorer of a transformers folder."""
    return numeracy(_detector("t2i_numeracy.owlv2", options))
