"""A look at a reward before it is trusted: two known pictures, each with its own and with the other's prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from margrpo.config import RewardOptions
from margrpo.rewards.base import entry
from margrpo.rewards.runner import Runner
from margrpo.scenes.grammar import parse
from margrpo.scenes.render import render, sample_scene

_SIDE = 256
_ROUNDING = 1e-4  # a cosine of float32 vectors may exceed 1
_SCENES = ("a red circle", "two blue squares")


@dataclass(frozen=True)
class SelfTest:
    """Scores of two pictures with their own prompts and with each other's.

    NaN: the reward has no score for that pair (a prompt without text, for OCR). repeatable: a second call gave
    the same. in_range: within what the reward declares. reasons: why scores are missing, if it said so.
    """

    own: tuple[float, float]
    exchanged: tuple[float, float]
    repeatable: bool
    in_range: bool
    reasons: tuple[str, ...] = ()

    @property
    def usable(self) -> bool:
        """Whether some own pair has a score and the scores repeat and lie in range."""
        return not self.problem

    @property
    def problem(self) -> str:
        """What is wrong, "" if nothing is."""
        if not any(np.isfinite(self.own)):
            return "no scores" + (f" ({self.reasons[0]})" if self.reasons else "")
        if not self.repeatable:
            return "a second call gave other scores"
        return "" if self.in_range else "scores outside of the declared range"

    @property
    def prompts(self) -> str:
        """What the scores say of the prompts: preferred where they belong, not preferred, or not looked at."""
        pairs = [pair for pair in zip(self.own, self.exchanged, strict=True) if np.isfinite(pair).all()]
        if not pairs:
            return "nothing to compare"
        if all(own == other for own, other in pairs):
            return "the prompt does not matter"
        return (
            "own prompts score higher"
            if all(own > other for own, other in pairs)
            else "own prompts do NOT score higher"
        )


def selftest(name: str, options: RewardOptions) -> SelfTest:
    """Set up a reward, or reach its server, and score the pictures; raises MargrpoError if that fails."""
    images, prompts, specs = _examples(name)
    runner = Runner(entry(name), options)
    runner.prepare()
    order = [0, 1, 0, 1]
    arguments = images[order], [prompts[i] for i in (0, 1, 1, 0)], [specs[i] for i in (0, 1, 1, 0)]
    scores, reasons = runner.score(*arguments)
    again, _ = runner.score(*arguments)
    own, exchanged = (tuple(part.tolist()) for part in (scores[:2], scores[2:]))
    info = runner.entry.info
    known = scores[~scores.isnan()]
    in_range = bool(((known >= info.low - _ROUNDING) & (known <= info.high + _ROUNDING)).all())
    repeatable = torch.equal(scores.nan_to_num(), again.nan_to_num())
    return SelfTest(own, exchanged, repeatable, in_range, tuple(reasons))


def _examples(name: str) -> tuple[Tensor, list[str], list[Mapping[str, Any]]]:
    if name == "scenes":
        scenes = [parse(text) for text in _SCENES]
        drawn = render([sample_scene(scene, np.random.default_rng(0)) for scene in scenes])
        return torch.from_numpy(drawn), list(_SCENES), [scene.spec for scene in scenes]
    circle, sign = (Image.new("RGB", (_SIDE, _SIDE), "white") for _ in range(2))
    ImageDraw.Draw(circle).ellipse((64, 64, 192, 192), fill=(220, 30, 30))
    font = ImageFont.load_default(size=56)
    ImageDraw.Draw(sign).text((_SIDE / 2, _SIDE / 2), "HELLO", fill="black", font=font, anchor="mm")
    pictures = [torch.from_numpy(np.array(picture)).permute(2, 0, 1) for picture in (circle, sign)]
    prompts = ["a red circle on a white background", 'a white sign that says "HELLO"']
    return torch.stack(pictures).float() / 255, prompts, [_spec("red circle"), _spec("white sign")]


def _spec(thing: str) -> Mapping[str, Any]:
    """Return what the rules of every benchmark need for a picture of one thing."""
    return {
        "noun_phrases": [f"a {thing}"],
        "objects": [thing],
        "counts": [1],
        "obj1": thing,
        "obj2": thing,
        "locality": "near",
        "include": [{"class": "stop sign", "count": 1}],
    }
