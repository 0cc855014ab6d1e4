"""LoRA through peft: low-rank updates of the linear layers that learn; without them the policy is the base.

Switching the adapters off gives the reference of the KL term without a second copy of the weights. Checkpoints
hold the merged weights, under the names of the base policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from margrpo import seeds
from margrpo.config import Lora
from margrpo.errors import ConfigError
from margrpo.policies.base import Policy

_ADAPTER = "default"


def add_adapters(policy: Policy, lora: Lora, seed: int) -> None:
    """Give the linear layers that learn an adapter W + (alpha / rank) B A and freeze everything else.

    A is normal with variance 1 / inputs, drawn from the seed and the layer's name; B is zero: the policy starts
    as the base.

    Raises:
        ConfigError: no layer that learns has one of the names in `targets`.
    """
    from peft import LoraConfig, inject_adapter_in_model  # seconds to import

    learning = [
        name
        for name, module in policy.named_modules()
        if isinstance(module, nn.Linear) and module.weight.requires_grad
    ]
    chosen = [name for name in learning if lora.targets is None or name.endswith(tuple(_ends(lora.targets)))]
    if not chosen:
        names = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in learning}))
        raise ConfigError.of("train.lora.targets", lora.targets, f"allowed: ends of layers' names ({names})")
    settings = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=chosen, lora_dropout=0.0, init_lora_weights=False
    )
    with torch.random.fork_rng(devices=[]):  # peft draws from the global generator; these draws are replaced
        inject_adapter_in_model(settings, policy)
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(".lora_" in name)
        if ".lora_A." in name:
            normal = torch.randn(parameter.shape, generator=seeds.generator("lora", seed, name))
            parameter.data.copy_(normal / parameter.shape[1] ** 0.5)
        elif ".lora_B." in name:
            parameter.data.zero_()


@contextmanager
def adapters_off(policy: Policy) -> Iterator[Policy]:
    """Make the policy compute as the base while the context is open."""
    layers = [layer for _, layer in _adapted(policy)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield policy
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merged_state(policy: Policy) -> dict[str, Tensor]:
    """Return the state dict under the base policy's names, adapters added to their layers' weights."""
    merged = {
        name.replace(".base_layer.", "."): value
        for name, value in policy.state_dict().items()
        if ".lora_" not in name
    }
    for name, layer in _adapted(policy):
        merged[f"{name}.weight"] = merged[f"{name}.weight"] + layer.get_delta_weight(_ADAPTER).detach()
    return merged


def _adapted(policy: Policy) -> list[tuple[str, Any]]:
    """Return the layers with an adapter, by name: peft's, whose type is not known here without peft."""
    return [(n, module) for n, module in policy.named_modules() if hasattr(module, "get_delta_weight")]


def _ends(targets: list[str]) -> list[str]:
    return [f".{target}" for target in targets]
