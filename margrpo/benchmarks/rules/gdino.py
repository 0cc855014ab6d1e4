"""T2I-R1's reward on open-vocabulary detections (GroundingDINO), as released and with the defects removed.

Source: CaraJ7/T2I-R1, `reward_gdino.py`, which MAR-GRPO uses unchanged (behaviour, not code). Boxes are
(center x, center y, width, height), normalised to [0, 1].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from margrpo.benchmarks.rules.boxes import Box, from_cxcywh, suppress
from margrpo.benchmarks.rules.t2i_spatial import SIDE, relation_2d

NMS = 0.5
_FOUND = 0.2
_RELATED = 0.5
_WRONG_COUNT = 0.2
_RELEASED_NAMES = {
    "left of": "on the left of",
    "on the left of": "on the left of",
    "right of": "on the right of",
    "on the right of": "on the right of",
    "below": "on the bottom of",
    "on the bottom of": "on the bottom of",
    "top of": "on the top of",
    "on the top of": "on the top of",
    "next to": "next to",
    "near": "next to",
    "on side of": "next to",
}
_CLEAN_NAMES = {**_RELEASED_NAMES, "above": "on the top of", "on top of": "on the top of"}


@dataclass(frozen=True)
class Phrase:
    """A detection: the phrase it was found for, its box (cx, cy, w, h) in [0, 1], its score."""

    label: str
    box: tuple[float, float, float, float]
    score: float


def gdino_released(item: Mapping[str, Any], detections: Sequence[Phrase]) -> float:
    """Return the released score of an item with task_type, nouns and its info: at most 0.9 for spatial.

    Defects kept: normalised boxes against a limit of 150 px make "near" always true, "above" and "on top of"
    have no rule, and counting suppresses duplicates on boxes read in the wrong format.
    """
    return _score(item, detections, released=True)


def gdino_clean(item: Mapping[str, Any], detections: Sequence[Phrase]) -> float:
    """Return the same with distances in the benchmark's frame, rules for every wording, boxes converted
    before suppression, a maximum of 1 for spatial items, and credit 0 instead of 0.2 for a wrong count.

    Not comparable with published numbers.
    """
    return _score(item, detections, released=False)


def _score(item: Mapping[str, Any], detections: Sequence[Phrase], released: bool) -> float:
    nouns, task = item.get("nouns") or [], item.get("task_type")
    if not nouns:
        return 1.0
    if task == "spatial":
        return _spatial(item.get("spatial_info") or {}, detections, released)
    if task == "numeracy":
        return _numeracy(item.get("numeracy_info") or [], detections, released)
    labels = {detection.label for detection in detections}
    return sum(noun in labels for noun in nouns) / len(nouns)


def _spatial(info: Mapping[str, Any], detections: Sequence[Phrase], released: bool) -> float:
    found = [_best(detections, info.get(key)) for key in ("obj1", "obj2")]
    each, related = (_FOUND, _RELATED) if released else (0.25, 0.5)
    score = each * sum(detection is not None for detection in found)
    first, second = found
    if first is not None and second is not None:
        names = _RELEASED_NAMES if released else _CLEAN_NAMES
        locality = names.get(str(info.get("locality")))
        factor = 1.0 if released else float(SIDE)
        score += related * relation_2d(locality, _scaled(first.box, factor), _scaled(second.box, factor))
    return score


def _numeracy(wanted: Sequence[Mapping[str, Any]], detections: Sequence[Phrase], released: bool) -> float:
    score = 0.0
    for item in wanted:
        same = [d for d in detections if d.label == item["obj_name"]]
        if not same:
            continue
        boxes: list[Box] = [d.box if released else from_cxcywh(d.box) for d in same]
        count = len(suppress(boxes, [d.score for d in same], NMS))
        wrong = _WRONG_COUNT if released else 0.0
        score += (1.0 if count == int(item["num"]) else wrong) / len(wanted)
    return score


def _best(detections: Sequence[Phrase], name: str | None) -> Phrase | None:
    same = [detection for detection in detections if detection.label == name]
    return max(same, key=lambda detection: detection.score, default=None)


def _scaled(box: Box, factor: float) -> Box:
    return [value * factor for value in from_cxcywh(box)]
