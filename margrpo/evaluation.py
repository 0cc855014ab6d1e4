"""Test of trained policies on the held-out test prompts; the only module that reads the test split."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from margrpo import noise, rewards
from margrpo.base import released_folder
from margrpo.benchmarks import scenes, suite
from margrpo.checkpoints import load_policy, write_atomic
from margrpo.config import Config
from margrpo.grids import grid_png, spread
from margrpo.metrics.diversity import high_frequency_energy, pairwise_distance, vendi_images
from margrpo.policies.base import Policy
from margrpo.prompts import Prompt, load_splits
from margrpo.rollout import RecordedStep, Recording, generate, guided_head, take
from margrpo.seeds import derive


@dataclass(frozen=True)
class Scored:
    """Images of P prompts under one sampler.

    Attributes:
        images: [P, n, 3, H, W] in [0, 1].
        reward, strict: [P, n]; the training mixture, and the strict rule of the benchmark (0 or 1; NaN for
            prompts that are not of the embedded world).
    """

    images: Tensor
    reward: Tensor
    strict: Tensor


def evaluate(
    config: Config,
    policies: Mapping[str, Path],
    base: Path,
    out: Path,
    prompts: Sequence[Prompt] | None = None,
    progress: bool = True,
    images: Path | None = None,
) -> None:
    """Evaluate checkpoints on the test prompts and write metrics.json, prompts.csv, benchmarks.csv and grid.png.

    `last` gets every metric, the grid, the rows of prompts.csv and the benchmarks; others get the rewards of SDE
    samples. Equal weights are evaluated once.

    Args:
        policies: label ("last", "best", "milestone") -> checkpoint; `last` is needed.
        base: the base policy, for the KL on states of its own SDE rollouts.
        out: folder to write.
        prompts: the test prompts; None reads those of the section `prompts`.
        images: folder for the images of the benchmarks, default `out`/images. What an interrupted evaluation
            left there is used; what is scored is removed unless the benchmark keeps its images.
    """
    suites = suite.prepare_all(config)
    if prompts is None:
        prompts = load_splits(config.prompts)["test"]
    prompts = choose(prompts, config.evaluation.prompts)
    samplers = config.evaluation.samplers
    primary = "sde" if "sde" in samplers else samplers[0]
    wanted = {label: list(samplers) if label == "last" else [primary] for label in policies}
    loaded = {label: load(path, config) for label, path in policies.items()}
    results: dict[str, dict[str, Scored]] = {}
    live = progress and sys.stderr.isatty()
    with tqdm(total=sum(map(len, wanted.values())), desc=out.name, disable=not live) as bar:
        for label, policy in sorted(loaded.items(), key=lambda item: item[0] != "last"):
            twin = next((other for other in results if _same_weights(loaded[other], policy)), None)
            results[label] = {
                name: results[twin][name] if twin else sample(policy, config, prompts, name == "sde")
                for name in wanted[label]
            }
            bar.update(len(wanted[label]))
    metrics: dict[str, dict[str, Any]] = {
        label: {name: summarize(prompts, scored, label == "last") for name, scored in found.items()}
        for label, found in results.items()
    }
    states = choose(prompts, config.evaluation.kl_prompts)
    metrics["last"]["kl_to_base"] = kl_to_base(loaded["last"], load(base, config), config, states)
    kept = images or out / "images"
    table = suite.run_all(suites, config, loaded["last"], policies["last"], kept, progress)
    if suites:
        metrics["benchmarks"] = suite.summarize(table)
    last = results["last"]
    rows = spread(_groups(prompts), config.evaluation.grid_prompts)
    shown = last[primary].images[rows]
    write_atomic(out / "grid.png", grid_png([prompts[row].text for row in rows], shown))
    write_atomic(out / "prompts.csv", prompt_rows(prompts, last).to_csv(index=False).encode())
    write_atomic(out / "benchmarks.csv", table.to_csv(index=False).encode())
    write_atomic(out / "metrics.json", (json.dumps(metrics, indent=2, allow_nan=False) + "\n").encode())


def load(path: Path, config: Config) -> Policy:
    """Return a policy that is ready to sample."""
    policy = load_policy(path).eval().to(config.evaluation.device)
    policy.locate(lambda: released_folder(config))
    policy.configure(config.sampler)
    return policy


def choose(prompts: Sequence[Prompt], count: int | None) -> list[Prompt]:
    """Return `count` prompts (None: all) taken from categories, seen and unseen, in turn; order kept."""
    return list(prompts) if count is None else [prompts[index] for index in spread(_groups(prompts), count)]


@torch.no_grad()
def draw(
    policy: Policy, config: Config, texts: Sequence[str], seeds: Sequence[int], stochastic: bool
) -> Tensor:
    """Return an image [3, H, W] in [0, 1] per text and seed, drawn as the sections sampler and evaluation say."""
    steps, options = config.sampler.ar_steps, config.evaluation
    if not options.tuned:
        return policy.decode(generate(policy, texts, seeds, steps, options.guidance, stochastic).tokens)
    device, shape = next(policy.parameters()).device, (policy.tokens, policy.channels)
    count = len(policy.ar_schedule(steps))
    initial = torch.stack([noise.normal(seeds, "initial", k, shape) for k in range(count)]).to(device)
    order = noise.orders(seeds, policy.tokens).to(device)
    scales = options.guidance, options.guidance_renorm, options.guidance_trunc
    return policy.decode(policy.sample_tuned(texts, order, initial, *scales))


@torch.no_grad()
def sample(policy: Policy, config: Config, prompts: Sequence[Prompt], stochastic: bool) -> Scored:
    """Return `evaluation.images_per_prompt` scored images of every prompt.

    The noise of an image depends on the text of its prompt and its index alone: the same for every policy,
    batch size and order of prompts.
    """
    count = config.evaluation.images_per_prompt
    repeated = [prompt for prompt in prompts for _ in range(count)]
    seeds = [derive("evaluation", prompt.text, index) for prompt in prompts for index in range(count)]
    images, totals, stricts = [], [], []
    size = config.evaluation.batch_size
    for start in range(0, len(seeds), size):
        batch = repeated[start : start + size]
        texts = [prompt.text for prompt in batch]
        drawn = draw(policy, config, texts, seeds[start : start + size], stochastic).cpu()
        total, strict = _score(config, drawn, batch)
        images.append(drawn)
        totals.append(total)
        stricts.append(strict)
    shape = (len(prompts), count)
    return Scored(
        torch.cat(images).unflatten(0, shape),
        torch.cat(totals).unflatten(0, shape),
        torch.cat(stricts).unflatten(0, shape),
    )


def summarize(prompts: Sequence[Prompt], scored: Scored, full: bool) -> dict[str, float]:
    """Return means over prompts: reward, also by seen/unseen and category; with `full` everything else.

    Groups without a prompt are left out. Diversity and Vendi are of the images of one prompt. Images without a
    reward are in no mean; where there are some, `failed` is their number.
    """
    by_prompt = _prompt_means(scored.reward)
    groups = {"reward": [True] * len(prompts)}
    groups["reward_seen"] = [prompt.seen for prompt in prompts]
    groups["reward_unseen"] = [not prompt.seen for prompt in prompts]
    for category in dict.fromkeys(prompt.category for prompt in prompts):
        groups[f"reward_{category}"] = [prompt.category == category for prompt in prompts]
    known = ~by_prompt.isnan()
    chosen = {name: torch.tensor(mask) & known for name, mask in groups.items()}
    result = {name: float(by_prompt[mask].mean()) for name, mask in chosen.items() if mask.any()}
    if full:
        if not scored.strict.isnan().any():
            result["strict"] = float(scored.strict.double().mean())
        result["diversity"] = float(_diversity(scored).mean())
        result["vendi"] = sum(vendi_images(images) for images in scored.images) / len(prompts)
        result["high_frequency"] = float(high_frequency_energy(scored.images.flatten(0, 1)).mean())
    result["n_images"] = float(scored.reward.numel())
    failed = int(scored.reward.isnan().sum())
    if failed:
        result["failed"] = float(failed)
    return result


def prompt_rows(prompts: Sequence[Prompt], last: Mapping[str, Scored]) -> pd.DataFrame:
    """Return a row per sampler and prompt of the last checkpoint; reward and strict are means over images.

    Images without a reward do not count; the reward is NaN if no image of the prompt has one.
    """
    frames = [
        pd.DataFrame(
            {
                "checkpoint": "last",
                "sampler": name,
                "prompt": [prompt.text for prompt in prompts],
                "category": [prompt.category for prompt in prompts],
                "seen": [prompt.seen for prompt in prompts],
                "reward": _prompt_means(scored.reward).numpy(),
                "strict": scored.strict.double().mean(1).numpy(),
                "diversity": _diversity(scored).numpy(),
            }
        )
        for name, scored in last.items()
    ]
    return pd.concat(frames)


@torch.no_grad()
def kl_to_base(policy: Policy, base: Policy, config: Config, prompts: Sequence[Prompt]) -> float:
    """Return KL(policy || base) of a denoising transition, summed over channels, mean per (token, step).

    The states are those of SDE rollouts of the base, one per prompt from fixed seeds, so that policies
    compare on common ground: at every AR step the tokens committed there, at every denoising step that has a
    density. The KL between the two Gaussians is exact.
    """
    count = len(base.ar_schedule(config.sampler.ar_steps))
    rollout = generate(
        base,
        [prompt.text for prompt in prompts],
        [derive("evaluation/kl", prompt.text) for prompt in prompts],
        config.sampler.ar_steps,
        config.evaluation.guidance,
        recording=Recording(range(count), tuple(base.transition.scored)),
    )
    texts = [prompt.text for prompt in prompts]
    condition = policy.prefill(policy.encode(texts))
    null = None if rollout.null is None else policy.prefill(policy.encode([None] * len(texts)))
    total, number = 0.0, 0
    for step in rollout.steps:
        z = take(policy.backbone(step.tokens, step.known, condition), step.index)
        null_z = None if null is None else take(policy.backbone(step.tokens, step.known, null), step.index)
        after = policy.tokens - int(step.known[0].sum()) - step.committed
        scale = policy.guidance_at(config.evaluation.guidance, after)
        divergence = _divergence(policy, base, step, z, null_z, scale)
        total += float(divergence.double().sum())
        number += divergence.numel()
    return total / number


def _divergence(
    policy: Policy, base: Policy, step: RecordedStep, z: Tensor, null_z: Tensor | None, guidance: float
) -> Tensor:
    """Return the KL [t, B n] of the recorded transitions of one AR step."""
    states = step.trajectories.states
    assert states is not None  # every step was recorded
    rows = []
    for index, x in zip(step.trajectories.steps, states.flatten(1, 2), strict=True):
        ours = guided_head(policy, x, index, z.flatten(0, 1), _rows(null_z), guidance)
        theirs = guided_head(base, x, index, step.z.flatten(0, 1), _rows(step.null_z), guidance)
        kernel = policy.transition.kernel(index, x, ours)
        rows.append(kernel.kl(base.transition.kernel(index, x, theirs)).sum(-1))
    return torch.stack(rows)


def _rows(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.flatten(0, 1)


def _score(config: Config, images: Tensor, prompts: Sequence[Prompt]) -> tuple[Tensor, Tensor]:
    """Return the training mixture and the strict rule [B]; the detector runs once for both."""
    specs = [prompt.spec for prompt in prompts]
    if config.prompts.source != "scenes":
        texts, reward = [prompt.text for prompt in prompts], config.reward
        mixed = rewards.score(reward.weights, images, texts, specs, reward.options).total
        return mixed, torch.full_like(mixed, torch.nan)
    rules = scenes.score_all(images, specs)
    weights = dict(config.reward.weights)
    total = weights.pop("scenes", 0.0) * rules["geneval_partial_clean"]
    if weights:
        texts = [prompt.text for prompt in prompts]
        total = total + rewards.score(weights, images, texts, specs, config.reward.options).total
    return total, rules["geneval_strict"]


def _prompt_means(values: Tensor) -> Tensor:
    """Return the means [P] of the known ones among values [P, n]; NaN where there is none."""
    wide = values.double()
    return wide.nanmean(1) if wide.isnan().any() else wide.mean(1)  # the two round differently


def _diversity(scored: Scored) -> Tensor:
    return torch.tensor([pairwise_distance(images) for images in scored.images], dtype=torch.float64)


def _groups(prompts: Sequence[Prompt]) -> list[tuple[str, bool]]:
    return [(prompt.category, prompt.seen) for prompt in prompts]


def _same_weights(a: Policy, b: Policy) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
