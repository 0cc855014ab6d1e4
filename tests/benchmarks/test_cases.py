from __future__ import annotations

import json
from pathlib import Path

import pytest

from margrpo.benchmarks.cases import verify
from margrpo.errors import MargrpoError

GOLDEN = Path(__file__).parents[1] / "golden" / "evaluation" / "cases.json"


def write(path: Path, cases: list[dict]) -> Path:
    path.write_text(json.dumps({"cases": cases}))
    return path


def test_every_recorded_case_of_the_released_rules_agrees():
    report = verify(GOLDEN)
    assert (report.passed, report.failed) == (207, 0)
    assert {suite.name: suite.passed for suite in report.suites} == {
        "t2i_rel2d": 38,
        "t2i_spatial2d": 16,
        "t2i_rel3d": 27,
        "t2i_spatial3d": 10,
        "t2i_numeracy": 20,
        "t2i_blip_vqa": 6,
        "t2i_3in1": 2,
        "geneval_position": 20,
        "geneval": 34,
        "ocr": 11,
        "t2ir1_gdino": 23,
    }
    assert report.to_text().endswith("207 passed, 0 failed")


def test_a_wrong_expectation_is_reported_with_both_values(tmp_path):
    case = {
        "id": "x",
        "suite": "ocr",
        "input": {"prompt": 'a "cat"', "lines": [{"text": "cat", "confidence": 0.9}]},
        "expected": {"reward": 0.25},
        "tol": 1e-6,
    }
    report = verify(write(tmp_path / "cases.json", [case]))
    assert (report.passed, report.failed) == (0, 1)
    assert json.loads(report.to_json())["suites"][0]["failures"][0] == {
        "id": "x",
        "expected": {"reward": 0.25},
        "got": {"reward": 1.0},
    }


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({"id": "a", "suite": "t2i_psychic", "input": {}, "expected": {}}, "unknown suite t2i_psychic"),
        (
            {"id": "b", "suite": "t2i_rel2d", "input": {"locality": "near"}, "expected": {"relation": 1}},
            "box1",
        ),
        (
            {
                "id": "c",
                "suite": "ocr",
                "input": {"prompt": "no quotes", "lines": []},
                "expected": {"reward": 0},
            },
            "refused",
        ),
    ],
)
def test_unknown_suites_and_unusable_inputs_fail_and_do_not_crash(tmp_path, case, message):
    report = verify(write(tmp_path / "cases.json", [case]))
    assert report.failed == 1
    assert message in report.to_text()


def test_a_missing_or_foreign_file_is_one_line(tmp_path):
    with pytest.raises(MargrpoError, match="not readable"):
        verify(tmp_path / "none.json")
    (tmp_path / "foreign.json").write_text('{"rows": []}')
    with pytest.raises(MargrpoError, match="no case file"):
        verify(tmp_path / "foreign.json")
