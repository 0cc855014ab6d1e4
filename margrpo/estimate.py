"""Memory and work of a run from its params and the checkpoint's config files alone; no weights are read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from margrpo.config import Config, Objective, Train
from margrpo.policies.base import Policy

GIB = 2**30
# Sustained TFLOP/s of matrix products, by device and precision: guesses to be replaced by one's own (--tflops).
TFLOPS = {("cpu", "float32"): 0.03, ("cpu", "bf16"): 0.03, ("cuda", "float32"): 30.0, ("cuda", "bf16"): 200.0}


@dataclass(frozen=True)
class Work:
    """Passes of one update over all images.

    Attributes:
        backbone, backbone_scored: passes of one image without gradient (rollout, reference) and with.
        head, head_scored: rows of the head without and with gradient; expectations where steps are drawn.
        largest_step: rows with gradient of one image at the AR step that has most.
    """

    backbone: float
    backbone_scored: float
    head: float
    head_scored: float
    largest_step: float


@dataclass(frozen=True)
class Estimate:
    """What a run needs.

    Attributes:
        parameters: by part. learning: trained ones. memory: bytes per process, by purpose.
        work: of an update. tflop: of an update. seconds: of an update, all processes together at `tflops` each.
    """

    parameters: dict[str, int]
    learning: int
    memory: dict[str, float]
    work: Work
    tflop: float
    seconds: float


def estimate(config: Config, variant: str, policy: Policy, processes: int, tflops: float | None) -> Estimate:
    """Return the estimate for a policy whose weights may be on the meta device.

    Activations count inputs and outputs of linear layers; work counts linear layers alone (attention adds about
    length / (6 width) to a backbone pass). Decoding, rewards and validation come on top.
    """
    train, objective = config.train, config.objective_of(variant)
    policy.configure(config.sampler)
    parts = {"backbone": list(policy.backbone_parameters()), "head": list(policy.head_parameters())}
    counted = {name: sum(p.numel() for p in values) for name, values in parts.items()}
    everything = sum(value.numel() for value in policy.state_dict().values())
    counted["frozen"] = everything - sum(counted.values())
    kinds = {"backbone": ["backbone"], "all": ["backbone", "head"], "head": ["head"]}[objective.trainable]
    learning = sum(counted[kind] for kind in kinds)
    if train.lora is not None:
        learning = _lora_parameters(policy, {id(p) for kind in kinds for p in parts[kind]}, train)
    work = count_work(config, objective, policy)
    trunk, head = _layers(policy)
    flop_backbone = 2 * policy.rows * sum(layer.in_features * layer.out_features for layer in trunk)
    flop_head = 2 * sum(layer.in_features * layer.out_features for layer in head)
    backward = 4 if train.gradient_checkpointing else 3  # forward, twice that backward; forward once more
    tflop = (
        flop_backbone * (work.backbone + backward * work.backbone_scored)
        + flop_head * (work.head + backward * work.head_scored)
    ) / 1e12
    copy = 0 if train.lora is not None or train.offload_reference else everything
    memory = {
        "weights": 4.0 * (everything + (learning if train.lora is not None else 0)),
        "reference": 4.0 * copy,
        "gradients": 4.0 * learning,
        "AdamW moments": 8.0 * learning,
        "activations": _activations(policy, train, work, processes),
        "recorded rollouts": _recorded(config, policy, work, processes),
    }
    if train.ema is not None:
        memory["average (host)"] = 4.0 * learning
    rate = tflops or TFLOPS[train.device, train.precision]
    return Estimate(counted, learning, memory, work, tflop, tflop / rate / processes)


def count_work(config: Config, objective: Objective, policy: Policy) -> Work:
    """Return the passes of one update: see `rollout.generate`, `trajectories` and `objective.step_terms`."""
    train, source = config.train, objective.trajectory_source
    counts = policy.ar_schedule(config.sampler.ar_steps)
    steps, scored, chosen = policy.transition.steps, train.denoising_steps, train.ar_steps
    unknown = [sum(counts[k:]) for k in range(len(counts))]
    masked = unknown if objective.token_mask == "unknown" else counts
    share, samples = objective.uncertain_fraction, objective.trajectories
    share = round(share * policy.tokens) / policy.tokens
    rolled = scoring = reference = fresh = largest = 0.0
    odds = chosen / len(counts)
    for k, (here, tokens) in enumerate(zip(counts, masked, strict=True)):
        full = odds
        if objective.consistency is not None and k + 1 < len(
            counts
        ):  # the step before a recorded one as well
            full = 1 - math.comb(len(counts) - 2, chosen) / math.comb(len(counts), chosen)
        rolled += steps * (full * tokens + (1 - full) * here if masked is unknown else here)
        pairs = tokens * scored
        own = {"rollout": 1.0, "bridged": 1 - share, "resampled": 1.0}[source]
        if source == "resampled" and not objective.include_rollout and objective.beta == 0:
            own = 1 - share
        extra = 0.0 if source == "rollout" else share * samples
        scoring += odds * pairs * (own + extra)
        largest = max(largest, pairs * (own + extra))
        if objective.beta > 0:
            reference += odds * pairs * (own + (extra if source == "bridged" else 0.0))
        if source == "resampled" and objective.resample_condition != "commit":
            fresh += odds * share * tokens * samples * steps
    if share < 1 or objective.resample_condition == "commit":
        fresh += samples * policy.tokens * steps
    guided = 2 if objective.guidance.rollout != 1.0 else 1
    scored_guided = 2 if objective.guidance.logprob == "guided" else 1
    images = train.prompts_per_update * train.images_per_prompt
    passes = chosen * scored_guided * (1 + (objective.beta > 0))
    return Work(
        backbone=images * (len(counts) * guided + chosen * scored_guided * (objective.beta > 0)),
        backbone_scored=images * (passes - chosen * scored_guided * (objective.beta > 0)),
        head=images * (rolled * guided + (fresh + reference) * scored_guided),
        head_scored=images * scoring * scored_guided,
        largest_step=largest * scored_guided,
    )


def describe(found: Estimate) -> str:
    """Return the estimate as text."""
    lines = [f"{name:<20}{count / 1e6:>12,.2f} M parameters" for name, count in found.parameters.items()]
    lines.append(f"{'learning':<20}{found.learning / 1e6:>12,.2f} M parameters")
    lines += [f"{name:<20}{size / GIB:>12,.3f} GiB" for name, size in found.memory.items()]
    lines.append(f"{'memory per process':<20}{sum(found.memory.values()) / GIB:>12,.3f} GiB")
    work = found.work
    lines.append(
        f"{'backbone passes':<20}{work.backbone + work.backbone_scored:>12,.0f} per update, of one image"
    )
    lines.append(f"{'head rows':<20}{work.head + work.head_scored:>12,.0f} per update")
    lines.append(f"{'work':<20}{found.tflop:>12,.3f} TFLOP per update")
    lines.append(f"{'time':<20}{found.seconds:>12,.1f} s per update, without decoding, rewards, validation")
    return "\n".join(lines)


def _layers(policy: Policy) -> tuple[list[nn.Linear], list[nn.Linear]]:
    """Return the linear layers that a backbone pass and a head row go through."""
    of_head = {id(parameter) for parameter in policy.head_parameters()}
    found = [
        module
        for name, module in policy.named_modules()
        if isinstance(module, nn.Linear) and not name.startswith("vae.")
    ]
    trunk = [layer for layer in found if id(layer.weight) not in of_head]
    return trunk, [layer for layer in found if id(layer.weight) in of_head]


def _activations(policy: Policy, train: Train, work: Work, processes: int) -> float:
    """Return the bytes kept for the backward pass of one AR step of a micro-batch."""
    trunk, head = (sum(layer.in_features + layer.out_features for layer in part) for part in _layers(policy))
    if train.gradient_checkpointing:
        blocks = [[_width(b) for b in child] for child in _lists(policy)]
        kept = sum(first for part in blocks for first, _ in part)
        inside = sum(whole for part in blocks for _, whole in part)
        ratio = (kept + max((whole for part in blocks for _, whole in part), default=0)) / max(inside, 1)
    else:
        ratio = 1.0
    images = train.micro_batch or train.prompts_per_update * train.images_per_prompt / processes
    size = 2 if train.precision == "bf16" else 4
    return size * images * ratio * (policy.rows * trunk + work.largest_step * head)


def _width(block: nn.Module) -> tuple[int, int]:
    """Return the channels of a block's input, and of all inputs and outputs of its linear layers."""
    layers = [module for module in block.modules() if isinstance(module, nn.Linear)]
    return layers[0].in_features if layers else 0, sum(n.in_features + n.out_features for n in layers)


def _lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    """Yield the lists of repeated blocks that `models.recompute_blocks` finds, but for the autoencoder's."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            yield child
        elif name != "vae":
            yield from _lists(child)


def _recorded(config: Config, policy: Policy, work: Work, processes: int) -> float:
    """Return the bytes of recorded states, transitions to score and conditions of all images of a process."""
    train = config.train
    images = train.prompts_per_update * train.images_per_prompt / processes
    rows = work.head_scored / (train.prompts_per_update * train.images_per_prompt)
    width = max((layer.in_features for layer in _layers(policy)[1]), default=0)
    conditions = (train.ar_steps + 1) * policy.tokens * width
    return 4 * images * (rows * 6 * policy.channels + conditions)


def _lora_parameters(policy: Policy, learning: set[int], train: Train) -> int:
    assert train.lora is not None
    targets = train.lora.targets
    return sum(
        train.lora.rank * (module.in_features + module.out_features)
        for name, module in policy.named_modules()
        if isinstance(module, nn.Linear)
        and id(module.weight) in learning
        and (targets is None or name.endswith(tuple(f".{target}" for target in targets)))
    )
