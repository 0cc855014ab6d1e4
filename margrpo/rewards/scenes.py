"""Reward of the embedded world: the exact detector and GenEval's rules with clean partial credit."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from margrpo.benchmarks import scenes
from margrpo.config import RewardOptions
from margrpo.rewards.base import Info, Reward, Specs, register


@register(Info("scenes", "embedded world: GenEval's clean partial credit", "Apache-2.0", low=0.0, high=1.0))
def scenes_reward(options: RewardOptions) -> Reward:
    """Return the reward `geneval_partial_clean` for images [B, 3, 32, 32]."""
    return _score


def _score(images: Tensor, prompts: Sequence[str], specs: Specs) -> Tensor:
    return scenes.score(images, specs)
