"""One update: draw prompts and steps, roll out, score, advantage, gradient, optimizer step; validation.

In a distributed run every process does this with its share of the images.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from margrpo import objective as loss
from margrpo import rewards, seeds
from margrpo.batches import Batch, BatchOrder, chunks
from margrpo.checkpoints import sha256
from margrpo.config import Config
from margrpo.errors import RewardError, TrainingError
from margrpo.metrics.diversity import pairwise_distance
from margrpo.models import Models
from margrpo.pieces import Piece, add_anchors, cut, with_ends
from margrpo.policies.base import Policy
from margrpo.prefills import Prefills
from margrpo.prompts import Prompt
from margrpo.rollout import Recording, Rollout, generate
from margrpo.workers import Workers


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
        rewards.check(config.reward.weights, config.reward.options)
        self.workers = Workers(config.train)
        if self.workers.main:  # it alone scores
            rewards.prepare(config.reward.weights, config.reward.options)
        self.order = BatchOrder(train, seed)
        self.validation_prompts = validation
        self.models = Models(config, variant, seed, base, self.workers.device)
        self.base_sha256 = sha256(base)
        self.optimizer = torch.optim.AdamW(
            self.trainable(), lr=config.train.learning_rate, weight_decay=config.train.weight_decay
        )
        self.seconds: dict[str, float] = {}
        self.validated: Tensor | None = None  # the images of the last validation

    @property
    def policy(self) -> Policy:
        """The policy that learns."""
        return self.models.policy

    @property
    def reference(self) -> Policy | None:
        """The copy of the base policy, None if LoRA does without."""
        return self.models.frozen_copy

    def trainable(self) -> list[nn.Parameter]:
        """Return the parameters that learn, in the policy's order."""
        return list(self.models.trainable().values())

    def update(self, update: int, validated: bool) -> dict[str, float]:
        """Make update number `update` (from 1) and return its row of metrics.csv.

        Args:
            validated: also log the gradient norm at constant advantage (costs one more backward pass).

        Raises:
            TrainingError: the loss or the gradient is not finite.
            RewardError: a reward gives no scores any more; weights and optimizer are as they were.
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
        batch, recording = self.draw(update), self.select(update)
        share = self.workers.share(len(batch.seeds))
        guidance = self.objective.guidance.rollout
        parts = [
            self._generate(
                [batch.prompts[i] for i in part], [batch.seeds[i] for i in part], guidance, recording
            )
            for part in chunks(share, self.config.train.micro_batch)
        ]
        images = self.workers.gather(torch.cat([pixels for _, pixels in parts]))
        sampled = time.perf_counter()
        scored = self.workers.on_main(lambda: self._scores(images, batch.prompts, update))
        rewarded = time.perf_counter()
        advantage = loss.advantages(scored.total, batch.groups)[share.start : share.stop]
        pieces = self.prepare([rollout for rollout, _ in parts], advantage.to(self.workers.device), recording)
        self.seconds |= {
            "rollout_s": sampled - started + time.perf_counter() - rewarded,
            "reward_s": rewarded - sampled,
        }
        return {"update": update, **self._reward_metrics(scored, images)}, pieces

    def draw(self, update: int) -> Batch:
        """Return the prompts and image seeds of an update, those of all processes."""
        return self.order.draw(update, self.config.train)

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

    def prepare(self, rollouts: Sequence[Rollout], advantage: Tensor, recording: Recording) -> list[Piece]:
        """Draw what to score in the rollouts of the micro-batches, and score the reference."""
        with self.models.computing():
            made = cut(self.policy, rollouts, advantage, self.objective, recording.denoising_steps)
            if self.objective.beta > 0:
                with self.models.reference() as reference:
                    add_anchors(reference, made, self.objective)
        return made

    def accumulate(self, pieces: Sequence[Piece], constant: bool = False) -> list[loss.Terms]:
        """Leave the gradient of the whole loss in `.grad`; the first call also fixes the old log-probs.

        Args:
            constant: the policy term alone at advantage 1 instead of the loss.
        """
        self.optimizer.zero_grad(set_to_none=True)
        denoising = self.config.train.denoising_steps
        kept, tokens = self.workers.sum(
            [sum(int(piece.keep.sum()) for piece in pieces), sum(piece.keep.numel() for piece in pieces)]
        )
        totals = loss.Totals(int(kept) * denoising, int(tokens) * denoising)
        objective = self.objective.model_copy(update={"beta": 0.0}) if constant else self.objective
        results = []
        prefills = Prefills()
        for piece, completes in with_ends(pieces):
            advantage = torch.ones_like(piece.advantage) if constant else piece.advantage
            with self.models.computing():
                terms = loss.step_terms(
                    self.policy,
                    piece.anchor,
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
            if completes:
                prefills.backward()
            if not constant and piece.old_log_prob is None and self.objective.inner_epochs > 1:
                piece.old_log_prob = terms.log_prob
            results.append(terms)
        self.workers.sum_gradients(self.trainable())
        return results

    def _step(self, update: int, terms: Sequence[loss.Terms]) -> dict[str, float]:
        """Check, clip and apply the gradient; return the metrics of this inner epoch."""
        value, kl, clipped, units = self.workers.sum(
            [
                sum(float(term.loss.detach()) for term in terms),
                sum(term.kl for term in terms),
                sum(term.clipped for term in terms),
                sum(term.units for term in terms),
            ]
        )
        head = _norm(self.policy.head_parameters())
        backbone = _norm(self.policy.backbone_parameters())
        total = float(nn.utils.clip_grad_norm_(self.trainable(), self.config.train.max_grad_norm))
        for name, number in (("loss", value), ("gradient norm", total)):
            if not torch.isfinite(torch.tensor(number)):
                raise TrainingError(f"{self.variant}-{self.seed}: the {name} is {number} at update {update}")
        self.optimizer.step()
        self.models.track()
        return {
            "clip_ratio": clipped / units if units else 0.0,
            "loss": value,
            "kl": kl,
            "ratio_max_deviation": self.workers.largest(max(term.ratio_deviation for term in terms)),
            "grad_norm": total,
            "grad_norm/backbone": backbone,
            "grad_norm/head": head,
        }

    def _constant_advantage_norm(self, pieces: Sequence[Piece]) -> float:
        self.accumulate(pieces, constant=True)
        return _norm(self.trainable())

    def _reward_metrics(self, scored: rewards.RewardBatch, images: Tensor) -> dict[str, float]:
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
        """Return the mean reward of SDE samples of the validation prompts from fixed noise seeds.

        The images [N, 3, H, W] stay in `validated`: image i shows validation prompt i modulo their number.
        """
        started = time.perf_counter()
        train = self.config.train
        count, workers = train.validation_images, self.workers
        prompts = [self.validation_prompts[i % len(self.validation_prompts)] for i in range(count)]
        image_seeds = [seeds.derive("validation", p.text, i) for i, p in enumerate(prompts)]
        each = -(-count // workers.count)
        share = [i % count for i in range(workers.index * each, (workers.index + 1) * each)]
        guidance = self.config.evaluation.guidance
        with self.models.averaged():
            drawn = [
                self._generate(
                    [prompts[share[i]] for i in part], [image_seeds[share[i]] for i in part], guidance
                )[1]
                for part in chunks(range(each), train.micro_batch)
            ]
        images = workers.gather(torch.cat(drawn))[:count]  # the last process may have drawn some twice
        self.validated = images.cpu()
        total = workers.on_main(lambda: self._scores(images, prompts, None)).total
        self.seconds["validation_s"] = time.perf_counter() - started
        return float(total[~total.isnan()].mean())

    def _scores(self, images: Tensor, prompts: Sequence[Prompt], update: int | None) -> rewards.RewardBatch:
        """Score images for an update, or for a validation if `update` is None."""
        reward = self.config.reward
        texts, specs = [prompt.text for prompt in prompts], [prompt.spec for prompt in prompts]
        try:
            return rewards.score(reward.weights, images, texts, specs, reward.options, update is not None)
        except RewardError as error:
            place = "the validation" if update is None else f"update {update}"
            raise RewardError(f"{self.variant}-{self.seed}: {error} at {place}") from None

    def _generate(
        self,
        prompts: Sequence[Prompt],
        image_seeds: Sequence[int],
        guidance: float,
        recording: Recording | None = None,
    ) -> tuple[Rollout, Tensor]:
        """Return a rollout by SDE and its images."""
        texts, steps = [prompt.text for prompt in prompts], self.config.sampler.ar_steps
        with self.models.computing():
            rollout = generate(self.policy, texts, image_seeds, steps, guidance, recording=recording)
        with torch.no_grad():
            return rollout, self.policy.decode(rollout.tokens)


def _norm(parameters: object) -> float:
    gradients = [p.grad for p in parameters if p.grad is not None]  # type: ignore[attr-defined]
    return float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
