"""Gradient noise against closed forms and simulated gradients of known signal and noise."""

from __future__ import annotations

import math

import pytest
import torch

from margrpo.metrics.gradients import noise_scale, projection, signal_to_noise


def test_signal_to_noise_by_hand() -> None:
    # Mean (1, 1); deviations (0, -1) and (0, 1), so the trace is 2 / (2 - 1) and the SNR 2 / (2 / 2).
    noise = signal_to_noise(torch.tensor([[1.0, 0.0], [1.0, 2.0]]))
    assert noise.mean_norm == pytest.approx(math.sqrt(2))
    assert noise.trace_covariance == pytest.approx(2.0)
    assert noise.snr == pytest.approx(2.0)
    assert noise.cosine_mean == pytest.approx(1 / math.sqrt(5))


def test_cosine_is_the_mean_over_pairs() -> None:
    # Right, up, left: cosines 0, -1 and 0; the length plays no role.
    gradients = torch.tensor([[3.0, 0.0], [0.0, 1.0], [-2.0, 0.0]])
    assert signal_to_noise(gradients).cosine_mean == pytest.approx(-1 / 3)


def test_snr_of_known_signal() -> None:
    generator = torch.Generator().manual_seed(0)
    m, p = 8, 20_000
    draws = 0.5 * torch.randn(m, p, generator=generator)
    pure = signal_to_noise(draws)
    assert pure.trace_covariance == pytest.approx(0.25 * p, rel=0.02)
    assert pure.snr == pytest.approx(1.0, abs=0.05)
    signal = torch.full((p,), 0.3)
    noisy = signal_to_noise(draws + signal)
    assert noisy.snr == pytest.approx(1 + m * 0.09 / 0.25, rel=0.03)
    assert noisy.trace_covariance == pytest.approx(pure.trace_covariance, rel=1e-5)
    assert noisy.cosine_mean == pytest.approx(0.09 / (0.09 + 0.25), rel=0.05)


def test_signal_to_noise_without_noise_or_signal() -> None:
    equal = signal_to_noise(torch.tensor([[1.0, 2.0], [1.0, 2.0]]))
    assert equal.trace_covariance == 0
    assert equal.snr == math.inf
    assert equal.cosine_mean == pytest.approx(1.0)
    silent = signal_to_noise(torch.zeros(3, 2))
    assert silent.mean_norm == 0
    assert math.isnan(silent.snr)
    assert math.isnan(silent.cosine_mean)
    # A group without reward spread gives a zero gradient: it has no direction, the two others agree.
    gradients = torch.tensor([[1.0, 0.0], [0.0, 0.0], [2.0, 0.0]])
    assert signal_to_noise(gradients).cosine_mean == pytest.approx(1.0)


def test_noise_scale_check_value() -> None:
    scale = noise_scale(small_sq=5, small_batch=2, big_sq=2, big_batch=8)
    assert (scale.g2, scale.s, scale.simple) == pytest.approx((1.0, 8.0, 8.0))


def test_noise_scale_inverts_its_definition() -> None:
    # |G|^2 = 3 and trace 12: 3 + 12 / 4 at batch 4 and 3 + 12 / 12 at batch 12.
    scale = noise_scale(6, 4, 4, 12)
    assert (scale.g2, scale.s, scale.simple) == pytest.approx((3.0, 12.0, 4.0))


def test_noise_scale_has_no_ratio_where_an_estimate_has_the_wrong_sign() -> None:
    no_signal = noise_scale(8, 1, 2, 4)
    assert (no_signal.g2, no_signal.s) == pytest.approx((0.0, 8.0))
    assert math.isnan(no_signal.simple)
    negative_noise = noise_scale(1, 1, 2, 4)
    assert negative_noise.s < 0
    assert math.isnan(negative_noise.simple)


def test_projection_by_hand() -> None:
    reference = torch.tensor([2.0, 0.0])
    assert projection(torch.tensor([[1.0, 5.0], [3.0, 7.0]]), reference) == pytest.approx(1.0)
    assert projection(torch.tensor([[0.0, 4.0]]), reference) == 0.0
    assert projection(torch.tensor([[-1.0, 4.0]]), reference) == pytest.approx(-0.5)


def test_inputs_may_require_gradients() -> None:
    weights = torch.ones(2, 2, requires_grad=True)
    assert projection(weights * 2, weights[0]) == pytest.approx(2.0)


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match=r"shape \[1, 2\].*m >= 2"):
        signal_to_noise(torch.ones(1, 2))
    with pytest.raises(ValueError, match="NaN or infinite"):
        signal_to_noise(torch.tensor([[1.0], [math.inf]]))
    with pytest.raises(ValueError, match="batches are 8 and 8"):
        noise_scale(1, 8, 1, 8)
    with pytest.raises(ValueError, match="squared norms are -1 and 2"):
        noise_scale(-1, 2, 2, 8)
    with pytest.raises(ValueError, match=r"shape \[3\]; \[2\] is needed"):
        projection(torch.ones(1, 2), torch.ones(3))
    with pytest.raises(ValueError, match="squared norm 0"):
        projection(torch.ones(1, 2), torch.zeros(2))
