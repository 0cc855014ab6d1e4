"""The reward protocol, the registry, and the weighted mixture that training maximises."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from margrpo.errors import ConfigError


class Reward(Protocol):
    """Scores images [B, 3, H, W] in [0, 1] for their prompts and specs; returns float [B]."""

    def __call__(self, images: Tensor, prompts: Sequence[str], specs: Sequence[Mapping[str, Any]]) -> Tensor:
        """Return one score per image."""
        ...


@dataclass(frozen=True)
class RewardBatch:
    """`total` [B] is the weighted sum of `parts` (name -> [B], unweighted)."""

    total: Tensor
    parts: dict[str, Tensor]


_REGISTRY: dict[str, Reward] = {}


def register(name: str) -> Callable[[Reward], Reward]:
    """Make a reward available under `name` in `reward.weights`."""

    def add(reward: Reward) -> Reward:
        if name in _REGISTRY:
            raise ValueError(f"reward {name} is registered already")
        _REGISTRY[name] = reward
        return reward

    return add


def names() -> list[str]:
    """Return the registered names."""
    return sorted(_REGISTRY)


def check(weights: Mapping[str, float]) -> None:
    """Refuse unknown rewards and a mixture without weight before anything expensive starts.

    Raises:
        ConfigError: names what is allowed.
    """
    for name in weights:
        if name not in _REGISTRY:
            raise ConfigError.of(f"reward.weights.{name}", "unknown reward", f"allowed: {', '.join(names())}")
    if not any(weights.values()):
        raise ConfigError.of("reward.weights", dict(weights), "allowed: at least one weight that is not 0")


@torch.no_grad()
def score(
    weights: Mapping[str, float], images: Tensor, prompts: Sequence[str], specs: Sequence[Mapping[str, Any]]
) -> RewardBatch:
    """Return every reward of the mixture and their weighted sum, float32 [B] on the CPU."""
    check(weights)
    parts = {name: _REGISTRY[name](images, prompts, specs).float().cpu() for name in weights}
    total = torch.stack([weight * parts[name] for name, weight in weights.items()]).sum(0)
    return RewardBatch(total, parts)
