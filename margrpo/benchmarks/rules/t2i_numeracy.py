"""T2I-CompBench's numeracy rule: parse counted objects, drop duplicate detections, count.

Source: Karine-Huang/T2I-CompBench, `UniDet_eval/numeracy_eval.py` (behaviour, not code).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from margrpo.benchmarks.rules.boxes import area, intersection, iou
from margrpo.benchmarks.rules.geneval import Detection
from margrpo.errors import MargrpoError

DUPLICATE = 0.9
"""Detections of one label are one object beyond this IoU or share of either area (inclusive pixels)."""
ALIASES_RELEASED = {
    "boy": "person",
    "girl": "person",
    "man": "person",
    "woman": "person",
    "ship": "boat",
    "telivision": "tv",  # the released table misspells it: a television is never renamed
    "goldfish": "fish",
    "painting": "picture",
}
ALIASES_CLEAN = {**{k: v for k, v in ALIASES_RELEASED.items() if k != "telivision"}, "television": "tv"}

_ONE = ("a", "an", "one")
_WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight")
_NUMBERS = {word: n for n, word in enumerate(_WORDS, start=1)}


@dataclass(frozen=True)
class Counted:
    """An object of a prompt (singular) and how many of it are wanted."""

    name: str
    count: int


def parse(prompt: str, plurals: Mapping[str, str]) -> list[Counted]:
    """Return the counted objects of a prompt in their order.

    Args:
        plurals: singular -> plural of the objects that count (the benchmark's `new_objects.txt`); others
            are ignored. A number word takes the known name of two words, else of one word, that follows it.

    Raises:
        MargrpoError: no known object, or a number word other than one before a singular; the released code
            crashes there.
    """
    words = prompt.lower().replace(",", " ").replace(".", " ").split()
    singular = {plural: name for name, plural in plurals.items()}
    found: list[Counted] = []
    for index, word in enumerate(words):
        if word not in _NUMBERS and word not in _ONE:
            continue
        for length in (2, 1):
            name = " ".join(words[index + 1 : index + 1 + length])
            if word in _ONE and name in plurals:
                found.append(Counted(name, 1))
                break
            if word not in _ONE and name in singular:
                found.append(Counted(singular[name], _NUMBERS[word]))
                break
            if name in plurals or name in singular:
                raise MargrpoError(f"{prompt!r}: {word} {name}; allowed: a number that agrees with its noun")
    if not found:
        raise MargrpoError(
            f"{prompt!r}: no counted object; allowed: a number word before one of {len(plurals)}"
        )
    return found


def numeracy_released(wanted: Sequence[Counted], detections: Sequence[Detection]) -> float:
    """Return the released score: 1/2 for each object present and 1/2 more for the exact count, averaged.

    If no label equals the name, every label that contains it is renamed to it, also for later objects (a
    microphone counts as a phone). Raises MargrpoError without wanted objects (released: division by zero).
    """
    _check(wanted)
    labels = [detection.label for detection in _distinct(detections)]
    total = 0.0
    for item in wanted:
        name = ALIASES_RELEASED.get(item.name, item.name)
        if name not in labels:
            labels = [name if name in label else label for label in labels]
        count = labels.count(name)
        total += 0.5 * (count > 0) + 0.5 * (count > 0 and count == item.count)
    return total / len(wanted)


def numeracy_clean(wanted: Sequence[Counted], detections: Sequence[Detection]) -> float:
    """Return the mean over objects of max(0, 1 - |n - k| / k), with names compared as whole words.

    Not comparable with published numbers: television is tv, a label counts under each of its
    comma-separated names or its last word ("cell phone" is a phone, a microphone is not), near counts earn
    part of the credit, and only overlap beyond IoU 0.9 makes a duplicate, so that a small object before a
    larger one of its kind counts. Raises MargrpoError without wanted objects.
    """
    _check(wanted)
    kept = _distinct(detections, contained=False)
    total = 0.0
    for item in wanted:
        names = {item.name, ALIASES_CLEAN.get(item.name, item.name)}
        count = sum(bool(names & _names(detection.label)) for detection in kept)
        total += max(0.0, 1 - abs(count - item.count) / item.count)
    return total / len(wanted)


def _names(label: str) -> set[str]:
    names = {name.strip() for name in label.split(",")}
    return names | {name.split()[-1] for name in names if name}


def _distinct(detections: Sequence[Detection], contained: bool = True) -> list[Detection]:
    """Return the detections that repeat no earlier one of their label."""
    kept: list[Detection] = []
    for detection in detections:
        same = (other for other in kept if other.label == detection.label)
        if not any(_repeats(detection.box, other.box, contained) for other in same):
            kept.append(detection)
    return kept


def _repeats(a: Sequence[float], b: Sequence[float], contained: bool) -> bool:
    if iou(a, b, inclusive=True) > DUPLICATE:
        return True
    shared = intersection(a, b, inclusive=True)
    return contained and any(shared / area(box, inclusive=True) > DUPLICATE for box in (a, b))


def _check(wanted: Sequence[Counted]) -> None:
    if not wanted:
        raise MargrpoError("numeracy: no wanted object; allowed: at least one counted object in the prompt")
