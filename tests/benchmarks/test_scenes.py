from __future__ import annotations

import time
from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from margrpo.benchmarks.scenes import RULES, load_split, manifest, score, score_all
from margrpo.errors import ConfigError, MargrpoError
from margrpo.scenes.grammar import CATEGORIES, COLORS, RELATIONS, SHAPES, ScenePrompt, all_prompts, parse
from margrpo.scenes.render import BACKGROUND, Scene, SceneObject, render, sample_scene

Images = NDArray[np.float32]
BACK = np.array(BACKGROUND, np.float32)[:, None, None]


def balanced(count: int, seed: int) -> list[Scene]:
    """`count` scenes, as many of every category."""
    rng = np.random.default_rng(seed)
    groups = [[p for p in all_prompts() if p.category == category] for category in CATEGORIES]
    return [sample_scene(group[rng.integers(len(group))], rng) for _ in range(count // 4) for group in groups]


@pytest.fixture(scope="module")
def truth() -> tuple[Images, list[dict]]:
    scenes = balanced(2000, seed=5)
    return render(scenes), [scene.prompt.spec for scene in scenes]


def image_of(*things: SceneObject) -> Images:
    return render([Scene(things, parse("a red circle"))])


def mean(images: Images, specs: list[dict], rule: str = RULES[0]) -> float:
    parts = [score(images[i : i + 64], specs[i : i + 64], rule) for i in range(0, len(images), 64)]
    return float(torch.cat(parts).mean())


def project_patches(images: Images, dimensions: int) -> Images:
    """Rebuild the images from the first principal components of their 8 x 8 patches."""
    count = len(images)
    patches = images.reshape(count, 3, 4, 8, 4, 8).transpose(0, 2, 4, 1, 3, 5).reshape(-1, 192)
    centred = patches - patches.mean(axis=0)
    axes = np.linalg.eigh(centred.T @ centred)[1][:, -dimensions:]
    rebuilt = centred @ axes @ axes.T + patches.mean(axis=0)
    grid = rebuilt.reshape(count, 4, 4, 3, 8, 8).transpose(0, 3, 1, 4, 2, 5).reshape(images.shape)
    return np.clip(grid, 0, 1).astype(np.float32)


# Splits


def test_split_sizes_and_categories() -> None:
    shape = {s: manifest()["splits"][s] for s in ("train", "validation", "test")}
    assert [(s["prompts"], s["unseen"]) for s in shape.values()] == [(380, 0), (50, 18), (96, 36)]
    assert shape["test"]["categories"] == {"single": 12, "color": 32, "spatial": 32, "numeracy": 20}
    for split in shape:
        texts = [prompt.text for prompt in load_split(split)]
        assert len(set(texts)) == len(texts)


def test_unseen_compositions_are_disjoint_from_training_and_from_each_other() -> None:
    train = {prompt.key for prompt in load_split("train")}
    unseen = {s: {p.key for p in load_split(s) if not p.seen} for s in ("validation", "test")}
    assert all(prompt.seen for prompt in load_split("train"))
    assert train.isdisjoint(unseen["validation"] | unseen["test"])
    assert unseen["validation"].isdisjoint(unseen["test"])
    assert {s: len(keys) for s, keys in unseen.items()} == {"validation": 5 + 2, "test": 8 + 4}  # all of them
    assert all(p.key in train for s in unseen for p in load_split(s) if p.seen)


def test_training_shows_every_object_relation_and_count_in_every_category() -> None:
    train = load_split("train")
    objects = {(p.category, c["color"], c["class"]) for p in train for c in p.spec["include"]}
    assert objects == set(product(CATEGORIES, COLORS, SHAPES))
    assert {p.spec["include"][1]["position"][0] for p in train if p.category == "spatial"} == set(RELATIONS)
    assert {p.spec["include"][0]["count"] for p in train if p.category == "numeracy"} == {2, 3}


@pytest.mark.parametrize("split", ["validation", "test"])
def test_relations_are_equally_frequent(split: str) -> None:
    for seen in (True, False):
        chosen = [p for p in load_split(split) if p.category == "spatial" and p.seen == seen]
        assert len(set(Counter(p.spec["include"][1]["position"][0] for p in chosen).values())) == 1


def test_the_published_benchmark_does_not_change() -> None:
    assert manifest()["version"] == "margrpo-scenes-2"
    assert manifest()["sha256"] == "048535b5ac5669f99d33c8dd3a571cbe116c5868f6b3ed8bd04c3c816629387f"


def test_unknown_split_and_rule() -> None:
    with pytest.raises(ConfigError, match="train, validation, test"):
        load_split("val")
    with pytest.raises(ConfigError, match="geneval_strict"):
        score(image_of(), [parse("a red circle").spec], "clip")
    with pytest.raises(MargrpoError, match="1 images but 0"):
        score(image_of(), [])


# Scores


@pytest.mark.parametrize("rule", RULES)
def test_rendered_prompts_score_one(truth: tuple[Images, list[dict]], rule: str) -> None:
    assert mean(*truth, rule) >= 0.995


def test_mismatched_prompts_score_low(truth: tuple[Images, list[dict]]) -> None:
    images, specs = truth
    order = np.random.default_rng(1).permutation(len(specs))
    assert mean(images, [specs[i] for i in order]) <= 0.2
    assert mean(images, [specs[i] for i in order], "geneval_strict") <= 0.05


def test_low_pass_patches_keep_the_score(truth: tuple[Images, list[dict]]) -> None:
    images, specs = truth
    assert mean(project_patches(images, 16), specs) >= 0.995


def palette_noise(rng: np.random.Generator, block: int) -> Images:
    colors = np.array([*COLORS.values(), BACKGROUND], np.float32)
    cells = rng.integers(len(colors), size=(400, 32 // block, 32 // block))
    return colors[cells.repeat(block, axis=1).repeat(block, axis=2)].transpose(0, 3, 1, 2)


@pytest.mark.parametrize(
    "kind", ["uniform", "gaussian", "on background", "palette 1", "palette 2", "palette 4"]
)
def test_noise_scores_nothing(truth: tuple[Images, list[dict]], kind: str) -> None:
    rng = np.random.default_rng(4)
    shape = (400, 3, 32, 32)
    if kind.startswith("palette"):
        images = palette_noise(rng, int(kind[-1]))
    elif kind == "uniform":
        images = rng.random(shape)
    else:
        images = (0.5 if kind == "gaussian" else BACK) + 0.25 * rng.standard_normal(shape)
    scores = score_all(images.astype(np.float32), truth[1][:400])
    assert all(float(scores[rule].mean()) <= 0.02 for rule in RULES[:3])


@pytest.mark.parametrize("value", [0.0, 0.5, BACK, 1.0])
def test_blank_images_score_zero_everywhere(value: float | Images) -> None:
    specs = [prompt.spec for prompt in all_prompts()]
    images = np.zeros((len(specs), 3, 32, 32), np.float32) + value
    scores = score_all(images.astype(np.float32), specs)
    assert all(float(scores[rule].abs().max()) == 0 for rule in RULES)


def test_collages_do_not_beat_half_on_strict() -> None:
    spots = [(4, 4), (20, 4), (4, 20), (20, 20)]
    all_shapes = [SceneObject(c, s, *at, 3.35) for c, s, at in zip(COLORS, SHAPES, spots, strict=False)]
    all_objects = [
        SceneObject(c, s, 4 + 8 * (i % 4), 4 + 8 * (i // 4), 3.35)
        for i, (c, s) in enumerate(product(COLORS, SHAPES))
    ]
    for things in (all_shapes, all_objects):
        for category in CATEGORIES:
            specs = [p.spec for p in all_prompts() if p.category == category]
            images = np.repeat(image_of(*things), len(specs), axis=0)
            assert mean(images, specs, "geneval_strict") == 0
            assert mean(images, specs) <= 0.5


@pytest.mark.parametrize("rule", ["geneval_partial_clean", "geneval_strict", "geneval_official"])
def test_a_duplicated_object_does_not_raise_numeracy(rule: str) -> None:
    prompt = parse("two red circles")
    pair = (SceneObject("red", "circle", 4, 4, 3.35), SceneObject("red", "circle", 20, 4, 3.35))
    for third in (SceneObject("red", "circle", 20, 20, 3.35), SceneObject("red", "circle", 6, 4, 3.35)):
        two, three = (score(image_of(*things), [prompt.spec], rule) for things in (pair, (*pair, third)))
        assert two == 1
        assert three <= two
    apart = score(image_of(*pair, SceneObject("red", "circle", 20, 20, 3.35)), [prompt.spec], rule)
    assert apart == (0.5 if rule == "geneval_partial_clean" else 0)


def test_partial_credit_is_dense() -> None:
    spec = parse("a red circle left of a blue square").spec
    circle, square = SceneObject("red", "circle", 4, 4, 3.35), SceneObject("blue", "square", 20, 4, 3.35)
    wrong_side = (SceneObject("red", "circle", 20, 4, 3.35), SceneObject("blue", "square", 4, 4, 3.35))
    images = np.concatenate([image_of(), image_of(circle), image_of(*wrong_side), image_of(circle, square)])
    assert score(images, [spec] * 4).tolist() == pytest.approx([0, 1 / 3, 2 / 3, 1])


def test_penalties() -> None:
    circle, extra = SceneObject("red", "circle", 4, 4, 3.35), SceneObject("blue", "square", 20, 20, 3.35)
    spec = parse("a red circle").spec
    dirty = image_of(circle)
    dirty[:, :, 16:, 8:24] = 0  # 256 of 1,024 pixels are black: a share of .25
    scores = score_all(np.concatenate([image_of(circle), image_of(circle, extra), dirty]), [spec] * 3)
    assert scores["off_palette"].tolist() == [0, 0, 0.25]
    assert scores["extra_objects"].tolist() == [0, 1, 0]
    assert scores["geneval_strict"].tolist() == [1, 0, 0]
    assert scores["geneval_official"].tolist() == [1, 1, 1]
    assert scores["geneval_partial_clean"].tolist() == pytest.approx([1, 1, 0.25 / 0.45])


def test_scoring_is_fast(truth: tuple[Images, list[dict]]) -> None:
    images, specs = truth
    score(images[:64], specs[:64])
    start = time.process_time()
    mean(images[:640], specs[:640])
    assert (time.process_time() - start) / 640 <= 1.5e-3


def test_prompts_carry_their_specs() -> None:
    prompts: list[ScenePrompt] = load_split("test")
    assert all(parse(prompt.text) == prompt for prompt in prompts)
