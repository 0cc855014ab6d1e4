"""Layouts that satisfy a prompt exactly, and their antialiased rendering."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from margrpo.scenes.grammar import CANVAS, CELL, COLORS, SHAPES, ScenePrompt

BACKGROUND = (0.92, 0.92, 0.92)
RADIUS = (3.1, 3.6)
"""Half the side of an object's bounding box, px."""
JITTER = 0.4
"""Largest offset of a centre from its cell's centre per axis, px; the largest object stays in its cell."""
_GRID = CANVAS // CELL
_CHUNK = 2048

Cell = tuple[int, int]


@dataclass(frozen=True)
class SceneObject:
    """An object: words for color and shape, centre (x to the right, y down) and half box side, px."""

    color: str
    shape: str
    x: float
    y: float
    radius: float


@dataclass(frozen=True)
class Scene:
    """The objects of an image, in the order of the words, and the prompt that they satisfy."""

    objects: tuple[SceneObject, ...]
    prompt: ScenePrompt


def shape_coverage(
    shape: str, dx: NDArray[np.float32], dy: NDArray[np.float32], radius: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Return the share of each pixel that a shape covers, in [0, 1] (signed distance, ramp of one pixel).

    `dx`, `dy`: pixel centre minus object centre, px, broadcastable with `radius` (half box side, px). The
    triangle is isosceles with its apex up, as wide as high.
    """
    if shape == "circle":
        distance = np.sqrt(dx * dx + dy * dy) - radius
    elif shape == "square":
        distance = np.maximum(np.abs(dx), np.abs(dy)) - radius
    elif shape == "triangle":
        distance = np.maximum((2 * np.abs(dx) - dy - radius) / np.sqrt(np.float32(5)), dy - radius)
    else:
        raise ValueError(f"shape {shape!r}; allowed: {', '.join(SHAPES)}")
    coverage: NDArray[np.float32] = np.clip(0.5 - distance, 0, 1)
    return coverage


@lru_cache(maxsize=8)
def _free_cells(count: int) -> tuple[tuple[Cell, ...], ...]:
    """All sets of `count` grid cells (column, row) of which no two touch, not even at a corner."""
    cells = [(column, row) for row in range(_GRID) for column in range(_GRID)]
    return tuple(
        chosen
        for chosen in combinations(cells, count)
        if all(max(abs(a[0] - b[0]), abs(a[1] - b[1])) > 1 for a, b in combinations(chosen, 2))
    )


@lru_cache(maxsize=8)
def _related_cells(relation: str) -> tuple[tuple[Cell, Cell], ...]:
    """All (moved, reference) cell pairs at least twice as far apart along the relation's axis as across."""
    axis, sign = {"left of": (0, -1), "right of": (0, 1), "above": (1, -1), "below": (1, 1)}[relation]
    pairs = [pair for a, b in _free_cells(2) for pair in ((a, b), (b, a))]
    return tuple(
        (moved, reference)
        for moved, reference in pairs
        if sign * (moved[axis] - reference[axis]) >= max(2, 2 * abs(moved[1 - axis] - reference[1 - axis]))
    )


def sample_scene(prompt: ScenePrompt, rng: np.random.Generator) -> Scene:
    """Return a random layout that satisfies the prompt exactly: no other objects, no neighbouring ones.

    Relations hold by GenEval's position rule with margin (normalised offset >= .7 where .5 is needed).
    """
    clauses = prompt.spec["include"]
    things = [(clause["color"], clause["class"]) for clause in clauses for _ in range(clause["count"])]
    cells: Sequence[Cell]
    if prompt.category == "spatial":
        things.reverse()  # the moved object is named first in the text and second in the metadata
        choices = _related_cells(clauses[1]["position"][0])
        cells = choices[rng.integers(len(choices))]
    else:
        layouts = _free_cells(len(things))
        layout = layouts[rng.integers(len(layouts))]
        cells = [layout[index] for index in rng.permutation(len(things))]
    objects = []
    for (color, shape), (column, row) in zip(things, cells, strict=True):
        jitter = rng.uniform(-JITTER, JITTER, size=2)
        x, y = (column + 0.5) * CELL + jitter[0], (row + 0.5) * CELL + jitter[1]
        objects.append(SceneObject(color, shape, float(x), float(y), float(rng.uniform(*RADIUS))))
    return Scene(tuple(objects), prompt)


def render(scenes: Sequence[Scene]) -> NDArray[np.float32]:
    """Return the images [B, 3, 32, 32], float32 in [0, 1]; later objects of a scene cover earlier ones."""
    background = np.asarray(BACKGROUND, np.float32)[None, :, None, None]
    images = np.tile(background, (len(scenes), 1, CANVAS, CANVAS))
    slots: dict[tuple[int, str], list[tuple[int, SceneObject]]] = {}
    for index, scene in enumerate(scenes):
        for slot, thing in enumerate(scene.objects):
            slots.setdefault((slot, thing.shape), []).append((index, thing))
    centres = np.arange(CANVAS, dtype=np.float32) + 0.5
    for slot, shape in sorted(slots):
        members = slots[slot, shape]
        for start in range(0, len(members), _CHUNK):
            chunk = members[start : start + _CHUNK]
            rows = np.array([index for index, _ in chunk])
            x, y, radius = np.array([[o.x, o.y, o.radius] for _, o in chunk], np.float32).T[:, :, None, None]
            color = np.array([COLORS[o.color] for _, o in chunk], np.float32)[:, :, None, None]
            cover = shape_coverage(shape, centres[None, None, :] - x, centres[None, :, None] - y, radius)
            images[rows] += cover[:, None] * (color - images[rows])
    return images
