"""Our scorers against values that the original packages gave for the same files (tests/oracles/record.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from margrpo.config import RewardOptions
from margrpo.rewards import base
from margrpo.rewards.images import MEAN, STD, crop_center, pad_longest
from tests.oracles import compare, tiny
from tests.oracles.compare import images


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return compare.folders(tmp_path_factory.mktemp("weights"))


@pytest.mark.parametrize("name", list(compare.LIMITS))
def test_scores_equal_those_of_the_original(folders, name):
    expected = compare.recorded(name)
    assert expected.std() > 0.02  # the tiny model tells its inputs apart
    assert (compare.ours(name, folders[name]) - expected).abs().max() < compare.LIMITS[name]


def test_batches_of_mixed_prompts_give_what_single_images_give(folders):
    for name, folder in folders.items():
        reward = base.entry(name).build(RewardOptions(path=str(folder)))
        pictures = torch.cat([images()[0], images()[0].flip(3), images()[0] * 0.5])
        prompts = [tiny.PROMPTS[1], tiny.PROMPTS[0], tiny.PROMPTS[1]]
        together = reward(pictures, prompts, [{}] * 3)
        alone = torch.cat([reward(pictures[i : i + 1], prompts[i : i + 1], [{}]) for i in range(3)])
        assert together.shape == (3,)
        assert torch.allclose(together, alone, atol=1e-5)


@pytest.mark.parametrize("antialias", [True, False])
def test_antialiasing_changes_hps_preprocessing(antialias):
    noise = torch.rand(1, 3, 384, 384, generator=torch.Generator().manual_seed(0))
    spread = float(pad_longest(noise, 224, antialias)[0, 0].std()) * STD[0]
    # standard deviation of white noise after 384 -> 224, measured on the original's transform
    assert spread == pytest.approx(0.137 if antialias else 0.247, abs=0.003)


def test_hps_pads_with_black_before_normalising():
    wide = torch.ones(1, 3, 20, 40)
    pixels = pad_longest(wide, 32)  # 16 x 32, then 8 black rows above and below
    assert pixels.shape == (1, 3, 32, 32)
    black, white = (-MEAN[0] / STD[0], (1 - MEAN[0]) / STD[0])
    assert torch.allclose(pixels[0, 0, :8], torch.tensor(black))
    assert torch.allclose(pixels[0, 0, 8:24], torch.tensor(white))
    assert torch.allclose(pixels[0, 0, 24:], torch.tensor(black))


def test_an_image_that_fits_already_is_not_padded():
    assert pad_longest(torch.zeros(1, 3, 16, 32), 32).shape == (1, 3, 16, 32)


@pytest.mark.parametrize(("round_up", "left"), [(True, 10), (False, 9)])
def test_an_odd_margin_is_split_as_the_original_does(round_up, left):
    picture = torch.zeros(1, 3, 32, 51)  # margin 19
    picture[..., left] = 1.0
    pixels = crop_center(picture, 32, round_up)
    assert torch.allclose(pixels[0, 0, :, 0], torch.tensor((1 - MEAN[0]) / STD[0]))
    assert torch.allclose(pixels[0, 0, :, 1], torch.tensor(-MEAN[0] / STD[0]))


def test_crops_equal_those_of_transformers_own_processor():
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    processor = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    for picture, image in zip(tiny.images(), images(), strict=True):
        theirs = processor(images=picture, return_tensors="pt")["pixel_values"]
        assert torch.allclose(crop_center(image, 32, round_up=False), theirs, atol=1e-6)


def test_float16_scores_are_close_to_float32(folders):
    for name, folder in folders.items():
        rewards = [
            base.entry(name).build(RewardOptions(path=str(folder), precision=precision))
            for precision in ("float32", "float16")
        ]
        full, half = (reward(images()[1], [tiny.PROMPTS[0]], [{}]) for reward in rewards)
        assert half.isfinite().all()
        assert 0 < (full - half).abs().max() < 0.01 * max(1.0, float(full.abs().max()))
