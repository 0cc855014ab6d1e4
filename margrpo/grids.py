"""Sample grids: images of a few prompts with the prompts as captions."""

from __future__ import annotations

import io
import math
from collections.abc import Hashable, Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

_CELL = 64  # pixels an image is enlarged to, at least
_SHEET_PROMPTS, _SHEET_IMAGES, _SHEET_COLUMNS = 8, 4, 4
_SHEET_BLOCK = 256  # pixels that the images of one prompt share
_GAP = 4
_CAPTION = 24
_FONT = 16
_INK = (40, 40, 40)


def spread(groups: Sequence[Hashable], count: int) -> list[int]:
    """Return up to `count` indices taken from the groups in turn, each group in its own order; ascending.

    groups: the group of every item, for instance its category.
    """
    turns: list[tuple[int, int]] = []
    members: dict[Hashable, int] = {}
    for index, group in enumerate(groups):
        turn = members.get(group, 0)
        members[group] = turn + 1
        turns.append((turn, index))
    return sorted(index for _, index in sorted(turns)[:count])


def grid_png(captions: Sequence[str], images: Tensor, cell: int = _CELL, columns: int = 1) -> bytes:
    """Return a PNG with a row of images under each caption.

    Args:
        captions: P prompts.
        images: [P, n, 3, H, W] in [0, 1]; small images are enlarged by whole pixels.
        cell: pixels that an image is enlarged to, at least.
        columns: captions side by side.
    """
    prompts, count, _, height, width = images.shape
    factor = max(1, cell // max(height, width))
    cell_height, cell_width = height * factor, width * factor
    row_height, column_width = _CAPTION + cell_height + _GAP, _GAP + count * (cell_width + _GAP)
    rows = math.ceil(prompts / columns)
    sheet = Image.new("RGB", (columns * column_width, _GAP + rows * row_height), "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(_FONT)
    pixels = (images.detach().float().clamp(0, 1) * 255).round().byte().movedim(2, -1).cpu().numpy()
    for index, caption in enumerate(captions):
        row, column = divmod(index, columns)
        top, left = _GAP + row * row_height, _GAP + column * column_width
        draw.text((left, top), _fit(caption, draw, font, column_width - 2 * _GAP), fill=_INK, font=font)
        for place in range(count):
            enlarged = np.kron(pixels[index, place], np.ones((factor, factor, 1), dtype=np.uint8))
            sheet.paste(Image.fromarray(enlarged), (left + place * (cell_width + _GAP), top + _CAPTION))
    buffer = io.BytesIO()
    sheet.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def sheet_png(captions: Sequence[str], groups: Sequence[Hashable], images: Tensor) -> bytes:
    """Return a PNG of up to eight prompts, taken from the groups in turn, with up to four images each.

    Args:
        captions, groups: P prompts and, for instance, their categories.
        images: [N, 3, H, W] in [0, 1]; image i shows prompt i mod P. Large images are shrunk.
    """
    shown = min(len(captions), len(images))
    count = min(_SHEET_IMAGES, max(1, len(images) // len(captions)))
    rows = spread(groups[:shown], _SHEET_PROMPTS)
    picked = images[torch.tensor([[row + turn * len(captions) for turn in range(count)] for row in rows])]
    cell = _SHEET_BLOCK // count
    height, width = picked.shape[-2:]
    if max(height, width) > cell:
        size = tuple(max(1, round(side * cell / max(height, width))) for side in (height, width))
        flat = picked.flatten(0, 1).float()
        small = torch.nn.functional.interpolate(flat, size=size, mode="area")
        picked = small.unflatten(0, (len(rows), count))
    return grid_png([captions[row] for row in rows], picked, cell, min(_SHEET_COLUMNS, len(rows)))


def _fit(
    text: str, draw: ImageDraw.ImageDraw, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int
) -> str:
    """Return the text, cut with an ellipsis where it is wider than `width` pixels."""
    length = draw.textlength(text, font=font)
    if length <= width:
        return text
    kept = max(1, math.floor(len(text) * width / length) - 2)
    return text[:kept].rstrip() + "…"
