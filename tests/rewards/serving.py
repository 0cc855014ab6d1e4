"""A real `margrpo serve-reward` process, with a reward of the tests besides those of the package."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from margrpo.config import RewardOptions
from margrpo.rewards import base

ROOT = Path(__file__).parents[2]


def odd(options: RewardOptions) -> base.Reward:
    """Return mean brightness; specs may ask for a pause, NaN or an exception."""

    def score(images: Tensor, prompts: Sequence[str], specs: base.Specs) -> Tensor:
        time.sleep(max(spec.get("sleep", 0.0) for spec in specs))
        if any(spec.get("raise") for spec in specs):
            raise RuntimeError("bad picture")
        missing = torch.tensor([bool(spec.get("nan")) for spec in specs])
        return torch.where(missing, torch.nan, images.mean((1, 2, 3)))

    return score


ODD = base.Entry(base.Info("odd", "test", "none", low=0.0, high=1.0), odd)


class Server:
    """The process; `url` once it listens."""

    def __init__(self, name: str, *arguments: str, port: int = 0) -> None:
        command = [sys.executable, "-m", "tests.rewards.serving", "serve-reward", name, "--port", str(port)]
        self.process = subprocess.Popen([*command, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)

    def wait(self) -> str:
        """Return the address, once it listens."""
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        self.url = self.line.split()[1]
        return self.url

    @property
    def port(self) -> int:
        """Return its port."""
        return int(self.url.rsplit(":", 1)[1])

    def kill(self) -> None:
        """End it at once, as kill -9 does."""
        self.process.kill()
        self.process.wait()


if __name__ == "__main__":
    from margrpo.cli import app, run

    base._REGISTRY["odd"] = ODD
    sys.exit(run(app))
