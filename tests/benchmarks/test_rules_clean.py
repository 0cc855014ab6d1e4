"""The clean variants: what differs from the released rules, by values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from margrpo.benchmarks.rules import boxes, gdino, ocr, t2i_attribute, t2i_numeracy, t2i_spatial
from margrpo.benchmarks.rules.geneval import Detection
from margrpo.errors import MargrpoError


def found(label: str, x: float, y: float, size: float = 20, score: float = 1.0) -> Detection:
    return Detection(label, (x, y, x + size, y + size), score)


def test_iou_of_half_shifted_squares_is_a_third():
    assert boxes.iou((0, 0, 2, 2), (1, 0, 3, 2)) == pytest.approx(1 / 3)
    # inclusive: both 3 x 3, shared 2 x 3
    assert boxes.iou((0, 0, 2, 2), (1, 0, 3, 2), inclusive=True) == pytest.approx(6 / 12)


def test_suppression_keeps_the_best_of_overlapping_boxes():
    kept = boxes.suppress([(0, 0, 10, 10), (1, 0, 11, 10), (50, 0, 60, 10)], [0.5, 0.9, 0.1], 0.5)
    assert kept == [1, 2]


def test_spatial_2d_clean_takes_the_best_pair_and_knows_above():
    dogs = [found("dog", 400, 100), found("dog", 0, 100), found("chair", 200, 100)]
    released = t2i_spatial.spatial_2d_released("dog", "chair", "on the left of", dogs)
    clean = t2i_spatial.spatial_2d_clean("dog", "chair", "on the left of", dogs)
    assert (released.score, released.index_a) == (0.5, 0)
    assert (clean.score, clean.index_a) == (1.0, 1)

    tower = [found("dog", 0, 0), found("chair", 10, 300)]
    for name in ("above", "on top of"):
        assert t2i_spatial.spatial_2d_released("dog", "chair", name, tower).score == 0.5
        assert t2i_spatial.spatial_2d_clean("dog", "chair", name, tower).score == 1.0


def test_spatial_2d_clean_keeps_the_credit_of_one_object_and_needs_two_for_a_pair():
    alone = [found("dog", 0, 0, score=0.8)]
    assert t2i_spatial.spatial_2d_released("dog", "chair", "near", alone).score == 0.0
    assert t2i_spatial.spatial_2d_clean("dog", "chair", "near", alone).score == pytest.approx(0.2)
    person = [found("person", 0, 0)]
    assert t2i_spatial.spatial_2d_released("man", "woman", "near", person).score == 1.0
    assert t2i_spatial.spatial_2d_clean("man", "woman", "near", person).score == 0.25


def test_depth_is_cut_out_with_exchanged_axes_only_as_released():
    depth = np.zeros((40, 40))
    depth[20:30, 0:10] = 1.0  # nearer where y is 20..30 and x is 0..10
    near, far = (0, 20, 10, 30), (2, 22, 12, 32)
    assert t2i_spatial.relation_3d("in front of", near, far, depth, "fixed") == pytest.approx(64 / 136 / 0.5)
    assert t2i_spatial.relation_3d("in front of", near, far, depth, "released") == 0.0


def test_spatial_3d_clean_takes_whole_nouns():
    depth = np.zeros((40, 40))
    depth[0:20, 0:20] = 1.0
    scene = [found("monkey", 0, 0), found("chair", 2, 2)]
    assert t2i_spatial.spatial_3d_released("key", "chair", "in front of", scene, depth).score == 1.0
    assert t2i_spatial.spatial_3d_clean("key", "chair", "in front of", scene, depth).score == 0.25
    phone = [found("mobile phone, cell phone", 0, 0), found("chair", 2, 2)]
    assert t2i_spatial.spatial_3d_clean("cell phone", "chair", "in front of", phone, depth).score == 1.0


def test_boxes_are_scaled_so_that_150_px_stay_a_share_of_the_side():
    scaled = t2i_spatial.scale_boxes([Detection("dog", (0, 32, 64, 64), 1.0)], 64)
    assert scaled[0].box == (0, 239.5, 479, 479)


def test_numeracy_clean_gives_partial_credit_and_refuses_substrings():
    two_of_four = [found("dog", 0, 0), found("dog", 100, 0)]
    wanted = [t2i_numeracy.Counted("dog", 4)]
    assert t2i_numeracy.numeracy_released(wanted, two_of_four) == 0.5
    assert t2i_numeracy.numeracy_clean(wanted, two_of_four) == 0.5
    assert (
        t2i_numeracy.numeracy_clean(
            [t2i_numeracy.Counted("dog", 1)], [found("dog", i * 50, 0) for i in range(5)]
        )
        == 0
    )

    phones = [found("mobile phone, cell phone", 0, 0), found("microphone", 100, 0)]
    assert t2i_numeracy.numeracy_released([t2i_numeracy.Counted("phone", 2)], phones) == 1.0
    assert t2i_numeracy.numeracy_clean([t2i_numeracy.Counted("phone", 2)], phones) == 0.5


def test_numeracy_clean_counts_a_small_object_in_front_of_a_large_one():
    dogs = [found("dog", 0, 0, size=100), found("dog", 10, 10, size=50)]
    assert t2i_numeracy.numeracy_released([t2i_numeracy.Counted("dog", 2)], dogs) == 0.5
    assert t2i_numeracy.numeracy_clean([t2i_numeracy.Counted("dog", 2)], dogs) == 1.0


PLURALS = {"dog": "dogs", "cat": "cats", "fish": "fish", "hot dog": "hot dogs"}


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("three dogs and two cats", [("dog", 3), ("cat", 2)]),
        ("a dog, eight fish and one cat.", [("dog", 1), ("fish", 8), ("cat", 1)]),
        ("two hot dogs and a tree", [("hot dog", 2)]),
    ],
)
def test_counted_objects_are_parsed(prompt, expected):
    assert [(c.name, c.count) for c in t2i_numeracy.parse(prompt, PLURALS)] == expected


@pytest.mark.parametrize("prompt", ["three dog", "a dogs", "two spoons"])
def test_prompts_that_crash_the_released_parser_are_refused(prompt):
    with pytest.raises(MargrpoError):
        t2i_numeracy.parse(prompt, PLURALS)


def test_questions_and_products():
    chunks = ["a red bench", "the left", "top", "the top"]
    assert t2i_attribute.questions(chunks) == ["a red bench?", "the top?"]
    assert len(t2i_attribute.questions([f"a cat {i}" for i in range(12)])) == 8
    assert t2i_attribute.attribute_clean([0.5, 0.12345]) == pytest.approx(0.061725)
    assert t2i_attribute.attribute_released([0.5, 0.12345]) == "0.0617"
    with pytest.raises(MargrpoError, match="allowed: spatial, action"):
        t2i_attribute.three_in_one("shape", 1, 1, 1)  # type: ignore[arg-type]


def test_ocr_clean_pays_for_extra_text_and_reads_typographic_quotes():
    lines = [ocr.Line("STOP", 0.9), ocr.Line("HERE", 0.9)]
    assert ocr.ocr_released('a "STOP" sign', lines) == 1.0
    assert ocr.ocr_clean('a "STOP" sign', lines) == 0.5
    assert ocr.ocr_clean("a “STOP” sign", lines[:1]) == 1.0
    for prompt in ("no quotes", 'an empty "" one'):
        with pytest.raises(MargrpoError):
            ocr.ocr_released(prompt, lines)


def test_edit_distance_of_known_pairs():
    assert [ocr.edit_distance(*p) for p in (("kitten", "sitting"), ("", "abc"), ("flaw", "lawn"))] == [
        3,
        3,
        2,
    ]


def test_gdino_clean_measures_near_and_reaches_one():
    far = [gdino.Phrase("dog", (0.1, 0.1, 0.1, 0.1), 0.9), gdino.Phrase("cat", (0.9, 0.9, 0.1, 0.1), 0.9)]
    info = {"obj1": "dog", "obj2": "cat", "locality": "near"}
    item = {"task_type": "spatial", "nouns": ["dog", "cat"], "spatial_info": info}
    assert gdino.gdino_released(item, far) == pytest.approx(0.9)
    assert gdino.gdino_clean(item, far) == pytest.approx(0.5 + 0.5 * 150 / (0.8 * 479))
    above = {**item, "spatial_info": {**info, "locality": "above"}}
    tower = [gdino.Phrase("dog", (0.5, 0.2, 0.2, 0.2), 0.5), gdino.Phrase("cat", (0.5, 0.8, 0.2, 0.2), 0.5)]
    assert gdino.gdino_released(above, tower) == pytest.approx(0.4)
    assert gdino.gdino_clean(above, tower) == 1.0


def test_gdino_clean_suppresses_true_duplicates():
    twice = [gdino.Phrase("dog", (0.5, 0.5, 0.2, 0.2), 0.6), gdino.Phrase("dog", (0.51, 0.5, 0.2, 0.2), 0.5)]
    item = {"task_type": "numeracy", "nouns": ["dog"], "numeracy_info": [{"obj_name": "dog", "num": 1}]}
    assert gdino.gdino_released(item, twice) == pytest.approx(0.2)
    assert gdino.gdino_clean(item, twice) == 1.0


def test_gdino_without_nouns_is_satisfied():
    assert gdino.gdino_released({"task_type": "object", "nouns": []}, []) == 1.0
