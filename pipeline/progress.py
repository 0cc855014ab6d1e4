"""Progress of many stages on one terminal: their output with names, what runs, how long it will still take."""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import TextIO

from tqdm import tqdm

from pipeline.graph import Stage


class Progress:
    """Prints lines of stages; a bar on a terminal, a line per finished stage elsewhere."""

    def __init__(self, stages: Sequence[Stage], workers: int, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stdout
        self.workers = workers
        self.kinds = {stage.name: stage.kind for stage in stages if stage.stale}
        self.started: dict[str, float] = {}
        self.spent: dict[str, list[float]] = defaultdict(list)  # kind -> seconds of its finished stages
        self.lock = threading.Lock()
        self.current = len(stages) - len(self.kinds)
        self.bar = tqdm(
            total=len(stages),
            initial=self.current,
            file=self.stream,
            disable=not self.stream.isatty(),
            bar_format="{n_fmt}/{total_fmt} stages |{bar:20}| {elapsed}{postfix}",
        )

    def line(self, stage: str, text: str) -> None:
        """Print a line of a stage's output."""
        with self.lock:
            self._print(f"[{stage}] {text}")

    def start(self, stage: Stage) -> None:
        """Note that a stage starts."""
        with self.lock:
            self.started[stage.name] = time.monotonic()
            self._show()

    def finish(self, name: str, good: bool, message: str) -> None:
        """Note that a stage ended; `message` tells why if it failed."""
        with self.lock:
            seconds = time.monotonic() - self.started.pop(name)
            kind = self.kinds.pop(name)
            if good:
                self.spent[kind].append(seconds)
            self.current += 1
            self.bar.update()
            left = self.seconds_left()
            eta = f", about {duration(left)} left" if left and self.kinds else ""
            verdict = f"done in {duration(seconds)}" if good else f"FAILED ({message})"
            self._print(f"[{self.current}/{self.bar.total}] {name} {verdict}{eta}")
            self._show()

    def seconds_left(self) -> float | None:
        """Return an estimate: mean seconds of a kind's finished stages, all workers busy; None if unknown."""
        known = [kind for kind, seconds in self.spent.items() if seconds]
        if not known:
            return None
        means = {kind: sum(self.spent[kind]) / len(self.spent[kind]) for kind in known}
        default = max(means.values())  # a kind that has not run yet counts as the slowest so far
        total = sum(means.get(kind, default) for kind in self.kinds.values())
        now = time.monotonic()
        elapsed = sum(
            min(now - since, means.get(self.kinds[name], default)) for name, since in self.started.items()
        )
        return max(total - elapsed, 0.0) / self.workers

    def close(self) -> None:
        """Remove the bar."""
        self.bar.close()

    def _show(self) -> None:
        left = self.seconds_left()
        eta = f", about {duration(left)} left" if left else ""
        self.bar.set_postfix_str(f"{', '.join(self.started)}{eta}")

    def _print(self, text: str) -> None:
        self.bar.write(text, file=self.stream)
        self.stream.flush()


def duration(seconds: float) -> str:
    """Return seconds as a person says them: "42 s", "3 min 05 s"."""
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60:02d} s"
