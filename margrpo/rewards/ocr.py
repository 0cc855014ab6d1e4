"""Text rendering: what an OCR model reads in the image against the prompt's quoted text.

The recogniser is RapidOCR, whose models come with the package (`margrpo[ocr]`); scores of another one differ.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from margrpo.benchmarks.rules.ocr import Line, ocr_clean, ocr_released
from margrpo.config import RewardOptions
from margrpo.errors import MargrpoError
from margrpo.rewards.base import Info, Reward, Specs, register
from margrpo.rewards.images import to_uint8

Read = Callable[[np.ndarray], list[Line]]

_log = logging.getLogger("margrpo.rewards")


class OcrReward:
    """Score in [0, 1] of images [B, 3, H, W]; NaN, with a warning, for a prompt without quoted text.

    `read` returns the lines of an RGB picture [H, W, 3], uint8; `rule` scores them for a prompt.
    """

    def __init__(self, read: Read, rule: Callable[[str, Sequence[Line]], float]) -> None:
        self.read, self.rule = read, rule

    def __call__(self, images: Tensor, prompts: Sequence[str], specs: Specs) -> Tensor:
        """Return one score per image."""
        pictures = to_uint8(images).permute(0, 2, 3, 1).cpu().numpy()
        scores = []
        skipped: set[str] = set()
        for picture, prompt in zip(pictures, prompts, strict=True):
            try:
                self.rule(prompt, [])  # nothing to read needs no recogniser
                scores.append(self.rule(prompt, self.read(picture)))
            except MargrpoError as error:
                scores.append(float("nan"))
                skipped.add(str(error))
        for reason in sorted(skipped):
            _log.warning("margrpo: reward ocr: skipped a %s", reason)
        return torch.tensor(scores, dtype=torch.float32)


def _rapidocr() -> Read:
    from rapidocr import RapidOCR  # type: ignore[import-not-found,unused-ignore]

    engine: Any = RapidOCR(params={"Global.log_level": "error"})

    def read(picture: np.ndarray) -> list[Line]:
        # the package takes arrays as BGR
        result = engine(np.ascontiguousarray(picture[..., ::-1]))
        pairs = zip(result.txts or (), result.scores or (), strict=True)
        return [Line(text, float(confidence)) for text, confidence in pairs]

    return read


def _info(name: str, summary: str) -> Info:
    return Info(name, summary, "Apache-2.0", low=0.0, high=1.0, extra=("ocr", "rapidocr"))


@register(_info("ocr", "Flow-GRPO's OCR rule on RapidOCR: 1 - edit distance / length, extra text free"))
def ocr(options: RewardOptions) -> Reward:
    """Return the scorer with the released rule."""
    return OcrReward(_rapidocr(), ocr_released)


@register(_info("ocr_clean", "the same with extra text paid for and typographic quotes read"))
def ocr_with_clean_rule(options: RewardOptions) -> Reward:
    """Return the scorer with the cleaned rule."""
    return OcrReward(_rapidocr(), ocr_clean)
