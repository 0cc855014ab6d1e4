"""GenEval's rules on detections: official, training reward as released, and a cleaned partial credit.

Sources: djghosh13/geneval (`evaluation/evaluate_images.py`) for the keep rule, positions and the official
verdict; the training reward of Flow-GRPO's reward server for `strict` and `partial_released`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

THRESHOLD = 0.3
"""A detection is kept above this score (GenEval)."""
COUNTING_THRESHOLD = 0.9
"""The same for prompts tagged `counting`; meant for GenEval's Mask2Former: other detectors pass their own."""
MAX_PER_CLASS = 16
_POSITION_SLACK = 0.1
_DIRECTION = 0.5

Box = tuple[float, float, float, float]
Kept = dict[str, list["Detection"]]


@dataclass(frozen=True)
class Detection:
    """An object found in an image: class, box (x0, y0, x1, y1) in px with y down, score in [0, 1], color."""

    label: str
    box: Box
    score: float
    color: str | None = None


@dataclass(frozen=True)
class Verdict:
    """The rules' verdicts on an image; `partial_released` can be negative, `partial_clean` is in [0, 1]."""

    kept: dict[str, int]
    official: bool
    strict: bool
    partial_released: float
    partial_clean: float


def relations(box_a: Sequence[float], box_b: Sequence[float]) -> set[str]:
    """Return which of left of, right of, above, below hold for a relative to b (both xyxy px, y down).

    Scale-free; coincident centres have none and diagonal neighbours can have two (GenEval's position rule).
    """
    a, b = np.asarray(box_a, float).reshape(2, 2), np.asarray(box_b, float).reshape(2, 2)
    offset = a.mean(axis=0) - b.mean(axis=0)
    slack = _POSITION_SLACK * ((a[1] - a[0]) + (b[1] - b[0]))
    revised = np.maximum(np.abs(offset) - slack, 0) * np.sign(offset)
    if np.all(np.abs(revised) < 1e-3):
        return set()
    dx, dy = revised / np.linalg.norm(offset)
    holds = {
        "left of": dx < -_DIRECTION,
        "right of": dx > _DIRECTION,
        "above": dy < -_DIRECTION,
        "below": dy > _DIRECTION,
    }
    return {name for name, true in holds.items() if true}


def keep(detections: Sequence[Detection], threshold: float) -> Kept:
    """Return the detections that count, per class: score > threshold in float32, best first, at most 16.

    Equal scores come out in reversed input order, as the released argsort-then-reverse does.
    """
    kept: Kept = {}
    last_first = list(reversed(detections))
    for detection in sorted(last_first, key=lambda d: -np.float32(d.score)):
        group = kept.setdefault(detection.label, [])
        if np.float32(detection.score) > np.float32(threshold) and len(group) < MAX_PER_CLASS:
            group.append(detection)
    return {label: group for label, group in kept.items() if group}


def evaluate(
    spec: Mapping[str, Any],
    detections: Sequence[Detection],
    threshold: float = THRESHOLD,
    counting_threshold: float = COUNTING_THRESHOLD,
) -> Verdict:
    """Return every rule's verdict on one image's detections for a GenEval metadata line."""
    kept = keep(detections, counting_threshold if spec.get("tag") == "counting" else threshold)
    strict, partial = _released(spec, kept)
    return Verdict(
        kept={label: len(group) for label, group in kept.items()},
        official=_official(spec, kept),
        strict=strict,
        partial_released=partial,
        partial_clean=_clean(spec, kept),
    )


def _color_matches(clause: Mapping[str, Any], found: Sequence[Detection]) -> int:
    color = clause.get("color")
    return len(found) if color is None else sum(detection.color == color for detection in found)


def _related(relation: str, found: Sequence[Detection], targets: Sequence[Detection]) -> bool:
    return all(relation in relations(a.box, b.box) for a in found for b in targets)


def _official(spec: Mapping[str, Any], kept: Kept) -> bool:
    """Every include clause holds for its best `count` detections and no exclude clause is reached."""
    groups: list[list[Detection] | None] = []
    for clause in spec.get("include", []):
        count = int(clause["count"])
        found = kept.get(clause["class"], [])[:count]
        matched = len(found) == count and _color_matches(clause, found) >= count
        position = clause.get("position")
        if matched and position is not None:
            targets = groups[int(position[1])]
            matched = targets is not None and _related(position[0], found, targets)
        groups.append(found if matched else None)
    excluded = any(len(kept.get(c["class"], [])) >= int(c["count"]) for c in spec.get("exclude", []))
    return all(group is not None for group in groups) and not excluded


def _released(spec: Mapping[str, Any], kept: Kept) -> tuple[bool, float]:
    """Strict verdict and partial score as released: below 0 for many extras, an extra 1 after a relation."""
    groups: list[list[Detection] | None] = []
    parts: list[float] = []
    for clause in spec.get("include", []):
        count = int(clause["count"])
        found = kept.get(clause["class"], [])
        has_color, position = clause.get("color") is not None, clause.get("position")
        parts.append(1 - abs(count - len(found)) / count)
        matched = len(found) == count
        if not matched and (has_color or position is not None):
            parts.append(0.0)
        if matched and has_color:
            colored = _color_matches(clause, found)
            parts.append(1 - abs(count - colored) / count)
            matched = colored == count
        if matched and position is not None:
            targets = groups[int(position[1])]
            if targets is None:
                matched = False
                parts.append(0.0)
            else:
                matched = _related(position[0], found, targets)
                parts.extend([1.0] if matched else [0.0, 1.0])
        groups.append(found if matched else None)
    return all(group is not None for group in groups), sum(parts) / len(parts) if parts else 0.0


def _clean(spec: Mapping[str, Any], kept: Kept) -> float:
    """Mean over a fixed list of parts in [0, 1]: count credit times color share per clause, 0 or 1 per
    relation.

    Count credit is max(0, 1 - |n - k| / k). It is multiplied by the share of the right color instead of
    standing beside it: a bare count credit pays an image for whatever shapes it happens to hold. A relation
    earns 1 only where both of its clauses are fully right.
    """
    groups: list[list[Detection] | None] = []
    parts: list[float] = []
    for clause in spec.get("include", []):
        count = int(clause["count"])
        found = kept.get(clause["class"], [])
        credit = max(0.0, 1 - abs(count - len(found)) / count)
        if found:
            credit *= _color_matches(clause, found) / len(found)
        parts.append(credit)
        groups.append(found if credit == 1.0 else None)
        position = clause.get("position")
        if position is not None:
            targets = groups[int(position[1])]
            right = credit == 1.0 and targets is not None and _related(position[0], found, targets)
            parts.append(float(right))
    return sum(parts) / len(parts) if parts else 0.0
