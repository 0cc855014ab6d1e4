"""Geometry of boxes that the published rules share: centres, overlaps, suppression of duplicates."""

from __future__ import annotations

from collections.abc import Sequence

Box = Sequence[float]
"""(x0, y0, x1, y1) in px or normalised, y down."""


def center(box: Box) -> tuple[float, float]:
    """Return the middle (x, y) of an xyxy box."""
    return (box[0] + box[2]) / 2, (box[1] + box[3]) / 2


def area(box: Box, inclusive: bool = False) -> float:
    """Return the area; `inclusive` counts both border pixels (+1). Negative sides are multiplied as is."""
    extra = 1 if inclusive else 0
    return (box[2] - box[0] + extra) * (box[3] - box[1] + extra)


def intersection(a: Box, b: Box, inclusive: bool = False) -> float:
    """Return the area that two boxes share, 0 if they only touch (or not even that)."""
    extra = 1 if inclusive else 0
    width = min(a[2], b[2]) - max(a[0], b[0]) + extra
    height = min(a[3], b[3]) - max(a[1], b[1]) + extra
    return max(width, 0) * max(height, 0)


def iou(a: Box, b: Box, inclusive: bool = False) -> float:
    """Return intersection over union in 0 .. 1; 0 where the union is empty."""
    shared = intersection(a, b, inclusive)
    union = area(a, inclusive) + area(b, inclusive) - shared
    return shared / union if union > 0 else 0.0


def from_cxcywh(box: Box) -> tuple[float, float, float, float]:
    """Return the xyxy form of a box given by its middle, width and height."""
    x, y, width, height = box
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def suppress(boxes: Sequence[Box], scores: Sequence[float], threshold: float) -> list[int]:
    """Return the indices that greedy non-maximum suppression keeps, best score first.

    A box falls if its IoU with a better kept one is greater than `threshold`.
    """
    kept: list[int] = []
    for index in sorted(range(len(boxes)), key=lambda i: -scores[i]):
        if all(iou(boxes[index], boxes[other]) <= threshold for other in kept):
            kept.append(index)
    return kept
