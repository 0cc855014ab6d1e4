"""T2I-CompBench's attribute score from yes/no answers, and its 3-in-1 score of complex prompts.

Source: Karine-Huang/T2I-CompBench, `BLIPvqa_eval/` and `3_in_1_eval/` (behaviour, not code).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from margrpo.errors import MargrpoError

MAX_QUESTIONS = 8
NOT_ASKED = frozenset({"top", "the side", "the left", "the right"})
"""Noun chunks that are no object; "the top" is missing in the released list and becomes a question."""

Kind = Literal["spatial", "action", "spatial+action"]


def questions(chunks: Sequence[str]) -> list[str]:
    """Return the questions of a prompt's noun chunks: at most 8, "a red bench" -> "a red bench?"."""
    return [f"{chunk}?" for chunk in chunks if chunk not in NOT_ASKED][:MAX_QUESTIONS]


def attribute_released(p_yes: Sequence[float]) -> str:
    """Return the released score as text: product of P(yes) over the questions, rounded to 4 decimals twice.

    Each probability (float32) is written with 4 decimals, the product is taken in float32 and written so too.
    """
    product = np.float32(1.0)
    for probability in list(p_yes)[:MAX_QUESTIONS]:
        product *= np.float32(f"{np.float32(probability):.4f}")
    return f"{product:.4f}"


def attribute_clean(p_yes: Sequence[float]) -> float:
    """Return the unrounded product of P(yes) over all questions, in [0, 1]."""
    return math.prod(p_yes)


def three_in_one(kind: Kind, attribute: float, spatial: float, action: float) -> float:
    """Return the mean of the parts of a complex prompt's kind: attribute, and spatial or action or both.

    Raises MargrpoError for another kind.
    """
    parts = {
        "spatial": (spatial, attribute),
        "action": (action, attribute),
        "spatial+action": (attribute, spatial, action),
    }.get(kind)
    if parts is None:
        raise MargrpoError(f"kind of complex prompt: {kind!r}; allowed: spatial, action, spatial+action")
    return sum(parts) / len(parts)
