"""What the estimator sees: at every AR step the uncertainty of each open token, and whether consistency keeps it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from margrpo.base import released_folder
from margrpo.checkpoints import load_policy, load_state, save_state
from margrpo.config import Config, Objective
from margrpo.grids import spread
from margrpo.objective import approach, consistency_mask
from margrpo.policies.base import Policy
from margrpo.prompts import Prompt
from margrpo.rollout import Recording, generate
from margrpo.seeds import derive
from margrpo.trajectories import most_uncertain, resample, token_uncertainty

_STEPS = 6  # AR steps that are mapped: what a figure can show


@dataclass(frozen=True)
class TokenMaps:
    """B images of L tokens at M AR steps.

    Attributes:
        images: [B, 3, H, W] in [0, 1].
        steps: int64 [M], the AR steps, ascending; always with the first and the last.
        committed: int64 [B, L], the AR step that writes a token.
        uncertainty: [M, B, L], std over the S samples under the step's z, mean over channels; NaN once known.
        approach: [M, B, L], cos(x_k, final) - cos(x_{k-1}, final); NaN at the first AR step and once known.
        kept: bool [M, B, L], tokens of the mask that enter the policy term.
        chosen: bool [B, L], the uncertain fraction under the z that commits a token.
    """

    images: Tensor
    steps: Tensor
    committed: Tensor
    uncertainty: Tensor
    approach: Tensor
    kept: Tensor
    chosen: Tensor


@torch.no_grad()
def token_maps(
    policy: Policy, prompts: Sequence[str], seeds: Sequence[int], ar_steps: int, objective: Objective
) -> TokenMaps:
    """Return the maps of one stochastic rollout per prompt; the same for the same seeds.

    Args:
        policy: configured. prompts, seeds: one each per image. ar_steps: K.
        objective: with token mask `unknown`; its trajectories S, uncertain_fraction, consistency and guidance count.
    """
    available = len(policy.ar_schedule(ar_steps))
    shown = torch.linspace(0, available - 1, min(_STEPS, available)).round().long()
    # The last open step of every token is its commit step: all steps are rolled out, the shown ones kept.
    recording = Recording(range(available), (), unknown=True, consistency=True)
    rollout = generate(policy, prompts, seeds, ar_steps, objective.guidance.rollout, recording=recording)
    images, length, _ = rollout.tokens.shape
    shape = (available, images, length)
    uncertainty, nearer = torch.full(shape, math.nan), torch.full(shape, math.nan)
    kept = torch.zeros(shape, dtype=torch.bool)
    committed = torch.zeros(images, length, dtype=torch.int64)
    for step in rollout.steps:
        index = step.index.cpu()
        null_z = step.null_z if objective.guidance.logprob == "guided" else None
        fresh = resample(policy, rollout, objective, "fresh", step.z, null_z, step.index, ()).final
        score = token_uncertainty(fresh.unflatten(1, (objective.trajectories, -1))).cpu()
        uncertainty[step.k].scatter_(1, index, score)
        if step.k > 0:
            nearer[step.k].scatter_(1, index, approach(step, rollout.tokens).cpu())
        mask = consistency_mask(step, rollout.tokens, objective.consistency)
        kept[step.k].scatter_(1, index, mask.cpu())
        committed.scatter_(1, index[:, : step.committed], step.k)
    final_score = uncertainty.gather(0, committed[None])[0]
    return TokenMaps(
        images=policy.decode(rollout.tokens).cpu(),
        steps=shown,
        committed=committed,
        uncertainty=uncertainty[shown],
        approach=nearer[shown],
        kept=kept[shown],
        chosen=most_uncertain(final_score, objective.uncertain_fraction),
    )


def map_base(
    config: Config, base: Path, prompts: Sequence[Prompt]
) -> tuple[TokenMaps | None, dict[str, Any]]:
    """Return the maps of `diagnose.images` prompts at the base policy, and what they are of.

    None where no image is asked for, or no variant of the params both chooses uncertain tokens and filters.
    """
    variant = mapped_variant({name: config.objective_of(name) for name in config.variants})
    if variant is None or config.diagnose.images == 0:
        return None, {}
    objective = config.objective_of(variant)
    picked = spread([(prompt.category, prompt.seen) for prompt in prompts], config.diagnose.images)
    texts = [prompts[index].text for index in picked]
    seeds = [derive("maps", config.diagnose.seed, text) for text in texts]
    policy = load_policy(base).eval().to(config.train.device)
    policy.locate(lambda: released_folder(config))
    policy.configure(config.sampler)
    facts = {
        "variant": variant,
        "prompts": texts,
        "trajectories": objective.trajectories,
        "uncertain_fraction": objective.uncertain_fraction,
        "consistency": objective.consistency,
        "ar_steps": len(policy.ar_schedule(config.sampler.ar_steps)),
    }
    return token_maps(policy, texts, seeds, config.sampler.ar_steps, objective), facts


def save_maps(path: Path, maps: TokenMaps | None, facts: dict[str, Any]) -> None:
    """Write maps (None: there are none) with JSON facts about them; images become 8 bit."""
    tensors: dict[str, Tensor] = {}
    if maps is not None:
        tensors = {field.name: getattr(maps, field.name) for field in fields(TokenMaps)}
        tensors["images"] = (maps.images.float().clamp(0, 1) * 255).round().byte()
    save_state(path, tensors, facts)


def load_maps(path: Path) -> tuple[TokenMaps | None, dict[str, Any]]:
    """Return what `save_maps` wrote; MargrpoError for any other file."""
    tensors, facts = load_state(path)
    if not tensors:
        return None, facts
    return TokenMaps(**{**tensors, "images": tensors["images"].float() / 255}), facts


def mapped_variant(objectives: Mapping[str, Objective]) -> str | None:
    """Return the first variant that chooses uncertain tokens and filters by consistency; None if there is none."""
    for name, objective in objectives.items():
        if objective.uncertain_fraction < 1.0 and objective.consistency is not None:
            return name
    return None
