from __future__ import annotations

from collections import Counter

import pytest

from margrpo.errors import ConfigError
from margrpo.scenes.grammar import (
    CATEGORIES,
    MAX_WORDS,
    VOCABULARY,
    all_prompts,
    composition_split,
    parse,
    tokenize,
)


def test_the_grammar_has_the_counted_prompts() -> None:
    # 12 objects; 12 * 8 ordered pairs of different shape; 4 relations of them; 2 counts of 12 objects.
    counts = Counter(prompt.category for prompt in all_prompts())
    assert counts == {"single": 12, "color": 96, "spatial": 384, "numeracy": 24}
    assert tuple(counts) == CATEGORIES
    texts = [prompt.text for prompt in all_prompts()]
    assert len(set(texts)) == len(texts)


def test_every_prompt_tokenizes_within_the_longest_length_and_uses_every_word() -> None:
    ids = [tokenize(prompt.text) for prompt in all_prompts()]
    assert max(map(len, ids)) == MAX_WORDS == 8
    assert {token for row in ids for token in row} == set(range(1, len(VOCABULARY)))
    assert VOCABULARY[0] == "<pad>"


def test_tokenize_ignores_case_and_white_space() -> None:
    assert tokenize("  A red\tCIRCLE ") == [VOCABULARY.index(word) for word in ("a", "red", "circle")]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("a purple circle", "'purple'"),
        ("a <pad> circle", "'<pad>'"),
        ("", "empty"),
        ("a red circle and a red circle and a", "9 words"),
    ],
)
def test_tokenize_names_what_is_wrong(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        tokenize(text)


def test_unknown_word_error_says_where_the_vocabulary_is() -> None:
    with pytest.raises(ConfigError, match=r"margrpo\.scenes\.grammar\.VOCABULARY"):
        tokenize("a red hexagon")


def test_parse_gives_geneval_metadata_with_the_reference_first() -> None:
    prompt = parse("A red circle  left of a blue square")
    assert prompt.text == "a red circle left of a blue square"
    assert prompt.category == "spatial"
    assert prompt.key == "pair:blue square+red circle"
    assert prompt.spec == {
        "tag": "position",
        "include": [
            {"class": "square", "count": 1, "color": "blue"},
            {"class": "circle", "count": 1, "color": "red", "position": ["left of", 0]},
        ],
    }


def test_parse_counts() -> None:
    assert parse("three blue squares").spec == {
        "tag": "counting",
        "include": [{"class": "square", "count": 3, "color": "blue"}],
        "exclude": [{"class": "square", "count": 4}],
    }


@pytest.mark.parametrize("text", ["red circle", "two red circle", "a red circle and a blue circle", "a a a"])
def test_parse_rejects_other_sentences(text: str) -> None:
    with pytest.raises(ConfigError, match="not a sentence"):
        parse(text)


def test_a_pair_is_held_out_in_color_and_spatial_together() -> None:
    texts = (
        "a red circle and a blue square",
        "a blue square and a red circle",
        "a blue square above a red circle",
    )
    assert len({parse(text).key for text in texts}) == 1
    assert all(prompt.seen == (composition_split(prompt.key) == "train") for prompt in all_prompts())


def test_held_out_shares() -> None:
    keys = {prompt.key for prompt in all_prompts()}
    pairs = Counter(composition_split(key) for key in keys if key.startswith("pair:"))
    counts = Counter(composition_split(key) for key in keys if key.startswith("count:"))
    assert pairs == {"train": 35, "test": 8, "validation": 5}
    assert counts == {"train": 18, "test": 4, "validation": 2}
    assert all(composition_split(key) == "train" for key in keys if key.startswith("single:"))
