"""The prompts, image seeds and groups of an update: functions of (seed, update) alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from margrpo import seeds
from margrpo.config import Train
from margrpo.prompts import Prompt


@dataclass(frozen=True)
class Batch:
    """The prompts of one update: P slots of G images; a slot is a group, also if prompts repeat."""

    prompts: list[Prompt]
    seeds: list[int]
    groups: Tensor


class BatchOrder:
    """Draws the batches of a run; every process of a distributed run draws the same ones.

    Args:
        prompts: the training prompts. seed: of the run.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        names = sorted({prompt.category for prompt in prompts})
        self.categories = [[prompt for prompt in prompts if prompt.category == name] for name in names]
        self.seed = seed

    def draw(self, update: int, train: Train) -> Batch:
        """Return the prompts and image seeds of an update.

        Slots take the categories in turn, so that each is trained equally; the prompts of a category are
        shuffled anew each time all have been shown.
        """
        first = (update - 1) * train.prompts_per_update
        slots = [self._prompt(first + slot) for slot in range(train.prompts_per_update)]
        each = train.images_per_prompt
        return Batch(
            [prompt for prompt in slots for _ in range(each)],
            [
                seeds.derive("train", self.seed, update, slot, image)
                for slot in range(len(slots))
                for image in range(each)
            ],
            torch.arange(len(slots)).repeat_interleave(each),
        )

    def _prompt(self, position: int) -> Prompt:
        turn, category = divmod(position, len(self.categories))
        prompts = self.categories[category]
        epoch, index = divmod(turn, len(prompts))
        generator = seeds.generator("prompts", self.seed, category, epoch)
        return prompts[int(torch.randperm(len(prompts), generator=generator)[index])]


def chunks(images: range, size: int | None) -> list[range]:
    """Return the images of every pass: `size` at a time (None: all at once)."""
    return [
        images[start : start + (size or len(images))] for start in range(0, len(images), size or len(images))
    ]
