"""One update: draw prompts and steps, roll out, score, advantage, gradient, optimizer step; validation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from margrpo import objective as loss
from margrpo import rewards, seeds
from margrpo.checkpoints import load_policy, sha256
from margrpo.config import Config
from margrpo.errors import ConfigError, TrainingError
from margrpo.metrics.diversity import pairwise_distance
from margrpo.policies.base import Policy
from margrpo.prefills import Prefills
from margrpo.prompts import Prompt
from margrpo.rollout import RecordedStep, Recording, Rollout, generate
from margrpo.trajectories import Rows, build_rows, draw_fresh


@dataclass(frozen=True)
class Batch:
    """The prompts of one update: P slots of G images; a slot is a group, also if prompts repeat."""

    prompts: list[Prompt]
    seeds: list[int]
    groups: Tensor


@dataclass
class Piece:
    """One AR step of a micro-batch, ready to be scored in every inner epoch."""

    rollout: Rollout
    step: RecordedStep
    rows: Rows
    keep: Tensor
    advantage: Tensor
    old_log_prob: Tensor | None = None


class Updater:
    """Everything one run holds; every random draw is a function of (seed, update, purpose, image).

    Args:
        config, variant, seed: the run. base: checkpoint of the base policy.
        train, validation: prompts.

    Raises:
        ConfigError: the settings do not fit the policy (scored AR steps, uncertain tokens, rewards).
    """

    def __init__(
        self,
        config: Config,
        variant: str,
        seed: int,
        base: Path,
        train: list[Prompt],
        validation: list[Prompt],
    ) -> None:
        self.config, self.variant, self.seed = config, variant, seed
        self.objective = config.objective_of(variant)
        names = sorted({prompt.category for prompt in train})
        self.categories = [[prompt for prompt in train if prompt.category == name] for name in names]
        self.validation_prompts = validation
        rewards.check(config.reward.weights, config.reward.options)
        self.policy = _load(base, config)
        self.reference = _load(base, config).requires_grad_(False)
        self.base_sha256 = sha256(base)
        self._check_sizes()
        trainable = self.objective.trainable
        for parameter in self.policy.backbone_parameters():
            parameter.requires_grad_(trainable != "head")
        for parameter in self.policy.head_parameters():
            parameter.requires_grad_(trainable != "backbone")
        self.optimizer = torch.optim.AdamW(
            self.trainable(), lr=config.train.learning_rate, weight_decay=config.train.weight_decay
        )
        self.seconds: dict[str, float] = {}

    def trainable(self) -> list[nn.Parameter]:
        """Return the parameters that learn, in the policy's order."""
        return [parameter for parameter in self.policy.parameters() if parameter.requires_grad]

    def update(self, update: int, validated: bool) -> dict[str, float]:
        """Make update number `update` (from 1) and return its row of metrics.csv.

        Args:
            validated: also log the gradient norm at constant advantage (costs one more backward pass).

        Raises:
            TrainingError: the loss or the gradient is not finite.
        """
        row, pieces = self.collect(update)
        started = time.perf_counter()
        if validated:
            row["grad_norm/constant_advantage"] = self._constant_advantage_norm(pieces)
        row |= self._step(update, self.accumulate(pieces))
        for _ in range(1, self.objective.inner_epochs):
            row["clip_ratio"] = self._step(update, self.accumulate(pieces))["clip_ratio"]
        self.seconds["update_s"] = time.perf_counter() - started
        return row

    def collect(self, update: int) -> tuple[dict[str, float], list[Piece]]:
        """Roll out and score the images of an update; return its reward metrics and what is to be scored."""
        started = time.perf_counter()
        batch = self.draw(update)
        recording = self.select(update)
        sampler, guidance = self.config.sampler, self.objective.guidance.rollout
        texts = [prompt.text for prompt in batch.prompts]
        rollout = generate(self.policy, texts, batch.seeds, sampler.ar_steps, guidance, recording=recording)
        images = self.policy.decode(rollout.tokens)
        sampled = time.perf_counter()
        scored = self._scores(images, batch.prompts, update)
        rewarded = time.perf_counter()
        advantage = loss.advantages(scored.total, batch.groups).to(rollout.tokens.device)
        pieces = self.prepare(rollout, advantage, recording)
        self.seconds |= {
            "rollout_s": sampled - started + time.perf_counter() - rewarded,
            "reward_s": rewarded - sampled,
        }
        return {"update": update, **self._reward_metrics(scored, batch, images)}, pieces

    def draw(self, update: int) -> Batch:
        """Return the prompts and image seeds of an update.

        Slots take the categories in turn, so that each is trained equally; the prompts of a category are
        shuffled anew each time all have been shown.
        """
        train = self.config.train
        first = (update - 1) * train.prompts_per_update
        slots = [self._prompt(first + slot) for slot in range(train.prompts_per_update)]
        each = train.images_per_prompt
        return Batch(
            [prompt for prompt in slots for _ in range(each)],
            [
                seeds.derive("train", self.seed, update, slot, image)
                for slot in range(len(slots))
                for image in range(each)
            ],
            torch.arange(len(slots)).repeat_interleave(each),
        )

    def _prompt(self, position: int) -> Prompt:
        turn, category = divmod(position, len(self.categories))
        prompts = self.categories[category]
        epoch, index = divmod(turn, len(prompts))
        generator = seeds.generator("prompts", self.seed, category, epoch)
        return prompts[int(torch.randperm(len(prompts), generator=generator)[index])]

    def select(self, update: int) -> Recording:
        """Draw the AR steps and denoising steps that all images of this update are scored at."""
        generator = seeds.generator("steps", self.seed, update)
        available = len(self.policy.ar_schedule(self.config.sampler.ar_steps))
        ar_steps = torch.randperm(available, generator=generator)[: self.config.train.ar_steps]
        scored = self.policy.transition.scored
        chosen = torch.randperm(len(scored), generator=generator)[: self.config.train.denoising_steps]
        return Recording(
            frozenset(ar_steps.tolist()),
            tuple(sorted(scored[i] for i in chosen.tolist())),
            self.objective.token_mask == "unknown",
            self.objective.consistency is not None,
        )

    def prepare(self, rollout: Rollout, advantage: Tensor, recording: Recording) -> list[Piece]:
        """Cut the rollout into micro-batches and AR steps and draw the trajectories to score."""
        size = self.config.train.micro_batch or len(advantage)
        pieces = []
        for start in range(0, len(advantage), size):
            images = slice(start, start + size)
            part = rollout.select(images)
            fresh = draw_fresh(self.policy, part, self.objective, recording.denoising_steps)
            for step in part.steps:
                rows = build_rows(self.policy, part, step, self.objective, fresh)
                keep = loss.consistency_mask(step, part.tokens, self.objective.consistency)
                pieces.append(Piece(part, step, rows, keep, advantage[images]))
        return pieces

    def accumulate(self, pieces: Sequence[Piece], constant: bool = False) -> list[loss.Terms]:
        """Leave the gradient of the whole loss in `.grad`; the first call also fixes the old log-probs.

        Args:
            constant: the policy term alone at advantage 1 instead of the loss.
        """
        self.optimizer.zero_grad(set_to_none=True)
        denoising = self.config.train.denoising_steps
        totals = loss.Totals(
            sum(int(piece.keep.sum()) for piece in pieces) * denoising,
            sum(piece.keep.numel() for piece in pieces) * denoising,
        )
        objective = self.objective.model_copy(update={"beta": 0.0}) if constant else self.objective
        results = []
        prefills = Prefills()
        for piece, following in zip(pieces, [*pieces[1:], None], strict=True):
            advantage = torch.ones_like(piece.advantage) if constant else piece.advantage
            terms = loss.step_terms(
                self.policy,
                self.reference,
                objective,
                piece.rollout,
                piece.step,
                piece.rows,
                piece.keep,
                advantage,
                totals,
                piece.old_log_prob,
                prefills,
            )
            terms.loss.backward()
            if following is None or following.rollout is not piece.rollout:
                prefills.backward()  # the micro-batch is complete
            if not constant and piece.old_log_prob is None and self.objective.inner_epochs > 1:
                piece.old_log_prob = terms.log_prob
            results.append(terms)
        return results

    def _step(self, update: int, terms: Sequence[loss.Terms]) -> dict[str, float]:
        """Check, clip and apply the gradient; return the metrics of this inner epoch."""
        value = sum(float(term.loss.detach()) for term in terms)
        head = _norm(self.policy.head_parameters())
        backbone = _norm(self.policy.backbone_parameters())
        total = float(nn.utils.clip_grad_norm_(self.trainable(), self.config.train.max_grad_norm))
        for name, number in (("loss", value), ("gradient norm", total)):
            if not torch.isfinite(torch.tensor(number)):
                raise TrainingError(f"{self.variant}-{self.seed}: the {name} is {number} at update {update}")
        self.optimizer.step()
        units = sum(term.units for term in terms)
        return {
            "clip_ratio": sum(term.clipped for term in terms) / units if units else 0.0,
            "loss": value,
            "kl": sum(term.kl for term in terms),
            "ratio_max_deviation": max(term.ratio_deviation for term in terms),
            "grad_norm": total,
            "grad_norm/backbone": backbone,
            "grad_norm/head": head,
        }

    def _constant_advantage_norm(self, pieces: Sequence[Piece]) -> float:
        self.accumulate(pieces, constant=True)
        return _norm(self.trainable())

    def _reward_metrics(self, scored: rewards.RewardBatch, batch: Batch, images: Tensor) -> dict[str, float]:
        each = self.config.train.images_per_prompt
        spread = rewards.spreads(scored.total, each)
        pictures = images.unflatten(0, (-1, each))
        return {
            "reward": float(scored.total[~scored.total.isnan()].mean()),
            "reward_std": float(spread.mean()),
            **rewards.metrics(scored, each),
            "frac_reward_zero_std": float((spread < 1e-6).float().mean()),
            "diversity": sum(pairwise_distance(group) for group in pictures) / len(pictures),
        }

    def validate(self) -> float:
        """Return the mean reward of SDE samples of the validation prompts from fixed noise seeds."""
        started = time.perf_counter()
        count = self.config.train.validation_images
        prompts = [self.validation_prompts[i % len(self.validation_prompts)] for i in range(count)]
        image_seeds = [seeds.derive("validation", p.text, i) for i, p in enumerate(prompts)]
        texts = [prompt.text for prompt in prompts]
        rollout = generate(
            self.policy, texts, image_seeds, self.config.sampler.ar_steps, self.config.evaluation.guidance
        )
        with torch.no_grad():
            images = self.policy.decode(rollout.tokens)
        total = self._scores(images, prompts, None).total
        self.seconds["validation_s"] = time.perf_counter() - started
        return float(total[~total.isnan()].mean())

    def _scores(self, images: Tensor, prompts: Sequence[Prompt], update: int | None) -> rewards.RewardBatch:
        """Score images for an update, or for a validation if `update` is None."""
        reward = self.config.reward
        texts, specs = [prompt.text for prompt in prompts], [prompt.spec for prompt in prompts]
        try:
            return rewards.score(reward.weights, images, texts, specs, reward.options, update is not None)
        except TrainingError as error:
            place = "the validation" if update is None else f"update {update}"
            raise TrainingError(f"{self.variant}-{self.seed}: {error} at {place}") from None

    def _check_sizes(self) -> None:
        available = len(self.policy.ar_schedule(self.config.sampler.ar_steps))
        if self.config.train.ar_steps > available:
            raise ConfigError.of(
                "train.ar_steps",
                self.config.train.ar_steps,
                f"allowed: 1..{available} (steps that commit tokens)",
            )
        scored = len(self.policy.transition.scored)
        if self.config.train.denoising_steps > scored:
            allowed = f"allowed: 1..{scored} (steps of this policy that have a log-prob)"
            raise ConfigError.of("train.denoising_steps", self.config.train.denoising_steps, allowed)
        fraction = self.objective.uncertain_fraction
        if round(fraction * self.policy.tokens) == 0:
            raise ConfigError.of(
                f"variants.{self.variant}.uncertain_fraction",
                fraction,
                f"allowed: at least one of the {self.policy.tokens} tokens",
            )


def _load(base: Path, config: Config) -> Policy:
    policy = load_policy(base).eval()
    policy.configure(config.sampler)
    return policy


def _norm(parameters: object) -> float:
    gradients = [p.grad for p in parameters if p.grad is not None]  # type: ignore[attr-defined]
    return float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
