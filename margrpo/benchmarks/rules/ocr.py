"""Text rendering score from recognised lines (Flow-GRPO, MAR-GRPO), and a cleaned variant.

Source: yifan123/flow_grpo, `flow_grpo/ocr.py` (behaviour, not code).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from margrpo.errors import MargrpoError


@dataclass(frozen=True)
class Line:
    """A recognised line of text and its confidence in [0, 1]."""

    text: str
    confidence: float


def target(prompt: str) -> str:
    """Return the text between the first pair of straight double quotes.

    Raises MargrpoError if there is none or it is empty (the released code crashes).
    """
    parts = prompt.split('"')
    if len(parts) < 2:
        raise MargrpoError(
            f'prompt without quoted text: {prompt!r}; allowed: a "text" in straight double quotes'
        )
    if not _plain(parts[1]):
        raise MargrpoError(
            f"prompt with an empty quotation: {prompt!r}; allowed: at least one letter in quotes"
        )
    return parts[1]


def ocr_released(prompt: str, lines: Sequence[Line]) -> float:
    """Return 1 - edit distance / length in [0, 1] of the lines read for the prompt's quoted text.

    Spaces and case don't count, lines are joined in reading order, extra text is free where the target
    occurs in it. Raises MargrpoError where the prompt has no text to read.
    """
    wanted = _plain(target(prompt))
    read = _plain("".join(line.text for line in lines if line.confidence > 0))
    if wanted in read:
        return 1.0
    return 1 - min(edit_distance(read, wanted), len(wanted)) / len(wanted)


def ocr_clean(prompt: str, lines: Sequence[Line]) -> float:
    """Return the same with typographic quotes accepted and extra text paid for, also around the target.

    1 - distance / max(length read, length wanted); not comparable with published numbers.
    """
    wanted = _plain(target(prompt.translate(_QUOTES)))
    read = _plain("".join(line.text for line in lines if line.confidence > 0))
    return 1 - edit_distance(read, wanted) / max(len(read), len(wanted))


def edit_distance(a: str, b: str) -> int:
    """Return the number of insertions, deletions and substitutions that turn a into b (Levenshtein)."""
    previous = list(range(len(b) + 1))
    for i, letter in enumerate(a, start=1):
        row = [i]
        for j, other in enumerate(b, start=1):
            row.append(min(previous[j] + 1, row[-1] + 1, previous[j - 1] + (letter != other)))
        previous = row
    return previous[-1]


_QUOTES = {ord("“"): '"', ord("”"): '"'}


def _plain(text: str) -> str:
    return text.replace(" ", "").lower()
