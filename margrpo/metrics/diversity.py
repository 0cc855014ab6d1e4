"""Diversity of the images of one prompt, and an over-smoothing check; float64 inside, no gradients.

A reward that rises while `vendi_images` falls towards 1 is collapse: plot both. Compare only values of the
same number of images: the Vendi score grows with it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Images whose mean absolute pixel difference is this large count as similar by 1/e.
_BANDWIDTH = 0.1
# Far below the variance of one pixel off by one 8-bit step in a 1024 x 1024 image, far above rounding.
_CONSTANT_VARIANCE = 1e-16
# Slack for a decoder's rounding at the ends of [0, 1], and for a kernel computed in float32.
_TOLERANCE = 1e-4


def _flat(images: Tensor, at_least: int) -> Tensor:
    """Return [n, 3 H W] in float64 after checking shape and range."""
    if images.ndim != 4 or images.shape[1] != 3 or images.shape[0] < at_least or images.numel() == 0:
        raise ValueError(
            f"images have shape {list(images.shape)}; [n, 3, H, W] with n >= {at_least} is needed"
        )
    low, high = float(images.min()), float(images.max())
    if not (low >= -_TOLERANCE and high <= 1 + _TOLERANCE):
        raise ValueError(f"images range from {low:.4g} to {high:.4g}; values in [0, 1] are needed")
    return images.detach().to(torch.float64).flatten(1)


def pairwise_distance(images: Tensor) -> float:
    """Return the mean over pairs i < j of the mean absolute difference of pixels and channels; in [0, 1].

    images: [n, 3, H, W] in [0, 1], n >= 2, of one prompt. Raises ValueError for another shape or range.
    """
    flat = _flat(images, at_least=2)
    return float(torch.pdist(flat, p=1).mean()) / flat.shape[1]


def vendi_score(kernel: Tensor) -> float:
    """Return the Vendi score exp(-sum of lambda ln lambda) of the eigenvalues of kernel / n: 1 (equal) .. n.

    kernel: [n, n] similarities, symmetric, positive semi-definite, unit diagonal; 0 ln 0 = 0. The score grows
    with n: report score / n beside it. Raises ValueError when the kernel lacks one of these properties.
    Source: Friedman and Dieng, "The Vendi score" (2023), equation 2.
    """
    if kernel.ndim != 2 or kernel.shape[0] != kernel.shape[1] or kernel.shape[0] == 0:
        raise ValueError(f"kernel has shape {list(kernel.shape)}; [n, n] with n >= 1 is needed")
    similarity = kernel.detach().to(torch.float64)
    if not torch.isfinite(similarity).all():
        raise ValueError("kernel has NaN or infinite values")
    if not torch.allclose(similarity.diagonal(), similarity.new_ones(()), rtol=0, atol=_TOLERANCE):
        diagonal = similarity.diagonal()
        raise ValueError(
            f"kernel has a diagonal of {diagonal.min():.4g} to {diagonal.max():.4g}; ones are needed"
        )
    if not torch.allclose(similarity, similarity.T, rtol=0, atol=_TOLERANCE):
        raise ValueError(f"kernel is not symmetric: off by {(similarity - similarity.T).abs().max():.4g}")
    eigenvalues = torch.linalg.eigvalsh(similarity) / similarity.shape[0]
    if float(eigenvalues.min()) < -_TOLERANCE:
        raise ValueError(f"kernel is not positive semi-definite: eigenvalue / n of {eigenvalues.min():.4g}")
    return math.exp(float(torch.special.entr(eigenvalues.clamp_min(0)).sum()))


def vendi_images(images: Tensor, bandwidth: float = _BANDWIDTH) -> float:
    """Return the Vendi score under the kernel exp(-d / bandwidth), d the mean absolute pixel difference.

    This Laplace kernel is positive definite and defined for every image. A cosine of pixels is not for black
    images, is near 1 for all others, and when centered calls an image and its negative one direction. It sees
    appearance, not meaning: for the latter give `vendi_score` the cosine kernel of CLIP or DINO features.
    images: [n, 3, H, W] in [0, 1], n >= 1. Raises ValueError for another shape or range or bandwidth <= 0.
    """
    if not bandwidth > 0:
        raise ValueError(f"bandwidth is {bandwidth}; a mean absolute pixel difference above 0 is needed")
    flat = _flat(images, at_least=1)
    rows, columns = torch.triu_indices(len(flat), len(flat), offset=1, device=flat.device)
    similarity = torch.eye(len(flat), dtype=flat.dtype, device=flat.device)
    # pdist lists the pairs i < j row by row, as triu_indices does.
    upper = torch.exp(-torch.pdist(flat, p=1) / (flat.shape[1] * bandwidth))
    similarity[rows, columns] = upper
    similarity[columns, rows] = upper
    return vendi_score(similarity)


def high_frequency_energy(images: Tensor) -> Tensor:
    """Return the share of spectral energy above half of Nyquist (1/4 cycle per pixel): blur lowers it.

    Frequency is the radius sqrt(fx^2 + fy^2). Energies of the three channels are added after removing each
    channel's mean; a constant image gives 0. The discrete spectrum wraps around: opposite borders that differ
    add some high-frequency energy of their own.
    images: [B, 3, H, W] in [0, 1]; returns float64 [B] in [0, 1].
    Raises ValueError for another shape or range.
    """
    flat = _flat(images, at_least=1)
    height, width = images.shape[-2:]
    pixels = flat.reshape(-1, 3, height, width)
    centered = pixels - pixels.mean(dim=(-2, -1), keepdim=True)
    energy = torch.fft.fft2(centered).abs().square().sum(1)
    vertical = torch.fft.fftfreq(height, dtype=flat.dtype, device=flat.device)
    horizontal = torch.fft.fftfreq(width, dtype=flat.dtype, device=flat.device)
    high = vertical[:, None].square() + horizontal[None, :].square() > 0.25**2
    total = energy.sum(dim=(-2, -1))
    share = (energy * high).sum(dim=(-2, -1)) / total
    constant = centered.square().mean(dim=(1, 2, 3)) < _CONSTANT_VARIANCE
    return torch.where(constant, torch.zeros_like(share), share)
