"""A benchmark from params to a table: which prompts, which scores, means by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from PIL import Image
from torch import Tensor

from margrpo.benchmarks import prompt_sets, suite
from margrpo.errors import ConfigError, MargrpoError, TrainingError
from margrpo.rewards import base
from margrpo.sources import Benchmark
from tests.hub_server import serve
from tests.support import make_config

ROOT = Path(__file__).parents[2]
LINES = [
    {"text": "dark", "category": "night"},
    {"text": "darker", "category": "night", "seen": True},
    {"text": "bright", "category": "day", "spec": {"level": 9}},
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


@pytest.fixture
def level(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the reward `level`: the image's mean, not a number where it is above .9."""

    def reward(images: Tensor, prompts: Sequence[str], specs: base.Specs) -> Tensor:
        scores = images.mean((1, 2, 3))
        return torch.where(scores > 0.9, torch.nan, scores)

    entry = base.Entry(base.Info("level", "test", "none"), lambda options: reward)
    monkeypatch.setitem(base._REGISTRY, "level", entry)


def section(**given: Any) -> Benchmark:
    return Benchmark.model_validate({"prompts": "file", "scores": ["level"], **given})


def paint(folder: Path, levels: dict[str, int]) -> None:
    for name, value in levels.items():
        Image.new("RGB", (4, 4), (value, value, value)).save(folder / f"{name}.png")


def test_prompts_of_an_own_file(file, tmp_path):
    found = suite.prepare("mine", section(path=str(file), images_per_prompt=3))
    assert [p.category for p in found.prompts] == ["night", "night", "day"]
    assert [p.seen for p in found.prompts] == [False, True, False]
    assert found.prompts[2].spec == {"level": 9}
    assert (found.chosen, found.each) == ((0, 1, 2), 3)
    (tmp_path / "own.txt").write_text("a red circle\n\n two blue squares \n")
    plain = suite.prepare("mine", section(path=str(tmp_path / "own.txt")))
    assert [(p.text, p.category, p.spec) for p in plain.prompts] == [
        ("a red circle", "prompts", {}),
        ("two blue squares", "prompts", {}),
    ]


def test_limit_and_categories_choose_and_keep_places(file):
    assert suite.prepare("mine", section(path=str(file), limit=1)).chosen == (0, 2)
    assert suite.prepare("mine", section(path=str(file), categories=["day"])).chosen == (2,)
    with pytest.raises(ConfigError, match=r"benchmarks.mine.categories: dusk; allowed: night, day"):
        suite.prepare("mine", section(path=str(file), categories=["dusk"]))


def test_other_prompts_than_expected_are_refused(file):
    digest = prompt_sets.digest(suite.prepare("mine", section(path=str(file))).prompts)
    suite.prepare("mine", section(path=str(file), sha256=digest))
    file.write_text(file.read_text().replace("darker", "darkest"))
    with pytest.raises(
        ConfigError, match=rf"benchmarks.mine.sha256: {digest}; allowed: the hash of the prompts"
    ):
        suite.prepare("mine", section(path=str(file), sha256=digest))


FETCH = """
import sys
from margrpo.benchmarks.suite import prepare
from margrpo.sources import Benchmark
given = {"prompts": "hpsv2", "id": "own/HPDv2", "revision": "main", "scores": ["hpsv2.1"], "limit": 2}
found = prepare("hps", Benchmark.model_validate(given))
print(*(found.prompts[index].text for index in found.chosen), sep="|")
"""


def test_prompts_from_the_hub(tmp_path):
    folder = tmp_path / "repository"
    (folder / "benchmark").mkdir(parents=True)
    (folder / "large.zip").write_text("not wanted")
    for style in prompt_sets.HPS_STYLES:
        (folder / f"benchmark/{style}.json").write_text(json.dumps([f"{style} {i}" for i in range(800)]))
    with serve(folder, "own/HPDv2") as hub:
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "cache")}
        done = subprocess.run(
            [sys.executable, "-c", FETCH], env=environment, capture_output=True, text=True, cwd=ROOT
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().split("|")[:3] == ["anime 0", "anime 1", "concept-art 0"]
    assert sorted(hub.served) == [f"benchmark/{style}.json" for style in sorted(prompt_sets.HPS_STYLES)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "path\0None\0a folder or file, or else id with revision"),
        ({"path": "x", "id": "a/b", "revision": "main"}, "path\0x"),
        ({"id": "a/b"}, "revision\0None\0a commit, tag or branch with id"),
        ({"id": "a/b", "revision": "main"}, "null with prompts file"),
        ({"path": "x", "scores": ["level", "level"]}, "each once"),
        ({"path": "x", "scores": []}, "none only with keep_images"),
    ],
)
def test_sections_that_cannot_run(given, message):
    with pytest.raises(ValueError, match="Benchmark") as error:
        section(**given)
    assert message in str(error.value)


def test_means_failures_and_categories_by_hand(file, level, tmp_path):
    found = suite.prepare("mine", section(path=str(file), images_per_prompt=2))
    # night: 51 and 102 of 255, then 51 and a failure; day: both fail
    paint(tmp_path, {"00000_00000": 51, "00000_00001": 102, "00001_00000": 51, "00001_00001": 255})
    paint(tmp_path, {"00002_00000": 255, "00002_00001": 255})
    for batch in (4, 100):
        config = make_config(evaluation={"batch_size": batch})
        table = suite.score_images(found, config, tmp_path)
        assert list(table.columns) == list(suite.COLUMNS)
        assert table["mean"].tolist()[:2] == pytest.approx([0.3, 0.2])
        assert table["mean"].isna().tolist() == [False, False, True]
        assert table[["images", "failed"]].to_numpy().tolist() == [[2, 0], [1, 1], [0, 2]]
        assert suite.summarize(table) == {
            "mine": {
                "level": {
                    "all": pytest.approx(0.25),
                    "night": pytest.approx(0.25),
                    "n_images": 3.0,
                    "failed": 3.0,
                }
            }
        }
    config = make_config(
        evaluation={
            "benchmarks": {"mine": found.section.model_dump()},
            "options": {"level": {"on_failure": "fail"}},
        }
    )
    with pytest.raises(TrainingError, match="no score for 3 of 6 images"):
        suite.score_images(found, config, tmp_path)


def test_a_missing_or_broken_image_is_named(file, level, tmp_path):
    found = suite.prepare("mine", section(path=str(file)))
    paint(tmp_path, {"00000_00000": 51, "00001_00000": 51})
    with pytest.raises(MargrpoError, match=r"00002_00000.png: is missing"):
        suite.score_images(found, make_config(), tmp_path)
    (tmp_path / "00002_00000.png").write_bytes(b"\x89PNG")
    with pytest.raises(MargrpoError, match=r"00002_00000.png: is not a readable picture"):
        suite.score_images(found, make_config(), tmp_path)


def test_geneval_total_is_the_mean_of_its_tasks(level, tmp_path):
    counts = prompt_sets._GENEVAL_COUNTS
    tags = [tag for tag, n in counts.items() for _ in range(n)]
    lines = [json.dumps({"tag": tag, "prompt": f"{tag} {i}"}) for i, tag in enumerate(tags)]
    (tmp_path / "evaluation_metadata.jsonl").write_text("\n".join(lines))
    given = {"prompts": "geneval", "path": str(tmp_path), "images_per_prompt": 1}
    found = suite.prepare("g", section(**given, categories=["single_object", "counting"]))
    kept = [*range(3), *range(80 + 99, 80 + 99 + 1)]  # three of the first task, one of the second
    found = suite.Suite("g", found.section, found.prompts, tuple(kept), 1)
    for index, value in zip(kept, (51, 51, 51, 153), strict=True):
        path = found.paths(tmp_path)[kept.index(index)][1]
        path.parent.mkdir(parents=True)
        Image.new("RGB", (4, 4), (value,) * 3).save(path)
    numbers = suite.summarize(suite.score_images(found, make_config(), tmp_path))["g"]["level"]
    assert numbers["single_object"] == pytest.approx(0.2)
    assert numbers["counting"] == pytest.approx(0.6)
    assert numbers["all"] == pytest.approx(0.4)  # not .3, the mean over the prompts


def test_rules_are_asked_about_their_own_categories_alone():
    t2i = prompt_sets.SETS["t2i_compbench"]
    asked = {
        score: [category for category in prompt_sets.T2I_CATEGORIES if t2i.has(score, category)]
        for score in ("t2i_attribute.blip", "t2i_numeracy.owlv2", "hpsv2.1")
    }
    assert asked["t2i_attribute.blip"] == ["color", "shape", "texture"]
    assert asked["t2i_numeracy.owlv2"] == ["numeracy"]
    assert asked["hpsv2.1"] == list(prompt_sets.T2I_CATEGORIES)


def test_a_table_survives_its_file(file, level, tmp_path):
    found = suite.prepare("mine", section(path=str(file)))
    paint(tmp_path, {"00000_00000": 51, "00001_00000": 255, "00002_00000": 102})
    table = suite.score_images(found, make_config(), tmp_path)
    table.to_csv(tmp_path / "t.csv", index=False)
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "t.csv"), table, check_dtype=False)
