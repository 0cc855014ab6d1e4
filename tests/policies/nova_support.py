"""NOVA checkpoints for tests: the committed golden transformers with random companions."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from margrpo.config import Sampler
from margrpo.golden.companions import complete_folder
from margrpo.policies.nova import NovaPolicy, read_nova

GOLDEN = Path(__file__).parents[1] / "golden" / "nova"
DDPM = {
    "_class_name": "DDPMScheduler",
    "num_train_timesteps": 1000,
    "beta_schedule": "squaredcos_cap_v2",
    "clip_sample": False,
    "prediction_type": "epsilon",
    "variance_type": "fixed_small",
    "timestep_spacing": "leading",
    "steps_offset": 0,
}


@functools.cache
def folder(name: str = "abs", ddpm: bool = False) -> Path:
    """Return a complete checkpoint folder (made once per test session)."""
    made = Path(tempfile.mkdtemp(prefix="margrpo-nova-")) / name
    complete_folder(GOLDEN / name, made)
    if ddpm:
        (made / "scheduler" / "scheduler_config.json").write_text(json.dumps(DDPM))
    return made


def load(name: str = "abs", ddpm: bool = False, **sampler: Any) -> NovaPolicy:
    """Return a policy ready to sample."""
    policy = read_nova(folder(name, ddpm)).eval()
    policy.configure(Sampler(**{"denoising_steps": 5, **sampler}))
    return policy


def random_policy(config: dict[str, Any], seed: int = 0) -> NovaPolicy:
    """Return a policy of another size with normal weights of std 0.2."""
    policy = NovaPolicy(config, {"_class_name": "FlowMatchEulerDiscreteScheduler"}, Path("nowhere"))
    policy.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    for value in policy.state_dict().values():
        value.copy_(0.2 * torch.randn(value.shape, generator=generator))
    policy.configure(Sampler(denoising_steps=4))
    return policy.eval()


def largest(difference: Tensor) -> float:
    """Return the largest absolute value."""
    return float(difference.detach().abs().max())
