from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from margrpo.benchmarks import images
from margrpo.errors import MargrpoError
from margrpo.prompts import Prompt

PROMPTS = [
    Prompt("a red car.", "color", {"tag": "colors"}, False),
    Prompt("a blue car.", "color", {"tag": "colors"}, False),
    Prompt("two dogs", "numeracy", {"tag": "counting"}, False),
]


def draw(texts: Sequence[str], seeds: Sequence[int]) -> Tensor:
    return torch.stack([torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(s)) for s in seeds])


def files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.suffix in (".png", ".jpg"))


@pytest.mark.parametrize(
    ("benchmark", "each", "expected"),
    [
        ("hpsv2", 1, ["color/00000.jpg", "color/00001.jpg", "numeracy/00000.jpg"]),
        (
            "t2i_compbench",
            2,
            [
                "color/samples/a blue car._000002.png",
                "color/samples/a blue car._000003.png",
                "color/samples/a red car._000000.png",
                "color/samples/a red car._000001.png",
                "numeracy/samples/two dogs_000000.png",
                "numeracy/samples/two dogs_000001.png",
            ],
        ),
        ("geneval", 1, ["00000/samples/00000.png", "00001/samples/00000.png", "00002/samples/00000.png"]),
        ("drawbench", 1, ["00000_00000.png", "00001_00000.png", "00002_00000.png"]),
    ],
)
def test_files_are_named_as_the_original_scripts_read_them(benchmark, each, expected, tmp_path):
    assert images.generate_images(benchmark, PROMPTS, each, draw, tmp_path, {}) == len(expected)
    assert files(tmp_path) == expected
    if benchmark == "geneval":
        assert json.loads((tmp_path / "00002" / "metadata.jsonl").read_text()) == {"tag": "counting"}


def test_an_interrupted_run_goes_on_and_gives_the_same_images(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    images.generate_images("t2i_compbench", PROMPTS, 4, draw, whole, {"steps": 8}, batch_size=16)

    calls = []

    def dies(texts: Sequence[str], seeds: Sequence[int]) -> Tensor:
        calls.append(texts)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return draw(texts, seeds)

    with pytest.raises(KeyboardInterrupt):
        images.generate_images("t2i_compbench", PROMPTS, 4, dies, broken, {"steps": 8}, batch_size=5)
    assert images.generate_images("t2i_compbench", PROMPTS, 4, draw, broken, {"steps": 8}, batch_size=3) == 7
    assert files(broken) == files(whole)
    for name in files(whole):
        assert (broken / name).read_bytes() == (whole / name).read_bytes()


def test_a_folder_of_other_settings_or_prompts_is_refused(tmp_path):
    images.generate_images("drawbench", PROMPTS, 1, draw, tmp_path, {"guidance": 3.0})
    with pytest.raises(MargrpoError, match=r"made with guidance 3.0, now 5.0; allowed: the same settings"):
        images.generate_images("drawbench", PROMPTS, 1, draw, tmp_path, {"guidance": 5.0})
    with pytest.raises(MargrpoError, match="made with prompts_sha256"):
        images.generate_images("drawbench", PROMPTS[:2], 1, draw, tmp_path, {"guidance": 3.0})


def test_png_files_hold_the_image_rounded_to_8_bit(tmp_path):
    images.generate_images("drawbench", PROMPTS[:1], 1, draw, tmp_path, {})
    stored = np.array(Image.open(tmp_path / "00000_00000.png"))
    exact = draw([""], [images.seed("drawbench", 0, 0)])[0].permute(1, 2, 0).numpy() * 255
    assert np.abs(stored - exact).max() <= 0.5 + 1e-4


def test_seeds_differ_by_prompt_image_and_benchmark():
    values = {images.seed(b, p, i) for b in ("geneval", "hpsv2") for p in range(3) for i in range(3)}
    assert len(values) == 18
