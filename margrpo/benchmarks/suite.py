"""A benchmark from params to numbers: its prompts, a policy's images of them in a folder, their scores."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from margrpo import hub, rewards
from margrpo.benchmarks.images import RECORD, generate_images, image_path, read_images
from margrpo.benchmarks.prompt_sets import SETS, digest, load
from margrpo.checkpoints import sha256
from margrpo.config import Config, RewardOptions
from margrpo.errors import ConfigError, MargrpoError
from margrpo.policies.base import Policy
from margrpo.prompts import Prompt
from margrpo.rollout import generate
from margrpo.sources import Benchmark

COLUMNS = ("benchmark", "score", "index", "category", "prompt", "weight", "mean", "images", "failed")
"""Of the table of results: a row per score and prompt, in the order of the benchmark.

weight: of the prompt in the benchmark's total. mean: over the prompt's images that have a score, empty if none
has. images, failed: number of images with and without a score.
"""


@dataclass(frozen=True)
class Suite:
    """A benchmark that is ready to run.

    Attributes:
        prompts: all prompts of the benchmark. chosen: indices of those in use. each: images per prompt.
    """

    name: str
    section: Benchmark
    prompts: tuple[Prompt, ...]
    chosen: tuple[int, ...]
    each: int

    def paths(self, folder: Path) -> list[tuple[int, Path]]:
        """Return prompt index and file of every image."""
        kind = self.section.prompts
        return [
            (index, folder / image_path(kind, self.prompts, index, image, self.each))
            for index in self.chosen
            for image in range(self.each)
        ]


def prepare(name: str, section: Benchmark) -> Suite:
    """Return a benchmark with its prompts, read from its path or fetched from the hub.

    Raises:
        ConfigError: its prompts are not there, not whole or have another hash; an unknown category.
        MargrpoError: the hub cannot give them.
    """
    place, kind = f"evaluation.benchmarks.{name}", SETS[section.prompts]
    if section.path is not None:
        folder = Path(section.path).expanduser()
    else:
        assert section.id is not None
        assert section.revision is not None
        folder = hub.snapshot(f"{place}.id", section.id, section.revision, kind.files, section.repository)
    prompts = load(section.prompts, folder)
    if section.sha256 not in (None, found := digest(prompts)):
        raise ConfigError.of(f"{place}.sha256", section.sha256, f"allowed: the hash of the prompts, {found}")
    known = list(dict.fromkeys(prompt.category for prompt in prompts))
    wanted = section.categories or known
    unknown = [category for category in wanted if category not in known]
    if unknown:
        raise ConfigError.of(f"{place}.categories", unknown[0], f"allowed: {', '.join(known)}")
    chosen = []
    for category in wanted:
        members = [index for index, prompt in enumerate(prompts) if prompt.category == category]
        chosen += members[: section.limit]
    each = section.images_per_prompt or kind.images_per_prompt
    return Suite(name, section, tuple(prompts), tuple(sorted(chosen)), each)


def prepare_all(config: Config) -> list[Suite]:
    """Return the benchmarks of the params, ready to run; ConfigError if prompts or scores are not."""
    suites = [prepare(name, section) for name, section in config.evaluation.benchmarks.items()]
    for one in suites:
        check(config, one.section.scores)
    return suites


def run_all(
    suites: Sequence[Suite], config: Config, policy: Policy, path: Path, images: Path, progress: bool
) -> pd.DataFrame:
    """Return the tables of results of a policy (file `path`) on benchmarks; see `COLUMNS`."""
    tables = []
    live = progress and sys.stderr.isatty()
    policy_sha256 = sha256(path) if suites else ""
    for one in suites:
        folder = images / f"{one.name}-{key(one, config, policy_sha256)}"
        total = 2 * len(one.chosen) * one.each
        with tqdm(total=total, desc=one.name, disable=not live) as bar:
            draw_images(one, policy, config, policy_sha256, folder, bar.update)
            tables.append(score_images(one, config, folder, bar.update))
    for one in suites:  # after the last score: one that fails costs no image
        if not one.section.keep_images:
            shutil.rmtree(images / f"{one.name}-{key(one, config, policy_sha256)}")
    with suppress(OSError):  # not there, or images in it that are kept
        images.rmdir()
    return pd.concat(tables) if tables else pd.DataFrame(columns=list(COLUMNS))


def options_of(config: Config, scores: Sequence[str]) -> dict[str, RewardOptions]:
    """Return the settings of scores: those of the evaluation, else those of the training reward."""
    given = {**config.reward.options, **config.evaluation.options}
    return {name: given[name] for name in scores if name in given}


def check(config: Config, scores: Sequence[str]) -> None:
    """Refuse scores that cannot run; ConfigError as `margrpo.rewards.check`."""
    if scores:
        rewards.check(dict.fromkeys(scores, 1.0), options_of(config, scores))


def settings(suite: Suite, config: Config, policy_sha256: str) -> dict[str, Any]:
    """Return all that a policy's images depend on besides the prompts."""
    section = suite.section
    return {
        "policy_sha256": policy_sha256,
        "sampler": section.sampler,
        **config.sampler.model_dump(),
        "guidance": section.guidance or config.evaluation.guidance,
        "precision": section.precision,
    }


def key(suite: Suite, config: Config, policy_sha256: str) -> str:
    """Return 16 hex digits that depend on all that a policy's images depend on."""
    facts = {**settings(suite, config, policy_sha256), "prompts": digest(suite.prompts), "each": suite.each}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def draw_images(
    suite: Suite,
    policy: Policy,
    config: Config,
    policy_sha256: str,
    folder: Path,
    progress: Callable[[int], object] = lambda drawn: None,
) -> int:
    """Draw what is missing of a policy's images in a folder; see `images.generate_images`."""
    facts = settings(suite, config, policy_sha256)
    device = next(policy.parameters()).device.type

    def draw(texts: Sequence[str], seeds: Sequence[int]) -> Tensor:
        with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=facts["precision"] == "bf16"):
            rollout = generate(
                policy,
                texts,
                seeds,
                config.sampler.ar_steps,
                facts["guidance"],
                stochastic=suite.section.sampler == "sde",
            )
            return policy.decode(rollout.tokens).float()

    kind, size = suite.section.prompts, config.evaluation.batch_size
    return generate_images(kind, suite.prompts, suite.each, draw, folder, facts, size, suite.chosen, progress)


def score_images(
    suite: Suite, config: Config, folder: Path, progress: Callable[[int], object] = lambda scored: None
) -> pd.DataFrame:
    """Return the table of results of the images in a folder.

    An image that a score fails on is counted and left out of the mean; with `on_failure: fail` it stops.

    Raises:
        MargrpoError: an image is missing or unreadable, or a score cannot be set up.
        TrainingError: a score failed and may not, or gives nothing at all.
    """
    names = suite.section.scores
    files = suite.paths(folder) if names else []
    values: dict[tuple[str, int], list[float]] = {}
    size = config.evaluation.batch_size
    for start in range(0, len(files), size):
        part = files[start : start + size]
        pictures = read_images([path for _, path in part])
        for name in names:
            for rows in _alike(pictures, [suite.prompts[index] for index, _ in part], suite, name):
                prompts = [suite.prompts[part[row][0]] for row in rows]
                scores = rewards.score(
                    {name: 1.0},
                    torch.stack([pictures[row] for row in rows]).to(config.evaluation.device),
                    [prompt.text for prompt in prompts],
                    [prompt.spec for prompt in prompts],
                    options_of(config, [name]),
                ).parts[name]
                for row, value in zip(rows, scores.tolist(), strict=True):
                    values.setdefault((name, part[row][0]), []).append(value)
        progress(len(part))
    table = pd.DataFrame(
        [
            _row(suite, name, index, values[name, index])
            for name in names
            for index in suite.chosen
            if (name, index) in values
        ],
        columns=[column for column in COLUMNS if column != "weight"],
    )
    table.insert(COLUMNS.index("weight"), "weight", 1.0)
    if SETS[suite.section.prompts].mean_of_categories:
        table["weight"] = 1 / table.groupby(["score", "category"])["index"].transform("size")
    return table


def summarize(table: pd.DataFrame) -> dict[str, dict[str, dict[str, float]]]:
    """Return benchmark -> score -> means: the total ("all"), of each category, and numbers of images.

    `failed` images have no score and are in no mean; a mean of nothing is left out.
    """
    result: dict[str, dict[str, dict[str, float]]] = {}
    for (benchmark, score), rows in table.groupby(["benchmark", "score"], sort=False):
        known = rows.dropna(subset="mean")
        total = (
            (known["weight"] * known["mean"]).sum() / known["weight"].sum() if len(known) else float("nan")
        )
        means = {"all": total, **rows.groupby("category", sort=False)["mean"].mean()}
        numbers = {name: float(value) for name, value in means.items() if value == value}
        numbers |= {"n_images": float(rows["images"].sum()), "failed": float(rows["failed"].sum())}
        result.setdefault(str(benchmark), {})[str(score)] = numbers
    return result


def read_record(folder: Path) -> Mapping[str, Any]:
    """Return what `generation.json` in a folder of images says; empty if there is none."""
    path = folder / RECORD
    if not path.is_file():
        return {}
    try:
        record: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise MargrpoError(f"{path}: not readable as JSON ({error})") from None
    return record


def _alike(
    pictures: Sequence[Tensor], prompts: Sequence[Prompt], suite: Suite, score: str
) -> list[list[int]]:
    """Return the rows that a score is defined for, those of equal size together."""
    kind = SETS[suite.section.prompts]
    found: dict[torch.Size, list[int]] = {}
    for row, (picture, prompt) in enumerate(zip(pictures, prompts, strict=True)):
        if kind.has(score, prompt.category):
            found.setdefault(picture.shape, []).append(row)
    return list(found.values())


def _row(suite: Suite, score: str, index: int, values: Sequence[float]) -> dict[str, Any]:
    prompt = suite.prompts[index]
    known = [value for value in values if value == value]
    return {
        "benchmark": suite.name,
        "score": score,
        "index": index,
        "category": prompt.category,
        "prompt": prompt.text,
        "mean": sum(known) / len(known) if known else float("nan"),
        "images": len(known),
        "failed": len(values) - len(known),
    }
