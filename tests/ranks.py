"""Two updates of a distributed run, as one of its processes; the main one writes what it found.

`python -m tests.ranks OUT VARIANT MICRO_BATCH` in each process.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from margrpo.checkpoints import save_policy
from margrpo.config import RewardOptions
from margrpo.rewards import base as rewards
from margrpo.trainer import train
from margrpo.updater import Updater
from tests.support import make_config, make_policy, scene_prompts


@rewards.register(rewards.Info("ranks_brightness", "mean of the pixels", "none"))
def brightness(options: RewardOptions) -> rewards.Reward:
    def score(images: Tensor, prompts: Sequence[str], specs: rewards.Specs) -> Tensor:
        return images.mean((1, 2, 3))

    return score


def main(out: Path, variant: str, micro_batch: int) -> None:
    torch.set_num_threads(1)
    config = make_config(
        reward={
            "weights": {"ranks_brightness": 1.0},
            # of the whole batch: a process alone could not know it
            "options": {"ranks_brightness": {"normalize": "minmax"}},
        },
        objective={"beta": 0.5},
        train={"micro_batch": micro_batch, "updates": 2, "prompts_per_update": 2, "images_per_prompt": 3},
    )
    prompts = {"train": scene_prompts("train", 12), "validation": scene_prompts("validation", 4)}
    base = (
        out / f"base-{torch.distributed.get_rank() if torch.distributed.is_initialized() else 0}.safetensors"
    )
    save_policy(make_policy(), base, {})
    updater = Updater(config, variant, 0, base, prompts["train"], prompts["validation"])
    updater.optimizer.step = lambda: None  # type: ignore[method-assign,assignment]
    row, pieces = updater.collect(1)
    advantages = updater.workers.gather(
        torch.cat([p.advantage for p in pieces if p.step is p.rollout.steps[0]])
    )
    row |= updater._step(1, updater.accumulate(pieces))
    gradient = torch.cat([p.grad.flatten() for p in updater.trainable() if p.grad is not None])
    with torch.no_grad():
        for parameter in updater.trainable():
            parameter.add_(0.01)
        later = updater.validate()
    if updater.workers.main:
        found = {"row": row, "advantages": advantages, "gradient": gradient, "validation": later}
        torch.save(found, out / "found.pt")
    train(config, variant, 0, base, prompts, out / "weights", out / "logs", out / "state", progress=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
