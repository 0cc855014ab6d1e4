from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from margrpo.benchmarks.rules.geneval import relations
from margrpo.scenes.grammar import CELL, COLORS, all_prompts, parse
from margrpo.scenes.render import BACKGROUND, Scene, SceneObject, render, sample_scene

PROMPT = parse("a red circle")


def box(thing: SceneObject) -> tuple[float, float, float, float]:
    return (thing.x - thing.radius, thing.y - thing.radius, thing.x + thing.radius, thing.y + thing.radius)


def test_sampled_scenes_satisfy_their_prompts_exactly() -> None:
    rng = np.random.default_rng(3)
    for prompt in all_prompts() * 3:
        scene = sample_scene(prompt, rng)
        wanted = sorted(
            (clause["color"], clause["class"])
            for clause in prompt.spec["include"]
            for _ in range(clause["count"])
        )
        assert sorted((thing.color, thing.shape) for thing in scene.objects) == wanted
        for thing in scene.objects:
            x0, y0, x1, y1 = box(thing)
            assert 0 <= x0 <= x1 <= 32
            assert 0 <= y0 <= y1 <= 32
            assert x0 // CELL == np.ceil(x1 / CELL) - 1  # stays inside its cell
        for a, b in combinations(scene.objects, 2):
            cells = [(int(o.x // CELL), int(o.y // CELL)) for o in (a, b)]
            assert max(abs(cells[0][0] - cells[1][0]), abs(cells[0][1] - cells[1][1])) >= 2
        if prompt.category == "spatial":
            moved, reference = scene.objects
            assert prompt.text.startswith(f"a {moved.color} {moved.shape}")
            assert relations(box(moved), box(reference)) == {prompt.spec["include"][1]["position"][0]}


def test_layouts_reach_every_cell_and_are_reproducible() -> None:
    rng = np.random.default_rng(0)
    scenes = [sample_scene(PROMPT, rng) for _ in range(400)]
    assert len({(int(s.objects[0].x // CELL), int(s.objects[0].y // CELL)) for s in scenes}) == 16
    again = np.random.default_rng(0)
    assert [sample_scene(PROMPT, again) for _ in range(400)] == scenes


@pytest.mark.parametrize(("shape", "area"), [("circle", np.pi * 9), ("square", 36.0), ("triangle", 18.0)])
def test_coverage_sums_to_the_area_of_the_shape(shape: str, area: float) -> None:
    # Sum over the canvas of (background - blue channel) / (background - color) is the covered area in px.
    image = render([Scene((SceneObject("red", shape, 16.3, 15.8, 3.0),), PROMPT)])[0]
    covered = (BACKGROUND[2] - image[2]).sum() / (BACKGROUND[2] - COLORS["red"][2])
    assert covered == pytest.approx(area, rel=0.06)


def test_pixels_have_the_stated_colors_and_orientation() -> None:
    things = (SceneObject("blue", "square", 4.0, 28.0, 3.5), SceneObject("green", "triangle", 20.0, 4.0, 3.5))
    images = render([Scene(things, PROMPT), Scene((), PROMPT)])
    assert images.shape == (2, 3, 32, 32)
    assert images.dtype == np.float32
    assert images[0, :, 28, 4] == pytest.approx(COLORS["blue"])
    assert images[0, :, 6, 20] == pytest.approx(COLORS["green"])
    assert images[0, :, 1, 17] == pytest.approx(BACKGROUND)  # beside the apex, which is at the top
    assert images[0, :, 6, 17] == pytest.approx(COLORS["green"], abs=0.25)  # near the base corner
    assert images[1] == pytest.approx(np.broadcast_to(np.array(BACKGROUND)[:, None, None], (3, 32, 32)))
