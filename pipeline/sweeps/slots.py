"""Places to run a cell on this machine, shared by all sweeps of a project: one a core, or one a GPU."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from pipeline import paths, processes

GPU_LIMIT = "margrpo-gpu"
"""Prefect's global concurrency limit that cells on GPUs take a slot of, on all machines together."""


def devices(kind: str) -> list[str]:
    """Return the names of the places of a kind: cores for cpu, device numbers for cuda (at least one)."""
    if kind == "cpu":
        return [str(core) for core in range(len(os.sched_getaffinity(0)))]
    return gpus() or ["0"]


def gpus() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [name for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if name]
    try:
        done = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return [str(index) for index, _ in enumerate(done.stdout.splitlines())]


@contextmanager
def place(kind: str, stopped: Callable[[], bool]) -> Iterator[dict[str, str]]:
    """Hold a place while a cell runs, waiting for one; yields the environment that binds the cell to it.

    The kernel frees the place of a killed process. Raises RuntimeError if `stopped` says so before there is one.
    """
    names = devices(kind)
    while not stopped():
        for name in names:
            with ExitStack() as stack:
                lock = paths.state("locks", f"place-{kind}-{name}.lock")
                if stack.enter_context(processes.try_exclusive(lock)):
                    yield {"CUDA_VISIBLE_DEVICES": name} if kind == "cuda" else {}
                    return
        time.sleep(0.5)
    raise RuntimeError("the sweep was stopped")
