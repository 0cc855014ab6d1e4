"""The processes of one run, through accelerate: who does which images, and sums over all of them.

A single process needs none of it and does not import accelerate. Every process holds the whole policy, makes
the same draws, works on its slice of an update's images, and ends with the sum of all gradients, so that the
weights stay equal. A group of images may straddle processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from margrpo.config import Train
from margrpo.errors import ConfigError

T = TypeVar("T")
_SHARDING = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM")
"""Set by `accelerate launch` for modes that would be ignored silently."""


class Workers:
    """This process among those that `accelerate launch` (on GPUs) or `torchrun` (also on CPUs) started.

    Args:
        train: the section of the params.

    Attributes:
        count, index: processes, and which one this is. device: where this one computes.

    Raises:
        ConfigError: an update's images do not divide among the processes, there is no CUDA device, or accelerate
            is configured to shard the weights.
    """

    def __init__(self, train: Train) -> None:
        for name in _SHARDING:
            if os.environ.get(name, "").lower() in ("1", "true"):
                allowed = "allowed: data parallelism alone, every process holds the whole policy (accelerate config)"
                raise ConfigError.of(name, os.environ[name], allowed)
        self.count = int(os.environ.get("WORLD_SIZE", "1"))
        self.index = int(os.environ.get("RANK", "0"))
        images = train.prompts_per_update * train.images_per_prompt
        if images % self.count:
            allowed = f"allowed: a multiple of the {self.count} processes"
            raise ConfigError.of("train.prompts_per_update * train.images_per_prompt", images, allowed)
        if train.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError.of("train.device", "cuda", "allowed: cpu (torch finds no CUDA device here)")
        self.device = torch.device(train.device)
        if self.count > 1:
            from accelerate import PartialState  # seconds to import

            state = PartialState(cpu=train.device == "cpu")
            self.device = state.device if train.device == "cuda" else self.device

    @property
    def main(self) -> bool:
        """Whether this process writes files and talks."""
        return self.index == 0

    def share(self, images: int) -> range:
        """Return the images of this process out of those of an update."""
        each = images // self.count
        return range(self.index * each, (self.index + 1) * each)

    def gather(self, values: Tensor) -> Tensor:
        """Return the values [n, ..] of all processes, [n * count, ..] in the order of `share`."""
        if self.count == 1:
            return values
        from accelerate.utils import gather

        gathered: Tensor = gather(values.contiguous())
        return gathered

    def on_main(self, work: Callable[[], T]) -> T:
        """Return what `work` returns in the main process, where alone it runs."""
        if self.count == 1:
            return work()
        from accelerate.utils import broadcast_object_list

        result: list[Any] = broadcast_object_list([work() if self.main else None])
        done: T = result[0]
        return done

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sums over the processes (float64)."""
        if self.count == 1:
            return list(values)
        from accelerate.utils import reduce

        reduced: Tensor = reduce(self._column(values), "sum")
        return reduced.tolist()

    def largest(self, value: float) -> float:
        """Return the largest value of any process."""
        return value if self.count == 1 else float(self.gather(self._column([value])).max())

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace every gradient by its sum over the processes; one that no process has stays None."""
        if self.count == 1:
            return
        from accelerate.utils import reduce

        owners = self.sum([float(parameter.grad is not None) for parameter in parameters])
        for parameter, owned in zip(parameters, owners, strict=True):
            if owned:
                local = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = reduce(local, "sum")

    def _column(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self.device)
