"""T2I-CompBench's 2D and 3D spatial rules on detections, as released and with the defects removed.

Source: Karine-Huang/T2I-CompBench, `UniDet_eval/2D_spatial_eval.py` and `3D_spatial_eval.py` (behaviour, not
code). Boxes are xyxy px, y down, in the detector's frame of 479 px a side: scale others with `scale_boxes`.
Detections come in the detector's order, best score first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from margrpo.benchmarks.rules.boxes import Box, center, iou
from margrpo.benchmarks.rules.geneval import Detection

SIDE = 479
"""Side in px of the square frame that the released detector reports boxes in."""
NEAR = 150.0
"""Objects are near if a coordinate of their centres differs by less (px of that frame)."""
CUT = 0.5
"""A 2D score below this becomes 0."""
PERSON = {"girl": "person", "boy": "person", "man": "person", "woman": "person"}

_BESIDE = frozenset({"next to", "on side of", "near"})
_IN_FRONT = frozenset({"in front of"})
_BEHIND = frozenset({"behind", "hidden"})
_OVERLAP_2D = 0.1
_OVERLAP_3D = 0.5
_CLEAN_NAMES = {
    "on top of": "on the top of",
    "above": "on the top of",
    "on bottom of": "on the bottom of",
    "below": "on the bottom of",
    "on the left": "on the left of",
    "left of": "on the left of",
    "on the right": "on the right of",
    "right of": "on the right of",
}


@dataclass(frozen=True)
class Spatial:
    """A score in [0, 1], the relation's part of it, and the detections that decided (None = not found)."""

    score: float
    relation: float
    index_a: int | None
    index_b: int | None


def scale_boxes(detections: Sequence[Detection], side: float) -> list[Detection]:
    """Return the detections of an image of `side` px in the frame that the rules' 150 px refer to."""
    factor = SIDE / side
    scaled = []
    for detection in detections:
        x0, y0, x1, y1 = detection.box
        scaled.append(replace(detection, box=(x0 * factor, y0 * factor, x1 * factor, y1 * factor)))
    return scaled


def relation_2d(locality: str | None, a: Box, b: Box, near: float = NEAR) -> float:
    """Return 0 .. 1: how well a's place relative to b fits a locality of the benchmark's own wording.

    "near" falls off with the larger coordinate difference beyond `near` px; a direction needs the greater
    difference on its axis, and overlap beyond an IoU of 0.1 lowers it. "on top of" and "above" have no rule
    in the released code and give 0, as does every other wording.
    """
    (xa, ya), (xb, yb) = center(a), center(b)
    dx, dy = xb - xa, yb - ya
    if locality in _BESIDE:
        if abs(dx) < near or abs(dy) < near:
            return 1.0
        return near / max(abs(dx), abs(dy))
    directions = {
        "on the left of": dx > 0 and abs(dx) > abs(dy),
        "on the right of": dx < 0 and abs(dx) > abs(dy),
        "on the top of": dy > 0 and abs(dy) > abs(dx),
        "on the bottom of": dy < 0 and abs(dy) > abs(dx),
    }
    if locality is None or not directions.get(locality, False):
        return 0.0
    overlap = iou(a, b)
    return 1.0 if overlap < _OVERLAP_2D else _OVERLAP_2D / overlap


def spatial_2d_released(
    noun_a: str | None, noun_b: str | None, locality: str | None, detections: Sequence[Detection]
) -> Spatial:
    """Return the released 2D score: 1/4 of each object's confidence, 1/2 of the relation, 0 below `CUT`.

    An object is the first detection whose label equals the noun; people's nouns read "person". A noun of
    None (no preposition was parsed) is not found.
    """
    labels = [detection.label for detection in detections]
    index_a, index_b = _first(labels, noun_a), _first(labels, noun_b)
    relation = 0.0
    if index_a is not None and index_b is not None:
        relation = relation_2d(locality, detections[index_a].box, detections[index_b].box)
    score = _combine(detections, index_a, index_b, relation)
    return Spatial(score if score >= CUT else 0.0, relation, index_a, index_b)


def spatial_2d_clean(
    noun_a: str | None, noun_b: str | None, locality: str | None, detections: Sequence[Detection]
) -> Spatial:
    """Return the 2D score without the released defects (not comparable with published numbers).

    The best pair of different detections counts instead of the first of each label; "above", "on top of" and
    the other wordings of a direction have its rule; nothing is cut below 0.5.
    """
    wanted = _CLEAN_NAMES.get(locality or "", locality)

    def relation(a: Box, b: Box) -> float:
        return relation_2d(wanted, a, b)

    return _best_pair(detections, noun_a, noun_b, relation)


def relation_3d(
    locality: str | None,
    a: Box,
    b: Box,
    depth: NDArray[np.floating],
    axis_order: Literal["released", "fixed"] = "released",
    full_iou: float = _OVERLAP_3D,
) -> float:
    """Return 0 .. 1: a lies before or behind b as `locality` says, and their boxes overlap.

    Args:
        depth: [H, W], larger is nearer. axis_order: the released code cuts a box out of the depth map with
            x and y exchanged; "fixed" does not. full_iou: IoU beyond which the relation is worth 1; below
            it is worth IoU / full_iou, at equality 0 (released). 0 where a cut is empty.
    """
    if locality not in _IN_FRONT | _BEHIND:
        return relation_2d(locality, a, b)
    nearer = _mean_depth(depth, a, axis_order) - _mean_depth(depth, b, axis_order)
    fits = nearer > 0 if locality in _IN_FRONT else nearer < 0  # false for NaN
    overlap = iou(a, b)
    if not fits or overlap == full_iou:
        return 0.0
    return 1.0 if overlap > full_iou else overlap / full_iou


def spatial_3d_released(
    noun_a: str | None,
    noun_b: str | None,
    locality: str | None,
    detections: Sequence[Detection],
    depth: NDArray[np.floating],
    axis_order: Literal["released", "fixed"] = "released",
) -> Spatial:
    """Return the released 3D score: 1/4 of each confidence and 1/2 of the relation, nothing cut.

    A noun is found if it occurs in the labels joined by spaces; the walk along the labels takes the latest
    label that contains it until both nouns have one ("key" finds a monkey). A noun that only occurs across
    two labels crashes the released code; here it is not found.
    """
    labels = [detection.label for detection in detections]
    noun_a, noun_b = PERSON.get(noun_a or "", noun_a), PERSON.get(noun_b or "", noun_b)
    index_a: int | None = None
    index_b: int | None = None
    for index, label in enumerate(labels):
        if noun_a is not None and noun_a in label:
            index_a = index
        if noun_b is not None and noun_b in label:
            index_b = index
        if index_a is not None and index_b is not None:
            break
    relation = 0.0
    if index_a is not None and index_b is not None:
        boxes = detections[index_a].box, detections[index_b].box
        relation = relation_3d(locality, *boxes, depth, axis_order)
    return Spatial(_combine(detections, index_a, index_b, relation), relation, index_a, index_b)


def spatial_3d_clean(
    noun_a: str | None,
    noun_b: str | None,
    locality: str | None,
    detections: Sequence[Detection],
    depth: NDArray[np.floating],
    full_iou: float = _OVERLAP_3D,
) -> Spatial:
    """Return the 3D score without the released defects: whole nouns, the best pair of different detections,
    and depth cut out with the axes in order (not comparable with published numbers).
    """

    def relation(a: Box, b: Box) -> float:
        return relation_3d(locality, a, b, depth, "fixed", full_iou)

    return _best_pair(detections, noun_a, noun_b, relation)


def _first(labels: Sequence[str], noun: str | None) -> int | None:
    wanted = PERSON.get(noun or "", noun)
    return labels.index(wanted) if wanted in labels else None


def _all(detections: Sequence[Detection], noun: str | None) -> list[int]:
    """Return the detections of a noun, best first; a compound label ("doll, toy") has all of its names."""
    wanted = PERSON.get(noun or "", noun)
    return [i for i, d in enumerate(detections) if wanted in {name.strip() for name in d.label.split(",")}]


def _best_pair(
    detections: Sequence[Detection],
    noun_a: str | None,
    noun_b: str | None,
    relation: Callable[[Box, Box], float],
) -> Spatial:
    """Return the best score of two different detections of the nouns, or that of the only one found."""
    first, second = _all(detections, noun_a), _all(detections, noun_b)
    results = []
    for i, j in ((i, j) for i in first for j in second if i != j):
        value = relation(detections[i].box, detections[j].box)
        results.append(Spatial(_combine(detections, i, j, value), value, i, j))
    if results:
        return max(results, key=lambda result: result.score)
    index_a = first[0] if first else None
    index_b = second[0] if second and index_a is None else None
    return Spatial(_combine(detections, index_a, index_b, 0.0), 0.0, index_a, index_b)


def _combine(
    detections: Sequence[Detection], index_a: int | None, index_b: int | None, relation: float
) -> float:
    """Add a quarter of each found object's confidence (float32) to half the relation."""
    found = [np.float32(detections[i].score) for i in (index_a, index_b) if i is not None]
    return float(0.25 * sum(float(score) for score in found) + 0.5 * relation)


def _mean_depth(depth: NDArray[np.floating], box: Box, axis_order: str) -> float:
    x, y = slice(int(box[0]), int(box[2])), slice(int(box[1]), int(box[3]))
    part = depth[x, y] if axis_order == "released" else depth[y, x]
    return float(part.mean()) if part.size else float("nan")
