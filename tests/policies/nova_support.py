"""NOVA checkpoints for tests: the committed golden transformers with random companions."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from margrpo.config import Objective, Sampler
from margrpo.golden.companions import complete_folder
from margrpo.objective import Totals, step_terms
from margrpo.policies.nova import NovaPolicy, read_nova
from margrpo.rollout import Recording, Rollout, generate
from margrpo.trajectories import Rows, build_rows, draw_fresh

TEXTS = ["a red cube", "two dogs", "a blue ball", "a bird left of a tree"]
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


def folder(name: str = "abs", ddpm: bool = False) -> Path:
    """Return a complete checkpoint folder (made once per test session)."""
    made = Path(os.environ["MARGRPO_TEST_FOLDER"]) / f"{name}-{'ddpm' if ddpm else 'flow'}" / name
    if made.is_dir():
        return made
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
    policy = NovaPolicy(config, {"_class_name": "FlowMatchEulerDiscreteScheduler"})
    policy.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    for value in policy.state_dict().values():
        value.copy_(0.2 * torch.randn(value.shape, generator=generator))
    policy.configure(Sampler(denoising_steps=4))
    return policy.eval()


def largest(difference: Tensor) -> float:
    """Return the largest absolute value."""
    return float(difference.detach().abs().max())


def record(
    policy: NovaPolicy, switches: Objective, ar_steps: Sequence[int] = (0, 2, 3), images: int = 4
) -> tuple[Rollout, list[Rows]]:
    denoising = tuple(policy.transition.scored)
    recording = Recording(frozenset(ar_steps), denoising, switches.token_mask == "unknown", False)
    prompts = (TEXTS * images)[:images]
    rollout = generate(
        policy, prompts, list(range(images)), 4, switches.guidance.rollout, recording=recording
    )
    fresh = draw_fresh(policy, rollout, switches, denoising)
    return rollout, [build_rows(policy, rollout, step, switches, fresh) for step in rollout.steps]


def score(
    policy: NovaPolicy,
    reference: NovaPolicy,
    switches: Objective,
    rollout: Rollout,
    rows: list[Rows],
    advantage: Tensor,
    old: list[Tensor] | None = None,
) -> tuple[Tensor, list[Any]]:
    """Return the loss over all recorded AR steps and the terms of each."""
    totals = Totals(sum(s.index.numel() for s in rollout.steps), sum(s.index.numel() for s in rollout.steps))
    terms = []
    for i, (step, part) in enumerate(zip(rollout.steps, rows, strict=True)):
        keep = torch.ones_like(step.index, dtype=torch.bool)
        fixed = None if old is None else old[i]
        terms.append(
            step_terms(policy, reference, switches, rollout, step, part, keep, advantage, totals, fixed)
        )
    return torch.stack([term.loss for term in terms]).sum(), terms
