"""Reward of the embedded world: the exact detector and GenEval's rules with clean partial credit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from margrpo.benchmarks import scenes
from margrpo.rewards.base import register


@register("scenes")
def scene_reward(images: Tensor, prompts: Sequence[str], specs: Sequence[Mapping[str, Any]]) -> Tensor:
    """Return `geneval_partial_clean` in [0, 1] for images [B, 3, 32, 32]."""
    return scenes.score(images, specs)
