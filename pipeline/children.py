"""The `dvc` processes of a flow: started in groups of their own, ended together."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline import processes

_BAR_SECONDS = 10.0  # between two states of a progress bar that is not on a terminal
# What DVC says around a stage's own output and nobody needs to read thirty times.
_CHATTER = (
    "> ",
    "Running stage",
    "Updating lock",
    "Generating lock",
    "To track the changes",
    "To enable auto",
    "Use `dvc push`",
    "\tgit add",
    "\tdvc config",
    "Stage '",
    "Reproducing experiment",
    "Ran experiment(s)",
    "Experiment results have been applied",  # to the clone
    "WARNING: No file hash info found",
)


class Children:
    """The running `dvc` processes of this process; all of them end when the flow does."""

    def __init__(self) -> None:
        self.running: set[subprocess.Popen[str]] = set()
        self.stopped = False
        self.lock = threading.Lock()

    @contextmanager
    def start(
        self, command: list[str], cwd: Path, environment: dict[str, str]
    ) -> Iterator[subprocess.Popen[str]]:
        """Start a process that `stop` ends with all its descendants."""
        with self.lock:
            if self.stopped:
                raise RuntimeError("the flow was stopped")
            process = processes.start_group(command, cwd, environment)
            self.running.add(process)
        try:
            yield process
        finally:
            processes.stop_group(process)
            with self.lock:
                self.running.discard(process)

    def stop(self) -> None:
        """End all processes and refuse new ones."""
        with self.lock:
            self.stopped = True
            running = list(self.running)
        for process in running:
            processes.stop_group(process)


def worth_reading(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a stage without DVC's chatter and with one state of a progress bar now and then."""
    shown = -math.inf
    for line in lines:
        text = line.rstrip()
        if not text or text.startswith(_CHATTER):
            continue
        if "%|" in text:  # a bar of tqdm
            if time.monotonic() - shown < _BAR_SECONDS:
                continue
            shown = time.monotonic()
        yield text


def stage_environment(run_id: str) -> dict[str, str]:
    """Return the environment of a stage: this Python first in PATH, one thread each, a plain shell."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    extra = {"PATH": path, "SHELL": "/bin/sh", "PYTHONUNBUFFERED": "1", "DVC_NO_ANALYTICS": "1"}
    return {**os.environ, **extra, "MARGRPO_PREFECT_RUN": run_id}
