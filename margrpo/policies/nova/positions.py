"""Patches and positions of NOVA: pure functions.

Source: baaivision/NOVA `diffnext/models/embeddings.py` (equations re-derived, no code copied).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def patchify(latents: Tensor, patch: int) -> Tensor:
    """Return tokens [B, L, p * p * C] of latents [B, C, H, W]: row by row, channel fastest in a token."""
    batch, channels, height, width = latents.shape
    grid = latents.view(batch, channels, height // patch, patch, width // patch, patch)
    return grid.permute(0, 2, 4, 3, 5, 1).reshape(batch, -1, patch * patch * channels)


def unpatchify(tokens: Tensor, patch: int, grid: tuple[int, int]) -> Tensor:
    """Return latents [B, C, H, W] of tokens [B, rows * columns, p * p * C]; the inverse of `patchify`."""
    rows, columns = grid
    cells = tokens.view(len(tokens), rows, columns, patch, patch, -1).permute(0, 5, 1, 3, 2, 4)
    return cells.reshape(len(tokens), -1, rows * patch, columns * patch)


def coordinates(grid: tuple[int, int], frames: int = 1, device: torch.device | None = None) -> Tensor:
    """Return (frame, row, column) of every token as float64 [frames * rows * columns, 3]."""
    axes = [torch.arange(size, dtype=torch.float64, device=device) for size in (frames, *grid)]
    return torch.cartesian_prod(*axes)


def space_embedding(grid: tuple[int, int], width: int, device: torch.device | None = None) -> Tensor:
    """Return [sin(x f), cos(x f), sin(y f), cos(y f)] of every token, [rows * columns, width], float32.

    f_k = 10000^(-k / q) with q = width / 4; x is the column, y the row.
    """
    _, y, x = coordinates(grid, device=device).unbind(1)
    quarter = width // 4
    steps = torch.arange(quarter, dtype=torch.float64, device=device)
    angles = torch.stack([x, y])[..., None] * 10_000.0 ** (-steps / quarter)
    return torch.cat([angles[0].sin(), angles[0].cos(), angles[1].sin(), angles[1].cos()], dim=1).float()


def time_features(frames: int, base: int, device: torch.device | None = None) -> Tensor:
    """Return [sin, cos] of frame j's position j * base / frames, [frames, 256], float32."""
    position = torch.arange(frames, dtype=torch.float64, device=device) * base / frames
    angles = position[:, None] * 10_000.0 ** (-torch.arange(128, dtype=torch.float64, device=device) / 128)
    return torch.cat([angles.sin(), angles.cos()], dim=1).float()


def rotation(places: Tensor, split: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return cos and sin [.., d / 2], float32, of the angles by which pairs of channels turn.

    Args:
        places: [.., 3], frame, row, column.
        split: channels (even) of a head that turn with each axis; part r uses place / 10000^(k / r), k even.
    """
    angles = []
    for axis, part in enumerate(split):
        k = torch.arange(0, part, 2, dtype=torch.float64, device=places.device)
        angles.append(places[..., axis, None].double() / 10_000.0 ** (k / part))
    turned = torch.cat(angles, dim=-1)
    return turned.cos().float(), turned.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [.., d] with its channel pairs (2j, 2j + 1) turned; cos, sin broadcast to [.., d / 2]."""
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1)
    return turned.flatten(-2).to(x.dtype)
