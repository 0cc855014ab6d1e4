"""Prompts of the embedded world: words, the whole grammar in a fixed order, parsing, held-out keys."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, product
from typing import Any

from margrpo.errors import ConfigError

CANVAS = 32
CELL = 8

COLORS: dict[str, tuple[float, float, float]] = {
    "red": (0.86, 0.16, 0.16),
    "green": (0.16, 0.63, 0.24),
    "blue": (0.16, 0.31, 0.86),
    "yellow": (0.94, 0.82, 0.16),
}
"""RGB in [0, 1] of every color word; no mixture with the background comes near another color's mixtures."""

SHAPES = ("circle", "square", "triangle")
RELATIONS = ("left of", "right of", "above", "below")
CATEGORIES = ("single", "color", "spatial", "numeracy")
COUNTS = {"two": 2, "three": 3}

VOCABULARY: tuple[str, ...] = (
    "<pad>",
    "a",
    "and",
    *COLORS,
    *SHAPES,
    *(f"{shape}s" for shape in SHAPES),
    *("left", "right", "of", "above", "below"),
    *COUNTS,
)
"""Every word of the grammar; the index is the token id and 0 is padding."""

MAX_WORDS = 8
"""Words of the longest prompt ("a red circle left of a blue square")."""

SPLIT_VERSION = "margrpo-scenes-2"
"""Seed of the held-out compositions and of the benchmark splits; a new value is a new benchmark.

The lowest number that leaves every object in the training prompts of every category.
"""

HELD_OUT_PAIRS = {"test": 8, "validation": 5}
HELD_OUT_COUNTS = {"test": 4, "validation": 2}
_TEMPLATES = (
    "a COLOR SHAPE | a COLOR SHAPE and a COLOR SHAPE | "
    "a COLOR SHAPE left of/right of/above/below a COLOR SHAPE | two/three COLOR SHAPEs"
)
_IDS = {word: index for index, word in enumerate(VOCABULARY)}


@dataclass(frozen=True)
class ScenePrompt:
    """A prompt: text, category, GenEval metadata, composition key, and whether the key occurs in training."""

    text: str
    category: str
    spec: dict[str, Any]
    key: str
    seen: bool


def stable_hash(*parts: str) -> str:
    """Return the sha256 (hex) of `SPLIT_VERSION` and the parts: a fixed pseudo-random order of prompts."""
    return hashlib.sha256("\x1f".join((SPLIT_VERSION, *parts)).encode()).hexdigest()


def tokenize(text: str) -> list[int]:
    """Return the token ids of a prompt, unpadded, after lower-casing and collapsing white space.

    Raises ConfigError for an unknown word, an empty prompt, or more than `MAX_WORDS` words.
    """
    words = text.lower().split()
    if not words:
        raise ConfigError(f"prompt {text!r} is empty; allowed: {_TEMPLATES}")
    for word in words:
        if word not in _IDS or word == VOCABULARY[0]:
            raise ConfigError(
                f"prompt {text!r}: unknown word {word!r}; allowed words: {', '.join(VOCABULARY[1:])} "
                "(margrpo.scenes.grammar.VOCABULARY)"
            )
    if len(words) > MAX_WORDS:
        raise ConfigError(f"prompt {text!r} has {len(words)} words; at most {MAX_WORDS}: {_TEMPLATES}")
    return [_IDS[word] for word in words]


def composition_split(key: str) -> str:
    """Return "train", "validation" or "test": where a composition key may occur, by sha256 order.

    Object pairs are held out for `color` and `spatial` together; single objects are never held out.
    """
    return _held_out().get(key, "train")


@lru_cache(maxsize=1)
def _held_out() -> dict[str, str]:
    objects = [f"{color} {shape}" for color, shape in product(COLORS, SHAPES)]
    pairs = [_pair_key(a, b) for a, b in combinations(objects, 2) if a.split()[1] != b.split()[1]]
    counts = [_count_key(count, thing) for count in COUNTS.values() for thing in objects]
    held: dict[str, str] = {}
    for keys, sizes in ((pairs, HELD_OUT_PAIRS), (counts, HELD_OUT_COUNTS)):
        ranked = iter(sorted(keys, key=stable_hash))
        for split, size in sizes.items():
            held.update((next(ranked), split) for _ in range(size))
    return held


def _pair_key(first: str, second: str) -> str:
    return "pair:" + "+".join(sorted((first, second)))


def _count_key(count: int, thing: str) -> str:
    return f"count:{count} {thing}"


def _prompt(text: str, category: str, key: str, **spec: Any) -> ScenePrompt:
    return ScenePrompt(text, category, spec, key, composition_split(key) == "train")


def _clause(thing: str, count: int = 1) -> dict[str, Any]:
    color, shape = thing.split()
    return {"class": shape, "count": count, "color": color}


def _single(thing: str) -> ScenePrompt:
    return _prompt(f"a {thing}", "single", f"single:{thing}", tag="colors", include=[_clause(thing)])


def _color(first: str, second: str) -> ScenePrompt:
    include = [_clause(first), _clause(second)]
    text = f"a {first} and a {second}"
    return _prompt(text, "color", _pair_key(first, second), tag="color_attr", include=include)


def _spatial(moved: str, relation: str, reference: str) -> ScenePrompt:
    # GenEval lists the reference object first and the object that the relation is about second.
    include = [_clause(reference), {**_clause(moved), "position": [relation, 0]}]
    text = f"a {moved} {relation} a {reference}"
    return _prompt(text, "spatial", _pair_key(moved, reference), tag="position", include=include)


def _numeracy(word: str, thing: str) -> ScenePrompt:
    count = COUNTS[word]
    exclude = [{"class": thing.split()[1], "count": count + 1}]
    include = [_clause(thing, count)]
    key = _count_key(count, thing)
    return _prompt(f"{word} {thing}s", "numeracy", key, tag="counting", include=include, exclude=exclude)


def all_prompts() -> list[ScenePrompt]:
    """Return the whole grammar (516 prompts) in a fixed order: single, color, spatial, numeracy.

    The two objects of a prompt differ in shape, as in GenEval's two-object tasks, whose rule counts by class.
    """
    objects = [f"{color} {shape}" for color, shape in product(COLORS, SHAPES)]
    ordered = [(a, b) for a, b in product(objects, repeat=2) if a.split()[1] != b.split()[1]]
    return [
        *(_single(thing) for thing in objects),
        *(_color(a, b) for a, b in ordered),
        *(_spatial(a, relation, b) for relation in RELATIONS for a, b in ordered),
        *(_numeracy(word, thing) for word in COUNTS for thing in objects),
    ]


@lru_cache(maxsize=1)
def _by_text() -> dict[str, ScenePrompt]:
    return {prompt.text: prompt for prompt in all_prompts()}


def parse(text: str) -> ScenePrompt:
    """Return the prompt of the grammar with this text, ignoring case and extra white space.

    Raises ConfigError for an unknown word or a sentence outside the grammar.
    """
    canonical = " ".join(VOCABULARY[index] for index in tokenize(text))
    prompt = _by_text().get(canonical)
    if prompt is None:
        raise ConfigError(
            f"prompt {text!r} is not a sentence of the embedded world; allowed: {_TEMPLATES} "
            "(the two objects of a prompt have different shapes)"
        )
    return prompt
