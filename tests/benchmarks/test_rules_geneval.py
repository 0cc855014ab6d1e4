from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from margrpo.benchmarks.rules.geneval import Detection, evaluate, keep, relations

CASES = json.loads((Path(__file__).parents[1] / "golden/evaluation/geneval_cases.json").read_text())["cases"]


def cases(suite: str) -> list[Any]:
    return [pytest.param(c["input"], c["expected"], id=c["id"]) for c in CASES if c["suite"] == suite]


def found(label: str, x: float, color: str | None = None, y: float = 0, score: float = 0.95) -> Detection:
    return Detection(label, (x, y, x + 50, y + 50), score, color)


@pytest.mark.parametrize(("given", "expected"), cases("geneval_position"))
def test_position_as_released(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert sorted(relations(given["box_a"], given["box_b"])) == expected["relations"]


@pytest.mark.parametrize(("given", "expected"), cases("geneval"))
def test_verdicts_as_released(given: dict[str, Any], expected: dict[str, Any]) -> None:
    detections = [
        Detection(d["label"], tuple(d["box"]), d["score"], d.get("color")) for d in given["detections"]
    ]
    verdict = evaluate(given["metadata"], detections)
    assert verdict.kept == expected["kept"]
    assert verdict.official is expected["official_correct"]
    assert verdict.strict is expected["strict_correct"]
    assert verdict.partial_released == pytest.approx(expected["partial_score"], abs=1e-6)
    assert 0 <= verdict.partial_clean <= 1


def test_all_golden_cases_are_here() -> None:
    assert [len(cases(suite)) for suite in ("geneval_position", "geneval")] == [20, 34]


def test_ties_come_out_in_reversed_order() -> None:
    a, b, c = found("cat", 0, score=0.5), found("cat", 100, score=0.5), found("cat", 200, score=0.9)
    assert keep([a, b, c], 0.3) == {"cat": [c, b, a]}


PAIR = {
    "tag": "position",
    "include": [
        {"class": "cat", "count": 1, "color": "red"},
        {"class": "dog", "count": 1, "color": "blue", "position": ["right of", 0]},
    ],
}
COUNT = {"tag": "counting", "include": [{"class": "cat", "count": 2, "color": "red"}]}


@pytest.mark.parametrize(
    ("spec", "detections", "clean"),
    [
        (PAIR, [found("cat", 0, "red"), found("dog", 200, "blue")], 1.0),
        (PAIR, [found("cat", 200, "red"), found("dog", 0, "blue")], 2 / 3),  # wrong side: no extra 1
        (PAIR, [found("cat", 0, "blue"), found("dog", 200, "blue")], 1 / 3),  # wrong color, so no relation
        (PAIR, [found("cat", 0, "red"), found("cat", 90, "red"), found("dog", 200, "blue")], 1 / 3),
        (PAIR, [found("dog", 200, "blue")], 1 / 3),
        (PAIR, [], 0.0),
        (COUNT, [found("cat", 0, "red")], 1 / 2),
        (COUNT, [found("cat", 0, "red"), found("cat", 90, "red")], 1.0),
        (COUNT, [found("cat", 0, "red"), found("cat", 90, "blue")], 1 / 2),
        (COUNT, [found("cat", 90.0 * i, "red") for i in range(3)], 1 / 2),  # a duplicate lowers
        (COUNT, [found("cat", 0, "red"), found("cat", 90, "red"), found("cat", 180, "blue")], 1 / 3),
        (COUNT, [found("cat", 90.0 * i, "red") for i in range(5)], 0.0),  # clamped where released is -.5
    ],
)
def test_clean_partial_credit(spec: dict[str, Any], detections: list[Detection], clean: float) -> None:
    assert evaluate(spec, detections).partial_clean == pytest.approx(clean)


def test_counting_threshold_is_a_parameter() -> None:
    detections = [found("cat", 0, "red", score=0.6), found("cat", 90, "red", score=0.6)]
    assert evaluate(COUNT, detections).kept == {}
    assert evaluate(COUNT, detections, counting_threshold=0.5).kept == {"cat": 2}


def test_string_counts_and_null_positions_are_tolerated() -> None:
    spec = {
        "tag": "x",
        "include": [{"class": "cat", "count": "1", "position": None}],
        "exclude": [{"class": "cat", "count": "2"}],
    }
    assert evaluate(spec, [found("cat", 0)]).official
    assert not evaluate(spec, [found("cat", 0), found("cat", 90)]).official
