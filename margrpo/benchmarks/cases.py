"""Replay of case files: recorded inputs and outputs of published scoring rules against ours.

A file is `{"cases": [{id, suite, input, expected, tol, note}]}`. `expected.error` means that the released
code raises: ours passes if it refuses the case with a clear error or scores it 0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from margrpo.benchmarks.rules import gdino, geneval, ocr, t2i_attribute, t2i_numeracy, t2i_spatial
from margrpo.errors import MargrpoError

Outcome = dict[str, Any]


@dataclass(frozen=True)
class Failure:
    """A case whose outcome differs: what was expected and what came out (or the error)."""

    id: str
    expected: Any
    got: Any


@dataclass(frozen=True)
class Suite:
    """The replay of one suite's cases."""

    name: str
    passed: int
    failures: tuple[Failure, ...]

    @property
    def failed(self) -> int:
        """Number of cases that differ."""
        return len(self.failures)


@dataclass(frozen=True)
class Report:
    """The replay of a file, by suite in the order of the file."""

    suites: tuple[Suite, ...]

    @property
    def passed(self) -> int:
        """Number of cases that agree."""
        return sum(suite.passed for suite in self.suites)

    @property
    def failed(self) -> int:
        """Number of cases that differ."""
        return sum(suite.failed for suite in self.suites)

    def to_json(self) -> str:
        """Return the report as a JSON object."""
        suites = [{**asdict(suite), "failed": suite.failed} for suite in self.suites]
        return json.dumps({"passed": self.passed, "failed": self.failed, "suites": suites}, indent=2)

    def to_text(self) -> str:
        """Return a line per suite, a line per failure, and the sum."""
        lines = []
        for suite in self.suites:
            lines.append(f"{suite.name}: {suite.passed} passed, {suite.failed} failed")
            lines += [f"  {f.id}: expected {f.expected}, got {f.got}" for f in suite.failures]
        return "\n".join([*lines, f"{self.passed} passed, {self.failed} failed"])


def verify(path: Path) -> Report:
    """Replay the cases of a file.

    A case of an unknown suite or without the fields that its suite needs counts as failed and says so.

    Raises:
        MargrpoError: the file is missing or is no case file.
    """
    by_suite: dict[str, list[Mapping[str, Any]]] = {}
    for case in _read(path):
        by_suite.setdefault(str(case["suite"]), []).append(case)
    suites = []
    for name, cases in by_suite.items():
        failures = [failure for case in cases if (failure := _replay(case)) is not None]
        suites.append(Suite(name, len(cases) - len(failures), tuple(failures)))
    return Report(tuple(suites))


def _read(path: Path) -> list[Mapping[str, Any]]:
    needed = {"id", "suite", "input", "expected"}
    allowed = 'allowed: {"cases": [{"id", "suite", "input", "expected", "tol"}]}'
    try:
        cases = json.loads(path.read_text(encoding="utf-8"))["cases"]
    except OSError as error:
        raise MargrpoError(f"{path}: not readable ({error.strerror}); allowed: a JSON case file") from None
    except (ValueError, KeyError, TypeError) as error:
        raise MargrpoError(f"{path}: no case file ({error!r}); {allowed}") from None
    if not isinstance(cases, list) or not cases:
        raise MargrpoError(f"{path}: no cases; {allowed}")
    for number, case in enumerate(cases):
        if not isinstance(case, dict) or not needed <= set(case):
            raise MargrpoError(f"{path}: case {number} lacks a field; {allowed}")
    return cases


def _replay(case: Mapping[str, Any]) -> Failure | None:
    expected = case["expected"]
    suite = _SUITES.get(case["suite"])
    if suite is None:
        return Failure(case["id"], expected, f"unknown suite {case['suite']}; known: {', '.join(_SUITES)}")
    try:
        got = suite(case["input"])
    except MargrpoError as error:
        return None if "error" in expected else Failure(case["id"], expected, f"refused: {error}")
    except (KeyError, TypeError, ValueError, IndexError) as error:
        return Failure(case["id"], expected, f"unusable input: {error!r}")
    if "error" in expected:
        return None if not any(got.values()) else Failure(case["id"], expected, got)
    same = all(
        key in got and _equal(value, got[key], case.get("tol", 1e-6)) for key, value in expected.items()
    )
    return None if same else Failure(case["id"], expected, got)


def _equal(expected: Any, got: Any, tolerance: float) -> bool:
    """Compare numbers within the tolerance, sequences item by item, and everything else exactly."""
    if isinstance(expected, bool) or expected is None:
        return expected is got
    if isinstance(expected, (int, float)):
        if isinstance(got, bool) or not isinstance(got, (int, float)):
            return False
        return math.isclose(expected, got, rel_tol=0, abs_tol=tolerance)
    if isinstance(expected, list):
        return len(expected) == len(got) and all(
            _equal(a, b, tolerance) for a, b in zip(expected, got, strict=True)
        )
    return expected == got


def _detections(records: list[Mapping[str, Any]]) -> list[geneval.Detection]:
    return [geneval.Detection(r["label"], tuple(r["box"]), r["score"], r.get("color")) for r in records]


def _depth(record: Mapping[str, Any]) -> NDArray[np.float64]:
    """Paint a depth map [H, W] from its description: later rectangles over earlier ones."""
    depth = np.full((record["height"], record["width"]), float(record["background"]))
    for rect in record["rects"]:
        depth[rect["y0"] : rect["y1"], rect["x0"] : rect["x1"]] = rect["value"]
    return depth


def _relation_2d(data: Mapping[str, Any]) -> Outcome:
    return {"relation": t2i_spatial.relation_2d(data["locality"], data["box1"], data["box2"])}


def _relation_3d(data: Mapping[str, Any]) -> Outcome:
    depth = _depth(data["depth"])
    return {"relation": t2i_spatial.relation_3d(data["locality"], data["box1"], data["box2"], depth)}


def _spatial_2d(data: Mapping[str, Any]) -> Outcome:
    objects = data["obj1"], data["obj2"], data["locality"]
    return {"score": t2i_spatial.spatial_2d_released(*objects, _detections(data["detections"])).score}


def _spatial_3d(data: Mapping[str, Any]) -> Outcome:
    objects = data["obj1"], data["obj2"], data["locality"]
    detections = _detections(data["detections"])
    result = t2i_spatial.spatial_3d_released(*objects, detections, _depth(data["depth"]))
    return {"score": result.score, "obj1_index": result.index_a, "obj2_index": result.index_b}


def _numeracy(data: Mapping[str, Any]) -> Outcome:
    pairs = zip(data["objects"], data["counts"], strict=True)
    wanted = [t2i_numeracy.Counted(name, count) for name, count in pairs]
    return {"score": t2i_numeracy.numeracy_released(wanted, _detections(data["detections"]))}


def _attribute(data: Mapping[str, Any]) -> Outcome:
    return {"score": t2i_attribute.attribute_released(data["p_yes"])}


def _three_in_one(data: Mapping[str, Any]) -> Outcome:
    scores = [
        t2i_attribute.three_in_one(prompt["kind"], *parts)
        for prompt in data["prompts"]
        for parts in zip(prompt["attribute"], prompt["spatial"], prompt["action"], strict=True)
    ]
    return {"scores": scores, "mean": sum(scores) / len(scores)}


def _geneval_position(data: Mapping[str, Any]) -> Outcome:
    return {"relations": sorted(geneval.relations(data["box_a"], data["box_b"]))}


def _geneval(data: Mapping[str, Any]) -> Outcome:
    verdict = geneval.evaluate(data["metadata"], _detections(data["detections"]))
    return {
        "kept": verdict.kept,
        "official_correct": verdict.official,
        "partial_score": verdict.partial_released,
        "strict_correct": verdict.strict,
    }


def _ocr(data: Mapping[str, Any]) -> Outcome:
    lines = [ocr.Line(line["text"], line["confidence"]) for line in data["lines"]]
    return {"reward": ocr.ocr_released(data["prompt"], lines)}


def _gdino(data: Mapping[str, Any]) -> Outcome:
    found = [gdino.Phrase(d["label"], tuple(d["box"]), d["score"]) for d in data["detections_cxcywh"]]
    return {"score": gdino.gdino_released(data, found)}


_SUITES: dict[str, Callable[[Mapping[str, Any]], Outcome]] = {
    "t2i_rel2d": _relation_2d,
    "t2i_rel3d": _relation_3d,
    "t2i_spatial2d": _spatial_2d,
    "t2i_spatial3d": _spatial_3d,
    "t2i_numeracy": _numeracy,
    "t2i_blip_vqa": _attribute,
    "t2i_3in1": _three_in_one,
    "geneval_position": _geneval_position,
    "geneval": _geneval,
    "ocr": _ocr,
    "t2ir1_gdino": _gdino,
}
