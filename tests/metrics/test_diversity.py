"""Diversity and spectral energy against the published check values and pictures drawn by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from margrpo.metrics.diversity import high_frequency_energy, pairwise_distance, vendi_images, vendi_score


def gray(*levels: float) -> Tensor:
    return torch.tensor(levels).view(-1, 1, 1, 1).expand(-1, 3, 4, 4)


def cosine_wave(cycles_per_image: float, size: int = 32) -> Tensor:
    return 0.25 * torch.cos(2 * math.pi * cycles_per_image * torch.arange(size, dtype=torch.float64) / size)


def picture(plane: Tensor) -> Tensor:
    """[H, W] around zero -> [1, 3, H, W] around gray."""
    return (0.5 + plane).expand(1, 3, *plane.shape)


def test_pairwise_distance_by_hand() -> None:
    # Pairs of gray levels 0, .25, 1: .25, 1 and .75.
    assert pairwise_distance(gray(0.0, 0.25, 1.0)) == pytest.approx(2 / 3)
    assert pairwise_distance(gray(0.0, 1.0)) == 1.0
    assert pairwise_distance(gray(0.3, 0.3, 0.3)) == 0.0


def test_pairwise_distance_averages_pixels_and_channels() -> None:
    images = torch.zeros(2, 3, 4, 4)
    images[1, 2, 0, :2] = 1  # 2 of 48 values
    assert pairwise_distance(images) == pytest.approx(2 / 48)


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (torch.ones(5, 5), 1.0),
        (torch.eye(4), 4.0),
        (torch.tensor([[1.0, 0.5], [0.5, 1.0]]), 1.7547654),
        (torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]), 1.8898816),
        (torch.ones(1, 1), 1.0),
    ],
)
def test_vendi_score_check_values(kernel: Tensor, expected: float) -> None:
    assert vendi_score(kernel) == pytest.approx(expected, abs=1e-6)


def test_vendi_score_of_three_identical_pairs() -> None:
    points = torch.tensor([0.0, 0.0, 10.0, 10.0, 20.0, 20.0], dtype=torch.float64)
    kernel = torch.exp(-(points[:, None] - points[None, :]).abs())
    assert vendi_score(kernel) == pytest.approx(2.9999999959, abs=1e-10)
    # The same distances as gray levels 0, .5, 1 with a bandwidth of .05.
    assert vendi_images(gray(0, 0, 0.5, 0.5, 1, 1), bandwidth=0.05) == pytest.approx(2.9999999959, abs=1e-10)


def test_vendi_images_check_values() -> None:
    # Similarity exp(-d / .1): d = .1 ln 2 gives one half, the check value of the kernel above.
    assert vendi_images(gray(0.2, 0.2 + 0.1 * math.log(2))) == pytest.approx(1.7547654, abs=1e-6)
    assert vendi_images(gray(0.2, 0.2, 0.2)) == pytest.approx(1.0)
    assert vendi_images(gray(0.2)) == pytest.approx(1.0)
    # An image and its negative are two images.
    assert vendi_images(gray(0.0, 1.0)) == pytest.approx(2.0, abs=1e-6)


def test_vendi_images_ignores_the_order() -> None:
    images = torch.rand(6, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    shuffled = images[torch.tensor([3, 0, 5, 1, 4, 2])]
    assert vendi_images(images) == pytest.approx(vendi_images(shuffled))
    assert 1 < vendi_images(images) < 6


def test_high_frequency_energy_of_waves() -> None:
    low, high = cosine_wave(4), cosine_wave(12)  # 1/8 and 3/8 cycle per pixel
    rows = torch.zeros(32, 1, dtype=torch.float64)
    images = torch.cat([picture(rows + low), picture(rows + high), picture(rows + low + high)])
    assert high_frequency_energy(images).tolist() == pytest.approx([0.0, 1.0, 0.5], abs=1e-12)
    # Energy goes with the square of the amplitude: 1 to 9.
    assert high_frequency_energy(picture(rows + low + high / 3)).item() == pytest.approx(0.1)


def test_high_frequency_energy_is_radial() -> None:
    # Seven of 32 cycles lie below a quarter, on the diagonal sqrt(2) * 7 / 32 = .309 lies above.
    wave = cosine_wave(7)
    straight = picture(wave[None, :] + torch.zeros(32, 1, dtype=torch.float64))
    product = picture(4 * wave[None, :] * wave[:, None])
    assert high_frequency_energy(straight).item() == pytest.approx(0.0, abs=1e-12)
    assert high_frequency_energy(product).item() == pytest.approx(1.0)


def test_high_frequency_energy_of_a_point() -> None:
    # A point has equal energy at all 15 nonzero frequencies of a 4 x 4 image; four of them are at 1/4
    # exactly.
    image = torch.zeros(1, 3, 4, 4)
    image[0, 1, 2, 3] = 1
    assert high_frequency_energy(image).item() == pytest.approx(11 / 15)


def test_high_frequency_energy_falls_with_smoothing() -> None:
    noise = torch.rand(2, 3, 128, 128, generator=torch.Generator().manual_seed(1))
    # White noise fills the square of area 1 evenly; the disc of radius 1/4 has pi / 16 of it.
    assert high_frequency_energy(noise).tolist() == pytest.approx([1 - math.pi / 16] * 2, abs=0.01)
    # The mean over 2 x 2 neighbors weighs energy by cos^2(pi fx) cos^2(pi fy): 1/4 over the square, and over
    # the disc (1 + 4 J1(pi / 2) / (pi / 2) + 2 J1(pi / sqrt 2) / (pi / sqrt 2)) / 4 = .736 on average.
    smooth = (noise + noise.roll(1, -1) + noise.roll(1, -2) + noise.roll((1, 1), (-2, -1))) / 4
    expected = 1 - math.pi / 16 * 0.736 / 0.25
    assert high_frequency_energy(smooth).tolist() == pytest.approx([expected] * 2, abs=0.01)


def test_high_frequency_energy_of_constants_is_zero() -> None:
    assert high_frequency_energy(torch.full((2, 3, 7, 5), 0.1)).tolist() == [0.0, 0.0]
    # A channel's own color is no contrast.
    colored = torch.tensor([0.1, 0.7, 0.3]).view(1, 3, 1, 1).expand(1, 3, 8, 8)
    assert high_frequency_energy(colored).item() == 0.0


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match=r"shape \[1, 3, 4, 4\].*n >= 2"):
        pairwise_distance(gray(0.5))
    with pytest.raises(ValueError, match=r"shape \[2, 1, 4, 4\]"):
        pairwise_distance(torch.zeros(2, 1, 4, 4))
    with pytest.raises(ValueError, match="range from 0 to 255"):
        vendi_images(gray(0.0, 255.0))
    with pytest.raises(ValueError, match="range from nan"):
        high_frequency_energy(gray(math.nan))
    with pytest.raises(ValueError, match="bandwidth is 0"):
        vendi_images(gray(0.0, 1.0), bandwidth=0)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (torch.ones(2, 3), r"shape \[2, 3\]"),
        (torch.tensor([[1.0, math.nan], [math.nan, 1.0]]), "NaN"),
        (2 * torch.eye(2), "diagonal of 2 to 2"),
        (torch.tensor([[1.0, 0.5], [0.2, 1.0]]), "not symmetric: off by 0.3"),
        (torch.tensor([[1.0, 2.0], [2.0, 1.0]]), "eigenvalue / n of -0.5"),
    ],
)
def test_vendi_score_rejects_what_is_no_similarity(kernel: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vendi_score(kernel)
