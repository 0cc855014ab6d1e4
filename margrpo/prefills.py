"""What a backbone derives from the prompt alone, computed once per micro-batch also in training."""

from __future__ import annotations

import torch
from torch import Tensor

from margrpo.policies.base import Condition, Policy


class Prefills:
    """`Policy.prefill` once per policy and condition, shared by the AR steps that are scored one by one.

    AR steps backpropagate into detached copies; `backward` then goes once through what `prefill` computed. The
    gradient is the sum that separate passes would give.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], tuple[Condition, Condition]] = {}
        self._cuts: list[tuple[Tensor, Tensor]] = []

    def get(self, policy: Policy, condition: Condition) -> Condition:
        """Return the prefilled condition."""
        key = id(policy), id(condition)
        if key not in self._made:
            made = policy.prefill(condition)
            cut = Condition({name: self._cut(value) for name, value in made.tensors.items()})
            self._made[key] = condition, cut  # the condition is kept alive: its id is the key
        return self._made[key][1]

    def backward(self) -> None:
        """Add the gradients that the copies collected to those of the parameters."""
        used = [(value, copy.grad) for value, copy in self._cuts if copy.grad is not None]
        if used:
            torch.autograd.backward([value for value, _ in used], [gradient for _, gradient in used])
        self._cuts.clear()
        self._made.clear()

    def _cut(self, value: Tensor) -> Tensor:
        if not value.requires_grad:
            return value
        copy = value.detach().requires_grad_()
        self._cuts.append((value, copy))
        return copy
