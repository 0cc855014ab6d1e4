"""What the algorithm needs from a policy: backbone, head, transition, schedule, decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from margrpo.config import Sampler
from margrpo.diffusion import Transition
from margrpo.errors import ConfigError


class Condition:
    """Text (or class) condition of B images: named tensors whose first dimension is B."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def select(self, index: Tensor | slice) -> Condition:
        """Return the conditions of the images `index` (int64 [N] or a slice)."""
        return Condition({name: value[index] for name, value in self.tensors.items()})

    def to(self, device: torch.device) -> Condition:
        """Return the condition on a device."""
        return Condition({name: value.to(device) for name, value in self.tensors.items()})

    @staticmethod
    def join(parts: Sequence[Condition]) -> Condition:
        """Concatenate conditions along the image dimension."""
        return Condition({name: torch.cat([part[name] for part in parts]) for name in parts[0].tensors})


class Policy(nn.Module):
    """A backbone that writes L continuous tokens of C channels and a diffusion head that denoises each.

    Attributes:
        kind: name of the policy in checkpoint files; empty: it cannot be saved.
        tokens: L, tokens per image.
        channels: C, channels of a token.
        transition: the Gaussian transitions of the head's T denoising steps.
        guidance_schedule: how the CFG scale changes over AR steps, see `guidance_at`.
    """

    kind = ""
    tokens: int
    channels: int
    transition: Transition
    guidance_schedule = "constant"

    @property
    def rows(self) -> int:
        """Positions of the longest sequence in the backbone, for estimates (default: the image tokens)."""
        return self.tokens

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> Policy:
        """Return a policy of the sizes that `describe` gave, whose weights a checkpoint will set."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """Return what a checkpoint stores beside the weights (JSON types)."""
        raise NotImplementedError

    def locate(self, find: Callable[[], Path | None]) -> None:
        """Say where the released checkpoint lies, for parts that saved policies leave there (default: none).

        find: called when such a part is needed; returns its folder, or None if there is none.
        """

    def guidance_at(self, scale: float, unknown: int) -> float:
        """Return the CFG scale of an AR step that leaves `unknown` tokens unknown.

        Under the linear schedule it grows from 1 with the share of known tokens; the last step counts one token as
        unknown (LTH14/mar, `sample_tokens`).
        """
        if self.guidance_schedule == "constant":
            return scale
        return 1 + (scale - 1) * (self.tokens - max(1, unknown)) / self.tokens

    def sample_tuned(
        self,
        prompts: Sequence[str],
        order: Tensor,
        initial: Tensor,
        scale: float,
        renorm: float,
        trunc: float,
    ) -> Tensor:
        """Return tokens [B, L, C] of noiseless sampling with the guidance options of NOVA's own pipeline.

        Args:
            order: int64 [B, L], the commit order. initial: [K, B, L, C], a standard normal canvas per AR step.
            scale, renorm, trunc: see `evaluation.guidance*` of the params.

        Raises:
            ConfigError: the model's own code has no such options.
        """
        allowed = f"allowed with a {self.kind} policy: 1.0, and guidance_trunc 0 (they are NOVA's)"
        raise ConfigError.of("evaluation.guidance_renorm", f"{renorm}, guidance_trunc {trunc}", allowed)

    def encode(self, prompts: Sequence[str | None]) -> Condition:
        """Return the condition of prompts; `None` is the null prompt of classifier-free guidance."""
        raise NotImplementedError

    def prefill(self, condition: Condition) -> Condition:
        """Add what the backbone derives from the condition alone, once per image (default: nothing)."""
        return condition

    def backbone(self, tokens: Tensor, known: Tensor, condition: Condition) -> Tensor:
        """Return z [B, L, D] for tokens [B, L, C] of which `known` (bool [B, L]) are given."""
        raise NotImplementedError

    def head(self, x: Tensor, t: Tensor, z: Tensor) -> Tensor:
        """Return velocity or epsilon [N, C] (or [N, 2C] with variances) for x [N, C], t [N], z [N, D]."""
        raise NotImplementedError

    def configure(self, sampler: Sampler) -> None:
        """Set `transition` for a sampler's denoising steps, eta and final step."""
        raise NotImplementedError

    def ar_schedule(self, steps: int) -> list[int]:
        """Return n_k, the tokens that AR step k commits; they sum to L, zero-token steps are dropped.

        Raises:
            ConfigError: more steps than the model can make.
        """
        raise NotImplementedError

    def decode(self, tokens: Tensor) -> Tensor:
        """Return images [B, 3, H, W] in [0, 1] for tokens [B, L, C]."""
        raise NotImplementedError

    def backbone_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that write z."""
        raise NotImplementedError

    def head_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of the diffusion head."""
        raise NotImplementedError
