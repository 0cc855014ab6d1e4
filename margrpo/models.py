"""The weights of one run: the policy that learns, the reference of the KL term, and how they compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from margrpo.adapters import adapters_off, add_adapters, merged_state
from margrpo.base import released_folder
from margrpo.checkpoints import load_policy
from margrpo.config import Config
from margrpo.errors import ConfigError, MargrpoError
from margrpo.policies.base import Policy


class Models:
    """Policy and reference of a run, on their devices and ready to train.

    Args:
        config, variant, seed: the run. base: checkpoint of the base policy. device: of the policy.

    Raises:
        ConfigError: the settings do not fit the policy (scored steps, uncertain tokens, LoRA targets).
    """

    def __init__(self, config: Config, variant: str, seed: int, base: Path, device: torch.device) -> None:
        train, objective = config.train, config.objective_of(variant)
        self.device = device
        self.policy = _load(base, config).to(device)
        _check_sizes(self.policy, config, variant)
        for parameter in self.policy.backbone_parameters():
            parameter.requires_grad_(objective.trainable != "head")
        for parameter in self.policy.head_parameters():
            parameter.requires_grad_(objective.trainable != "backbone")
        self.frozen_copy: Policy | None = None
        if train.lora is not None:
            add_adapters(self.policy, train.lora, seed)
        else:
            resting = torch.device("cpu") if train.offload_reference else device
            self.frozen_copy = _load(base, config).requires_grad_(False).to(resting)
        if train.gradient_checkpointing:
            recompute_blocks(self.policy)
        self._precision = train.precision
        self._decay = train.ema
        self.average: dict[str, Tensor] | None = None if train.ema is None else self.weights()

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the parameters that learn by name, in the policy's order."""
        return {name: value for name, value in self.policy.named_parameters() if value.requires_grad}

    @contextmanager
    def reference(self) -> Iterator[Policy]:
        """Give the base policy for the KL term: with LoRA the policy itself, its adapters off meanwhile."""
        if self.frozen_copy is None:
            with adapters_off(self.policy) as policy:
                yield policy
            return
        resting = next(self.frozen_copy.parameters()).device
        try:
            yield self.frozen_copy.to(self.device)
        finally:
            self.frozen_copy.to(resting)

    def computing(self) -> AbstractContextManager[Any]:
        """Return the context of forward passes: bf16 matrix products if `train.precision` asks for them.

        Weights stay float32 (a step of 1e-6 would vanish in bf16), and so do transitions and log-probs.
        """
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._precision == "bf16")

    def track(self) -> None:
        """Move the average towards the weights, after each step of the optimizer (nothing without `train.ema`)."""
        if self.average is None or self._decay is None:
            return
        for name, value in self.trainable().items():
            self.average[name].lerp_(value.detach().to("cpu"), 1.0 - self._decay)

    def chosen(self) -> dict[str, Tensor]:
        """Return a copy of what checkpoints hold: the average with `train.ema`, else the weights."""
        if self.average is None:
            return self.weights()
        return {name: value.clone() for name, value in self.average.items()}

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the policy have its average as weights meanwhile (nothing without `train.ema`)."""
        if self.average is None:
            yield
            return
        current = self.weights()
        self.set_weights(self.average)
        try:
            yield
        finally:
            self.set_weights(current)

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of what training changes, on the CPU."""
        return {name: value.detach().cpu().clone() for name, value in self.trainable().items()}

    def set_weights(self, weights: dict[str, Tensor]) -> None:
        """Set what `weights` returned; MargrpoError if it is of a run with other trainable parameters."""
        if weights.keys() != self.trainable().keys():
            raise MargrpoError("weights of a run that trains other parameters")
        self.policy.load_state_dict(weights, strict=False)

    def export(self) -> dict[str, Tensor]:
        """Return the state dict of a checkpoint: LoRA merged, names of the base policy."""
        return merged_state(self.policy)


def recompute_blocks(policy: nn.Module) -> None:
    """Let every repeated block keep its input alone for the backward pass and compute the rest again then."""
    for child in policy.children():
        if not isinstance(child, nn.ModuleList):
            recompute_blocks(child)
            continue
        for block in child:
            block.forward = partial(_recomputed, block.forward)


def _recomputed(forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*inputs, **options)
    # nothing in a policy is random: no dropout, no draw
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, **options)


def _load(base: Path, config: Config) -> Policy:
    policy = load_policy(base).eval()
    policy.locate(lambda: released_folder(config))
    policy.configure(config.sampler)
    return policy


def _check_sizes(policy: Policy, config: Config, variant: str) -> None:
    train = config.train
    available = len(policy.ar_schedule(config.sampler.ar_steps))
    if train.ar_steps > available:
        allowed = f"allowed: 1..{available} (steps that commit tokens)"
        raise ConfigError.of("train.ar_steps", train.ar_steps, allowed)
    scored = len(policy.transition.scored)
    if train.denoising_steps > scored:
        allowed = f"allowed: 1..{scored} (steps of this policy that have a log-prob)"
        raise ConfigError.of("train.denoising_steps", train.denoising_steps, allowed)
    fraction = config.objective_of(variant).uncertain_fraction
    if round(fraction * policy.tokens) == 0:
        allowed = f"allowed: at least one of the {policy.tokens} tokens"
        raise ConfigError.of(f"variants.{variant}.uncertain_fraction", fraction, allowed)
