from __future__ import annotations

import json
from pathlib import Path

import pytest

from margrpo.benchmarks import prompt_sets
from margrpo.errors import ConfigError


def geneval_lines(count: int) -> str:
    tags = [tag for tag, n in prompt_sets._GENEVAL_COUNTS.items() for _ in range(n)][:count]
    lines = [
        {"tag": tag, "include": [{"class": "dog", "count": 1}], "prompt": f"{tag} {i}"}
        for i, tag in enumerate(tags)
    ]
    return "\n".join(json.dumps(line) for line in lines)


def test_geneval_keeps_order_tags_and_metadata(tmp_path):
    (tmp_path / "evaluation_metadata.jsonl").write_text(geneval_lines(553))
    prompts = prompt_sets.load("geneval", tmp_path)
    assert len(prompts) == 553
    assert (prompts[80].category, prompts[80].text) == ("two_object", "two_object 80")
    assert prompts[0].spec["include"] == [{"class": "dog", "count": 1}]
    assert prompt_sets.SETS["geneval"].images_per_prompt == 4


def test_a_partial_copy_is_refused(tmp_path):
    (tmp_path / "evaluation_metadata.jsonl").write_text(geneval_lines(552))
    with pytest.raises(ConfigError, match=r"'color_attr': 99.*allowed: .*'color_attr': 100"):
        prompt_sets.load("geneval", tmp_path)


def test_hpsv2_has_four_styles_of_800(tmp_path):
    folder = tmp_path / "benchmark"
    folder.mkdir()
    for style in prompt_sets.HPS_STYLES:
        (folder / f"{style}.json").write_text(json.dumps([f"{style} {i}" for i in range(800)]))
    prompts = prompt_sets.load("hpsv2", tmp_path)
    assert len(prompts) == 3200
    assert (prompts[800].category, prompts[800].text) == ("concept-art", "concept-art 0")
    (folder / "photo.json").unlink()
    with pytest.raises(
        ConfigError, match=r"has no photo.json; allowed: a folder with it \(from zhwang/HPDv2\)"
    ):
        prompt_sets.load("hpsv2", tmp_path)


def test_t2i_compbench_strips_lines_and_reads_specs(tmp_path, caplog):
    for category in prompt_sets.T2I_CATEGORIES:
        lines = "\n".join(f"{category} prompt {i}" for i in range(300))
        (tmp_path / f"{category}_val.txt").write_text(f"\n{lines}  \n\n" if category == "color" else lines)
    (tmp_path / "color_val_seen.txt").write_text("color prompt 0\ncolor prompt 7\n")
    parsed = {"color": [{"prompt": "color prompt 7", "noun_phrases": ["a red car"]}]}
    (tmp_path / "prompt_parse_val.json").write_text(json.dumps(parsed))
    prompts = prompt_sets.load("t2i_compbench", tmp_path)
    assert len(prompts) == 2400
    assert prompts[7].spec["noun_phrases"] == ["a red car"]
    assert [p.seen for p in prompts[:9]] == [True, *[False] * 6, True, False]
    assert prompts[299].text == "color prompt 299"
    assert "color_val.txt differs from the official file" in caplog.text


def test_parti_prompts_keep_their_quotes(tmp_path):
    rows = [
        "Prompt\tCategory\tChallenge\tNote",
        'a sign that says "Hi"\tArts\tWriting\t-',
        '"half a quote\tArts\tBasic\t-',
    ]
    rows += [f"prompt {i}\tWorld\tBasic\t-" for i in range(1630)]
    (tmp_path / "PartiPrompts.tsv").write_text("\n".join(rows) + "\n")
    prompts = prompt_sets.load("partiprompts", tmp_path)
    assert len(prompts) == 1632
    assert [p.text for p in prompts[:2]] == ['a sign that says "Hi"', '"half a quote']
    assert prompts[0].spec == {"challenge": "Writing"}


def test_drawbench_reads_quoted_commas(tmp_path):
    rows = ["Prompts,Category", '"A red, shiny car",Colors', *(f"prompt {i},Counting" for i in range(199))]
    (tmp_path / "DrawBench.csv").write_text("\n".join(rows))
    prompts = prompt_sets.load("drawbench", tmp_path)
    assert (prompts[0].text, prompts[0].category, len(prompts)) == ("A red, shiny car", "Colors", 200)
    (tmp_path / "DrawBench.csv").write_text("text\nx")
    with pytest.raises(ConfigError, match="a table with the columns Prompts, Category"):
        prompt_sets.load("drawbench", tmp_path)


@pytest.mark.parametrize(
    ("name", "file", "content", "count"),
    [
        ("ocr", "test.txt", "\n".join(f'a sign "{i}"' for i in range(1018)), 1018),
        (
            "image_reward",
            "benchmark-prompts.json",
            json.dumps([{"id": str(i), "prompt": f"prompt {i}"} for i in range(100)]),
            100,
        ),
    ],
)
def test_plain_lists(name: str, file: str, content: str, count: int, tmp_path: Path):
    (tmp_path / file).write_text(content)
    assert len(prompt_sets.load(name, tmp_path)) == count
    (tmp_path / file).write_text(content[:-1] + "\n[")
    with pytest.raises(ConfigError):
        prompt_sets.load(name, tmp_path)


def test_an_unknown_benchmark_is_one_line():
    with pytest.raises(ConfigError, match="benchmark: 'coco'; allowed: hpsv2, drawbench"):
        prompt_sets.load("coco", Path())
