from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from margrpo import rewards
from margrpo.benchmarks.rules.ocr import Line, ocr_clean, ocr_released
from margrpo.config import RewardOptions
from margrpo.errors import ConfigError
from margrpo.rewards import base
from margrpo.rewards.ocr import OcrReward


def written(text: str) -> Tensor:
    image = Image.new("RGB", (320, 160), "white")
    font = ImageFont.load_default(size=48)
    ImageDraw.Draw(image).text((160, 80), text, fill=(200, 30, 30), font=font, anchor="mm")
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


def test_the_rule_sees_the_lines_and_the_reader_sees_rgb():
    seen = []

    def read(picture: np.ndarray) -> list[Line]:
        seen.append(picture)
        return [Line("stop", 0.9), Line("now", 0.9)]

    image = torch.zeros(3, 4, 6)
    image[0] = 1.0  # red
    prompts = ['a "STOP" sign', 'a "SHOP" sign']
    batch = image.repeat(2, 1, 1, 1)
    assert OcrReward(read, ocr_released)(batch, prompts, [{}, {}]).tolist() == [1.0, 0.0]
    # "stopnow" against 4 letters: 3 too many, and one wrong
    assert OcrReward(read, ocr_clean)(batch, prompts, [{}, {}]).tolist() == pytest.approx([4 / 7, 3 / 7])
    assert seen[0].shape == (4, 6, 3)
    assert seen[0][0, 0].tolist() == [255, 0, 0]


def test_a_prompt_without_quotes_is_skipped_and_said(caplog):
    def read(picture: np.ndarray) -> list[Line]:
        return [Line("cat", 0.9)]

    scores = OcrReward(read, ocr_released)(torch.zeros(2, 3, 8, 8), ["a cat", 'the word "cat"'], [{}, {}])
    assert scores.isnan().tolist() == [True, False]
    assert scores[1] == 1.0
    assert "skipped a prompt without quoted text: 'a cat'" in caplog.text


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"package rapidocr is missing; pip install 'margrpo\[ocr\]'"):
        rewards.check({"ocr": 1.0})


def test_real_text_is_read():
    pytest.importorskip("rapidocr")
    reward = base.entry("ocr").build(RewardOptions())
    images = torch.stack([written("HELLO"), written("HELLO"), torch.ones(3, 160, 320), written("YELLOW")])
    prompts = ['a sign "hello"', 'a sign "help"', 'a sign "hello"', 'a sign "HELLO"']
    scores = reward(images, prompts, [{}] * 4)
    # hello -> help: one letter off, one too many; yellow -> hello: two edits of five letters
    assert scores.tolist() == pytest.approx([1.0, 1 - 2 / 4, 0.0, 1 - 2 / 5])
