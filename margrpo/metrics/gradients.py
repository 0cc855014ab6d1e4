"""Noise of policy gradients measured at fixed parameters; float64 inside, no gradients of their own."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GradientNoise:
    """Signal and noise of m independent gradients: see `signal_to_noise`."""

    mean_norm: float
    trace_covariance: float
    snr: float
    cosine_mean: float


@dataclass(frozen=True)
class NoiseScale:
    """Squared norm of the true gradient, trace of the covariance of one sample, and s / g2 in samples."""

    g2: float
    s: float
    simple: float


def _matrix(gradients: Tensor, at_least: int) -> Tensor:
    if gradients.ndim != 2 or gradients.shape[0] < at_least or gradients.shape[1] == 0:
        raise ValueError(
            f"gradients have shape {list(gradients.shape)}; [m, p] with m >= {at_least} is needed"
        )
    if not torch.isfinite(gradients).all():
        raise ValueError("gradients have NaN or infinite values")
    return gradients.detach().to(torch.float64)


def signal_to_noise(gradients: Tensor) -> GradientNoise:
    """Return the norm of the mean gradient, the unbiased trace of the covariance, SNR and mean cosine.

    snr = |mean|^2 / (trace / m): the squared mean holds trace / m of noise in expectation, so gradients
    without any signal give about 1, and a signal mu gives about 1 + m |mu|^2 / trace. Equal gradients give
    infinity, zero ones NaN. cosine_mean is over pairs i < j of nonzero gradients, NaN with fewer than two.
    gradients: [m, p], m >= 2 independent draws. Raises ValueError for another shape or non-finite values.
    """
    rows = _matrix(gradients, at_least=2)
    m = len(rows)
    mean = rows.mean(0)
    signal = float(mean.square().sum())
    trace = float((rows - mean).square().sum()) / (m - 1)
    without_noise = math.inf if signal > 0 else math.nan
    snr = signal / (trace / m) if trace > 0 else without_noise
    norms = rows.norm(dim=1, keepdim=True)
    directions = (rows / norms)[norms.squeeze(1) > 0]
    k = len(directions)
    # |sum of unit vectors|^2 is k plus twice the sum of the cosines of all pairs: no [k, k] matrix needed.
    cosine = (float(directions.sum(0).square().sum()) - k) / (k * (k - 1)) if k > 1 else math.nan
    return GradientNoise(math.sqrt(signal), trace, snr, cosine)


def noise_scale(small_sq: float, small_batch: int, big_sq: float, big_batch: int) -> NoiseScale:
    """Return the unbiased estimates of |G|^2 and tr(Sigma) from squared gradient norms at two batch sizes.

    E|g_b|^2 = |G|^2 + tr(Sigma) / b, solved for both. `simple` = s / g2 is the batch size at which noise
    equals signal, NaN where noise makes g2 <= 0 or s < 0. The estimates are linear in the squared norms,
    their ratio is not: average small_sq and big_sq over many batches first.
    Raises ValueError unless 0 < small_batch < big_batch and both squared norms are finite and >= 0.
    Source: McCandlish et al., "An empirical model of large-batch training" (2018), appendix A.1.
    """
    if not 0 < small_batch < big_batch:
        raise ValueError(f"batches are {small_batch} and {big_batch}; 0 < small_batch < big_batch is needed")
    if not (0 <= small_sq < math.inf and 0 <= big_sq < math.inf):
        raise ValueError(f"squared norms are {small_sq} and {big_sq}; finite values >= 0 are needed")
    g2 = (big_batch * big_sq - small_batch * small_sq) / (big_batch - small_batch)
    s = (small_sq - big_sq) / (1 / small_batch - 1 / big_batch)
    return NoiseScale(g2, s, s / g2 if g2 > 0 and s >= 0 else math.nan)


def projection(gradients: Tensor, reference: Tensor) -> float:
    """Return the least-squares coefficient of the mean gradient on a reference: 1 equal, 0 unrelated.

    gradients: [m, p], m >= 1; reference: [p]. Noise of the reference shrinks the coefficient, and noise that
    both share raises it: estimate the reference from many other draws.
    Raises ValueError for other shapes, non-finite values or a zero reference.
    """
    mean = _matrix(gradients, at_least=1).mean(0)
    if reference.shape != mean.shape:
        raise ValueError(f"reference has shape {list(reference.shape)}; [{len(mean)}] is needed")
    direction = reference.detach().to(mean)
    squared = float(direction.square().sum())
    if not 0 < squared < math.inf:
        raise ValueError(f"reference has squared norm {squared}; a finite nonzero gradient is needed")
    return float(mean @ direction) / squared
