"""Stateless noise: an image's draws depend on its own seed alone, never on the batch, order or device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from margrpo.seeds import derive


def normal(seeds: Sequence[int], purpose: str, index: int, shape: Sequence[int]) -> Tensor:
    """Return standard normals [B, *shape] (CPU float32), one stream per (seed, purpose, index)."""
    generator = torch.Generator()
    result = torch.empty(len(seeds), *shape)
    for row, seed in zip(result, seeds, strict=True):
        generator.manual_seed(derive(seed, purpose, index))
        torch.randn(tuple(shape), generator=generator, out=row)
    return result


def orders(seeds: Sequence[int], tokens: int) -> Tensor:
    """Return int64 [B, L]: the uniformly random order in which each image's tokens are committed."""
    generator = torch.Generator()
    result = torch.empty(len(seeds), tokens, dtype=torch.int64)
    for row, seed in zip(result, seeds, strict=True):
        torch.randperm(tokens, generator=generator.manual_seed(derive(seed, "order", 0)), out=row)
    return result
