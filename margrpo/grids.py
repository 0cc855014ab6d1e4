"""Sample grids: images of a few prompts with the prompts as captions."""

from __future__ import annotations

import io
import math
from collections.abc import Hashable, Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

_CELL = 64  # pixels an image is enlarged to, at least
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


def grid_png(captions: Sequence[str], images: Tensor) -> bytes:
    """Return a PNG with a row of images under each caption.

    Args:
        captions: P prompts.
        images: [P, n, 3, H, W] in [0, 1]; small images are enlarged by whole pixels.
    """
    prompts, columns, _, height, width = images.shape
    factor = max(1, _CELL // max(height, width))
    cell_height, cell_width = height * factor, width * factor
    row_height = _CAPTION + cell_height + _GAP
    sheet = Image.new("RGB", (_GAP + columns * (cell_width + _GAP), _GAP + prompts * row_height), "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(_FONT)
    pixels = (images.detach().float().clamp(0, 1) * 255).round().byte().movedim(2, -1).cpu().numpy()
    for row, caption in enumerate(captions):
        top = _GAP + row * row_height
        draw.text((_GAP, top), _fit(caption, draw, font, sheet.width - 2 * _GAP), fill=_INK, font=font)
        for column in range(columns):
            enlarged = np.kron(pixels[row, column], np.ones((factor, factor, 1), dtype=np.uint8))
            sheet.paste(Image.fromarray(enlarged), (_GAP + column * (cell_width + _GAP), top + _CAPTION))
    buffer = io.BytesIO()
    sheet.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def _fit(
    text: str, draw: ImageDraw.ImageDraw, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int
) -> str:
    """Return the text, cut with an ellipsis where it is wider than `width` pixels."""
    length = draw.textlength(text, font=font)
    if length <= width:
        return text
    kept = max(1, math.floor(len(text) * width / length) - 2)
    return text[:kept].rstrip() + "…"
