"""The embedded compositional benchmark: splits of the scene grammar and scores of images.

Splits are a pure function of `grammar.SPLIT_VERSION`. Held out are unordered object pairs (for `color` and
`spatial` together) and (count, color, shape) triples; single objects always occur in training. `train` is
every prompt of a training composition. `validation` and `test` weigh the categories about equally, as GenEval's
overall score does, and mix seen and unseen compositions where there are unseen ones.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from margrpo.benchmarks.rules.geneval import Verdict, evaluate
from margrpo.errors import ConfigError, MargrpoError
from margrpo.scenes.detect import Detector
from margrpo.scenes.grammar import (
    RELATIONS,
    SPLIT_VERSION,
    ScenePrompt,
    all_prompts,
    composition_split,
    stable_hash,
)

SPLITS = ("train", "validation", "test")
RULES = ("geneval_partial_clean", "geneval_strict", "geneval_official", "geneval_partial_released")
COUNTING_THRESHOLD = 0.5
"""Keep threshold of counting prompts for this detector, in place of GenEval's .9.

Measured on 20,000 rendered scenes: every object scores above .64, and .8 would lose .2 % of the counting score.
"""
OFF_PALETTE_FREE = 0.05
"""Share of pixels in no palette class that costs nothing."""
OFF_PALETTE_ZERO = 0.5
"""Share at which nothing of `geneval_partial_clean` is left."""

_QUOTAS = {
    "validation": (
        {"single": 8, "color": 8, "spatial": 8, "numeracy": 8},
        {"color": 8, "spatial": 8, "numeracy": 2},
    ),
    "test": (
        {"single": 12, "color": 16, "spatial": 16, "numeracy": 16},
        {"color": 16, "spatial": 16, "numeracy": 4},
    ),
}
"""Prompts per category: of compositions seen in training, of unseen ones."""


def load_split(split: str) -> list[ScenePrompt]:
    """Return the prompts of "train" (380), "validation" (50) or "test" (96) in a fixed order.

    Raises ConfigError for another name.
    """
    if split not in SPLITS:
        raise ConfigError.of("split", repr(split), f"allowed: {', '.join(SPLITS)}")
    if split == "train":
        return [prompt for prompt in all_prompts() if prompt.seen]
    seen, unseen = _QUOTAS[split]
    return _choose(split, "train", seen) + _choose(split, split, unseen)


def _choose(split: str, compositions: str, quota: Mapping[str, int]) -> list[ScenePrompt]:
    """Take each category's first prompts by hash, as many of every relation, from the named compositions."""
    pool = [prompt for prompt in all_prompts() if composition_split(prompt.key) == compositions]
    pool.sort(key=lambda prompt: stable_hash(split, prompt.text))
    chosen: list[ScenePrompt] = []
    for category, count in quota.items():
        members = [prompt for prompt in pool if prompt.category == category]
        if category == "spatial":
            for relation in RELATIONS:
                same = [p for p in members if p.spec["include"][1]["position"][0] == relation]
                chosen += same[: count // len(RELATIONS)]
        else:
            chosen += members[:count]
    return chosen


def manifest() -> dict[str, Any]:
    """Return version, sha256 of the whole, and for every split its counts and the sha256 of its lines.

    A line is `category TAB key TAB text`, ended by a newline; the whole is all lines in the order of
    `SPLITS`.
    """
    whole = hashlib.sha256()
    splits: dict[str, Any] = {}
    for split in SPLITS:
        prompts = load_split(split)
        lines = "".join(f"{p.category}\t{p.key}\t{p.text}\n" for p in prompts).encode()
        whole.update(lines)
        splits[split] = {
            "prompts": len(prompts),
            "unseen": sum(not prompt.seen for prompt in prompts),
            "categories": dict(Counter(prompt.category for prompt in prompts)),
            "sha256": hashlib.sha256(lines).hexdigest(),
        }
    return {"version": SPLIT_VERSION, "sha256": whole.hexdigest(), "splits": splits}


@lru_cache(maxsize=1)
def _detector() -> Detector:
    return Detector()


def score(
    images: np.ndarray | torch.Tensor, specs: Sequence[Mapping[str, Any]], rule: str = RULES[0]
) -> torch.Tensor:
    """Return the score [B], float32, of images [B, 3, 32, 32] in [0, 1] for their GenEval metadata.

    Raises ConfigError for an unknown rule. The rules are described at `score_all`.
    """
    if rule not in RULES:
        raise ConfigError.of("rule", repr(rule), f"allowed: {', '.join(RULES)}")
    return score_all(images, specs)[rule]


def score_all(
    images: np.ndarray | torch.Tensor, specs: Sequence[Mapping[str, Any]]
) -> dict[str, torch.Tensor]:
    """Return every rule's score [B] from one detector pass, and what the penalties saw.

    `geneval_official` (0 or 1) and `geneval_partial_released` (can be negative) are the published rules
    untouched. `geneval_strict` (0 or 1) is the released strict verdict, and 0 if the image has an object of
    a class that the prompt does not name, or more than `OFF_PALETTE_FREE` of its pixels in no palette class.
    `geneval_partial_clean` (0 .. 1, dense) loses nothing up to `OFF_PALETTE_FREE` and from there linearly
    all of it at `OFF_PALETTE_ZERO`. `off_palette` is that share of pixels, `extra_objects` the number of
    kept objects of unnamed classes.
    """
    if len(images) != len(specs):
        raise MargrpoError(f"{len(images)} images but {len(specs)} prompt specs; pass one spec per image")
    found, off_palette = _detector().inspect(images)
    verdicts = [
        evaluate(spec, group, counting_threshold=COUNTING_THRESHOLD)
        for spec, group in zip(specs, found, strict=True)
    ]
    off = torch.from_numpy(off_palette)
    extra = torch.tensor([float(_extra_objects(s, v)) for s, v in zip(specs, verdicts, strict=True)])
    factor = ((OFF_PALETTE_ZERO - off) / (OFF_PALETTE_ZERO - OFF_PALETTE_FREE)).clamp(0, 1)
    strict = torch.tensor([float(v.strict) for v in verdicts])
    return {
        "geneval_partial_clean": torch.tensor([v.partial_clean for v in verdicts]) * factor,
        "geneval_strict": strict * (extra == 0) * (off <= OFF_PALETTE_FREE),
        "geneval_official": torch.tensor([float(v.official) for v in verdicts]),
        "geneval_partial_released": torch.tensor([v.partial_released for v in verdicts]),
        "off_palette": off,
        "extra_objects": extra,
    }


def _extra_objects(spec: Mapping[str, Any], verdict: Verdict) -> int:
    named = {clause["class"] for clause in spec["include"]}
    return sum(count for label, count in verdict.kept.items() if label not in named)
