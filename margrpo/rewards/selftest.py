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
from margrpo.scenes.grammar import parse
from margrpo.scenes.render import render, sample_scene

_SIDE = 256
_SCENES = ("a red circle", "two blue squares")


@dataclass(frozen=True)
class SelfTest:
    """Scores of two pictures with their own prompts, with each other's, and whether a repetition agreed.

    NaN: the reward has no score for that pair (a prompt without text, for OCR).
    """

    own: tuple[float, float]
    exchanged: tuple[float, float]
    repeatable: bool

    @property
    def usable(self) -> bool:
        """Whether some own pair has a score and the scores repeat."""
        return self.repeatable and any(np.isfinite(self.own))


def selftest(name: str, options: RewardOptions) -> SelfTest:
    """Build a reward and score the pictures; raises MargrpoError if it cannot be set up."""
    images, prompts, specs = _examples(name)
    reward = entry(name).build(options)
    order = [0, 1, 0, 1]
    with torch.no_grad():
        arguments = images[order], [prompts[i] for i in (0, 1, 1, 0)], [specs[i] for i in (0, 1, 1, 0)]
        scores, again = reward(*arguments).cpu(), reward(*arguments).cpu()
    own, exchanged = (tuple(part.tolist()) for part in (scores[:2], scores[2:]))
    return SelfTest(own, exchanged, torch.equal(scores.nan_to_num(), again.nan_to_num()))


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
