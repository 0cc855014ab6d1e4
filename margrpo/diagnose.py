"""Gradient noise of the variants at one policy: what averaging trajectories does to signal and variance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from margrpo.config import Config
from margrpo.metrics.gradients import projection, signal_to_noise
from margrpo.prompts import Prompt
from margrpo.updater import Updater

REFERENCE = "frozen_head_committed"
"""The causal estimate: the tokens that were written, the trajectories that wrote them."""


@dataclass(frozen=True)
class Noise:
    """Gradient statistics of a variant over m independent updates at fixed parameters.

    Attributes:
        mean_norm: norm of the mean gradient. trace: trace of the covariance of one gradient.
        signal_to_noise: |mean|^2 / (trace / m); about 1 without any signal.
        cosine: mean cosine between two of the gradients.
        projection: coefficient of the mean on the reference's mean from other updates; 1 = the same signal.
    """

    variant: str
    mean_norm: float
    trace: float
    signal_to_noise: float
    cosine: float
    projection: float


def diagnose(
    config: Config,
    variants: Sequence[str],
    seed: int,
    policy: Path,
    prompts: Mapping[str, list[Prompt]],
    updates: int = 32,
    report: Callable[[str], None] = lambda text: None,
) -> pd.DataFrame:
    """Return one row of `Noise` per variant for the backbone gradient at the policy in a checkpoint.

    Without variants there is nothing to compute, and the table has its columns alone.

    Args:
        updates: m, gradients per variant; all variants see the same prompts and noise. The reference's mean
            comes from twice as many other updates, so that shared noise cannot raise the projection.

    Raises:
        ConfigError: an unknown variant, or params without the variant frozen_head_committed.
    """
    if not variants:
        return pd.DataFrame(columns=[field.name for field in fields(Noise)])
    config.objective_of(REFERENCE)
    report(f"reference {REFERENCE}")
    others = range(updates + 1, 3 * updates + 1)
    reference = _gradients(config, REFERENCE, seed, policy, prompts, others).mean(0)
    rows = []
    for variant in variants:
        report(variant)
        gradients = _gradients(config, variant, seed, policy, prompts, range(1, updates + 1))
        noise = signal_to_noise(gradients)
        rows.append(
            Noise(
                variant,
                noise.mean_norm,
                noise.trace_covariance,
                noise.snr,
                noise.cosine_mean,
                projection(gradients, reference),
            )
        )
    return pd.DataFrame([asdict(row) for row in rows])


def _gradients(
    config: Config,
    variant: str,
    seed: int,
    policy: Path,
    prompts: Mapping[str, list[Prompt]],
    updates: range,
) -> Tensor:
    """Return the backbone gradients [m, p] of the loss; no step is taken, so that all are at one policy."""
    updater = Updater(config, variant, seed, policy, prompts["train"], prompts["validation"])
    found = []
    for update in updates:
        updater.accumulate(updater.collect(update)[1])
        parts = [
            torch.zeros(parameter.numel()) if parameter.grad is None else parameter.grad.flatten()
            for parameter in updater.policy.backbone_parameters()
        ]
        found.append(torch.cat(parts))
    return torch.stack(found)
