"""Which images the sheet of a validation shows, and where."""

from __future__ import annotations

import io

import torch
from PIL import Image

from margrpo.grids import grid_png, sheet_png


def test_sheet_takes_prompts_from_the_groups_in_turn() -> None:
    # Image i shows prompt i mod 10 and is of brightness i / 20; two rounds of ten prompts.
    images = (torch.arange(20) / 20).view(20, 1, 1, 1).expand(20, 3, 32, 32)
    groups = ["a"] * 9 + ["b"]
    sheet = Image.open(io.BytesIO(sheet_png([f"prompt {i}" for i in range(10)], groups, images))).convert("L")
    # Two images a prompt, 128 pixels each, four prompts a row, two rows of caption and images.
    assert sheet.size == (4 * (4 + 2 * 132), 4 + 2 * (24 + 128 + 4))
    shown = []
    for block in range(8):
        row, column = divmod(block, 4)
        x, y = 4 + column * 268 + 64, 4 + row * 156 + 24 + 64
        shown += [round(sheet.getpixel((x + turn * 132, y)) / 255 * 20) for turn in range(2)]
    # Group b has one prompt (9): it and the first seven of group a.
    assert shown == [0, 10, 1, 11, 2, 12, 3, 13, 4, 14, 5, 15, 6, 16, 9, 19]


def test_sheet_shrinks_large_images_and_copes_with_few() -> None:
    large = torch.zeros(2, 3, 512, 1024)
    sheet = Image.open(io.BytesIO(sheet_png(["one", "two", "three"], ["a", "a", "a"], large)))
    assert sheet.size == (2 * (4 + 256 + 4), 4 + 24 + 128 + 4)


def test_one_column_is_a_row_of_images_under_each_caption() -> None:
    grid = Image.open(io.BytesIO(grid_png(["a", "b"], torch.ones(2, 3, 3, 32, 32))))
    assert grid.size == (4 + 3 * 68, 4 + 2 * (24 + 64 + 4))
