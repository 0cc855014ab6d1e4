"""Flow-matching pretraining of the tiny policy on rendered scenes of the train split."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tqdm import tqdm

from margrpo import seeds
from margrpo.benchmarks.scenes import load_split
from margrpo.config import Pretrain
from margrpo.policies.base import Condition
from margrpo.policies.tiny import TinyPolicy
from margrpo.scenes.render import render, sample_scene

WARMUP = 0.05
"""Share of the steps in which the learning rate rises linearly."""
FINAL_RATE = 0.1
"""Last learning rate, relative to the peak."""
NOISE_LOGIT = 1.0
"""Mean of logit(sigma), whose deviation is 1: what a token becomes is decided at high noise."""
MAX_GRAD_NORM = 1.0
WEIGHT_DECAY = 0.01


def pretrain(
    config: Pretrain, progress: bool = True, on_step: Callable[[int, float], None] | None = None
) -> TinyPolicy:
    """Return a tiny policy trained from scratch; its weights are the moving average over the steps.

    Runs on one thread, so that equal configurations give equal bits on one machine.

    Args:
        progress: show a bar with loss and remaining time on stderr.
        on_step: called after every step with its index and loss.
    """
    with _one_thread():
        prompts, images = render_scenes(config.images, config.seed)
        policy = TinyPolicy(config.architecture, seed=seeds.derive("pretrain", config.seed, "weights"))
        policy.tokenizer.fit(images)
        tokens, condition = policy.tokenizer.encode(images), policy.encode(prompts)
        null = policy.encode([None])["words"]
        generator = seeds.generator("pretrain", config.seed, "batches")
        optimizer = torch.optim.AdamW(
            policy.parameters(), lr=config.learning_rate, weight_decay=WEIGHT_DECAY, fused=True
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, config.steps))
        average = AveragedModel(policy, multi_avg_fn=get_ema_multi_avg_fn(config.ema))
        bar = tqdm(range(config.steps), desc="pretrain", unit="step", disable=not progress, mininterval=1.0)
        for step in bar:
            chosen = torch.randint(len(tokens), (config.batch_size,), generator=generator)
            dropped = torch.rand(config.batch_size, 1, generator=generator) < config.null_prompt
            words = torch.where(dropped, null, condition["words"][chosen])
            loss = flow_loss(policy, tokens[chosen], Condition({"words": words}), generator)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            schedule.step()
            average.update_parameters(policy)
            if on_step is not None:
                on_step(step, loss.item())
            if step % 20 == 0:
                bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    policy.load_state_dict(average.module.state_dict())
    return policy


def render_scenes(count: int, seed: int) -> tuple[list[str], Tensor]:
    """Return `count` prompts of the train split and their images [count, 3, 32, 32] in [0, 1].

    Categories are equally frequent, prompts are equally frequent within a category.
    """
    rng = np.random.default_rng(seeds.derive("pretrain", seed, "scenes"))
    prompts = load_split("train")
    categories = sorted({prompt.category for prompt in prompts})
    groups = [[prompt for prompt in prompts if prompt.category == category] for category in categories]
    scenes = []
    for _ in range(count):
        group = groups[rng.integers(len(groups))]
        scenes.append(sample_scene(group[rng.integers(len(group))], rng))
    return [scene.prompt.text for scene in scenes], torch.from_numpy(render(scenes))


def draw_known(images: int, length: int, generator: torch.Generator) -> Tensor:
    """Return which tokens are given, bool [B, L]: floor(L (1 - cos(pi u / 2))) random ones, u uniform.

    This is the state that the cosine schedule shows the backbone at a random moment u of generation.
    """
    moment = torch.rand(images, 1, generator=generator)
    count = (length * (1 - torch.cos(moment * (math.pi / 2)))).floor()
    rank = torch.rand(images, length, generator=generator).argsort(dim=1).argsort(dim=1)
    return rank < count


def flow_loss(policy: TinyPolicy, tokens: Tensor, condition: Condition, generator: torch.Generator) -> Tensor:
    """Return the mean squared velocity error on the tokens that are not given, for tokens [B, L, C].

    x_t = sigma eps + (1 - sigma) x_0 with logit-normal sigma; the target is eps - x_0.
    """
    known = draw_known(tokens.shape[0], tokens.shape[1], generator)
    z = policy.backbone(tokens, known, condition)[~known]
    target = tokens[~known]
    noise = torch.randn(target.shape, generator=generator)
    sigma = torch.sigmoid(NOISE_LOGIT + torch.randn(len(target), generator=generator))
    state = torch.lerp(target, noise, sigma[:, None])
    return functional.mse_loss(policy.head(state, sigma, z), noise - target)


def rate(step: int, steps: int) -> float:
    """Return the learning rate of a step relative to the peak: linear warm-up, then cosine to a tenth."""
    warmup = max(1, round(WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * done))


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
