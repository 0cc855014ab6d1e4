from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from margrpo.benchmarks.rules.geneval import Detection
from margrpo.errors import MargrpoError
from margrpo.scenes.detect import Detector
from margrpo.scenes.grammar import COLORS, SHAPES, all_prompts, parse
from margrpo.scenes.render import BACKGROUND, Scene, SceneObject, render, sample_scene

DETECTOR = Detector()
PROMPT = parse("a red circle")


def detect(*things: SceneObject) -> list[Detection]:
    return DETECTOR(render([Scene(things, PROMPT)]))[0]


def good(found: list[Detection]) -> list[Detection]:
    return [detection for detection in found if detection.score > 0.5]


def test_detections_reproduce_the_scene() -> None:
    rng = np.random.default_rng(11)
    scenes = [sample_scene(prompt, rng) for prompt in all_prompts() * 2]
    exact = 0
    for scene, found in zip(scenes, DETECTOR(render(scenes)), strict=True):
        wanted = sorted((o.shape, o.color, o.x, o.y, o.radius) for o in scene.objects)
        seen = sorted(
            (
                d.label,
                d.color or "",
                (d.box[0] + d.box[2]) / 2,
                (d.box[1] + d.box[3]) / 2,
                (d.box[2] - d.box[0]) / 2,
            )
            for d in good(found)
        )
        exact += len(seen) == len(wanted) and all(
            a[:2] == b[:2] and np.allclose(a[2:], b[2:], atol=0.8) for a, b in zip(wanted, seen, strict=True)
        )
        assert [d.score for d in found] == sorted((d.score for d in found), reverse=True)
    assert exact >= 0.995 * len(scenes)


@pytest.mark.parametrize(("color", "shape", "radius"), list(product(COLORS, SHAPES, (2.9, 3.35, 4.0))))
def test_label_and_color_also_for_sizes_that_are_never_rendered(
    color: str, shape: str, radius: float
) -> None:
    (found,) = detect(SceneObject(color, shape, 12.2, 19.7, radius))
    assert (found.label, found.color) == (shape, color)
    assert found.score > 0.8


@pytest.mark.parametrize("shape", ["circle", "square"])
@pytest.mark.parametrize("distance", [3.5, 5.0, 6.5])
def test_merged_objects_are_not_a_good_object(shape: str, distance: float) -> None:
    first, second = (
        SceneObject("red", shape, 12, 12, 3.35),
        SceneObject("red", shape, 12 + distance, 12, 3.35),
    )
    assert good(detect(first, second)) == []


def test_touching_objects_of_two_colors_stay_two_objects() -> None:
    found = good(
        detect(SceneObject("red", "circle", 12, 12, 3.35), SceneObject("blue", "square", 18.6, 12, 3.35))
    )
    assert {(d.label, d.color) for d in found} == {("circle", "red"), ("square", "blue")}


@pytest.mark.parametrize("shape", SHAPES)
def test_half_an_object_and_a_faint_ghost_are_not_good_objects(shape: str) -> None:
    background = np.array(BACKGROUND, np.float32)[None, :, None, None]
    image = render([Scene((SceneObject("blue", shape, 12, 12, 3.35),), PROMPT)])
    ghost = background + 0.6 * (image - background)
    half = image.copy()
    half[:, :, :, 12:] = background
    for changed in (ghost, half):
        assert all(d.score <= 0.3 for d in DETECTOR(changed.astype(np.float32))[0])


def test_tensors_arrays_and_batches_agree() -> None:
    rng = np.random.default_rng(2)
    images = render([sample_scene(prompt, rng) for prompt in all_prompts()[:40]])
    together = DETECTOR(torch.from_numpy(images))
    assert together == [DETECTOR(images[i : i + 1])[0] for i in range(40)]
    assert DETECTOR(images[:0]) == []


def test_nan_and_out_of_range_values_are_survived() -> None:
    broken = np.full((1, 3, 32, 32), np.nan, np.float32)
    found, off_palette = DETECTOR.inspect(np.concatenate([broken, np.full_like(broken, np.inf)]))
    assert found == [[], []]
    assert off_palette.tolist() == [1.0, 0.0]  # black is no palette class; white is near the background


def test_other_shapes_are_an_error() -> None:
    with pytest.raises(MargrpoError, match=r"\[2, 3, 16, 16\]"):
        DETECTOR(np.zeros((2, 3, 16, 16), np.float32))
