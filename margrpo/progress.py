"""What a person sees while a run trains: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TextIO

from tqdm import tqdm


class Progress:
    """A bar on a terminal, a line now and then elsewhere: reward, KL, gradient norm, remaining time."""

    def __init__(
        self, name: str, updates: int, done: int, enabled: bool, stream: TextIO | None = None
    ) -> None:
        self.name, self.updates, self.done, self.enabled = name, updates, done, enabled
        self.stream = stream or sys.stderr
        self.started = time.perf_counter()
        live = enabled and self.stream.isatty()
        self.bar = tqdm(total=updates, initial=done, desc=name, disable=not live, file=self.stream)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def show(self, update: int, row: Mapping[str, float]) -> None:
        """Show the row of a finished update."""
        text = f"reward {row['reward']:.3f} kl {row['kl']:.4f} grad {row['grad_norm']:.3f}"
        if not self.bar.disable:
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update()
        elif self.enabled and (update % max(self.updates // 10, 1) == 0 or update == self.updates):
            each = (time.perf_counter() - self.started) / (update - self.done)
            left = each * (self.updates - update)
            say(f"{self.name} {update}/{self.updates} {text} eta {left:.0f} s", self.stream)


def say(text: str, stream: TextIO | None = None) -> None:
    """Write a line about the run to a stream (default: stderr)."""
    print(f"margrpo: {text}", file=stream or sys.stderr, flush=True)
