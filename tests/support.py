"""Small real objects that several tests share."""

from __future__ import annotations

from typing import Any

import torch

from margrpo.benchmarks.scenes import load_split
from margrpo.config import Architecture, Config, Objective
from margrpo.params import build_config, overlay
from margrpo.policies.tiny import TinyPolicy
from margrpo.prompts import Prompt

RUN = {"study": {"runs": {"frozen_head-0": {"variant": "frozen_head", "seed": 0}}}}
VARIANTS = {
    "grpo": {"trainable": "all"},
    "frozen_head": {},
    "frozen_head_committed": {"token_mask": "committed"},
    "mte": {
        "trajectory_source": "resampled",
        "trajectories": 3,
        "resample_condition": "current",
        "include_rollout": True,
    },
    "released": {
        "trajectory_source": "resampled",
        "trajectories": 3,
        "uncertain_fraction": 0.3,
        "resample_condition": "commit",
        "include_rollout": False,
        "consistency": 0.0,
    },
    "bridged": {
        "token_mask": "committed",
        "trajectory_source": "bridged",
        "trajectories": 4,
        "rao_blackwell": True,
    },
}


def make_policy(seed: int = 0, scale: float = 0.3) -> TinyPolicy:
    """Return a small policy whose head is not zero, so that z, x and t all matter."""
    policy = TinyPolicy(
        Architecture(width=32, depth=1, heads=2, head_width=24, head_depth=1, channels=8), seed=seed
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.head_parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return policy.eval()


def make_config(**sections: Any) -> Config:
    """Return a valid configuration with small sizes and `sections` on top."""
    base = {
        **RUN,
        "variants": VARIANTS,
        "train": {
            "updates": 4,
            "prompts_per_update": 2,
            "images_per_prompt": 3,
            "ar_steps": 2,
            "denoising_steps": 3,
            "validation_every": 2,
            "validation_images": 4,
            "checkpoint_every": 1,
        },
    }
    return build_config(overlay(base, sections))


def objective(**switches: Any) -> Objective:
    """Return an objective with these switches."""
    return Objective.model_validate(switches)


def scene_prompts(split: str, count: int) -> list[Prompt]:
    """Return the first prompts of a split."""
    return [Prompt(p.text, p.category, p.spec, p.seen) for p in load_split(split)[:count]]
