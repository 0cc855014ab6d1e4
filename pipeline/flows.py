"""Prefect flows: one task per DVC stage, independent stages side by side.

Import this module only after `pipeline.reproduce.prepare_prefect`: Prefect reads its settings on import.
"""

from __future__ import annotations

import concurrent.futures
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.futures import PrefectConcurrentFuture
from prefect.states import Completed, Failed

from pipeline import processes
from pipeline.graph import Stage, read_graph
from pipeline.progress import Progress

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


@task(task_run_name="{stage}", cache_policy=NO_CACHE, persist_result=False)
def run_stage(stage: str, workspace: Path, children: Children, progress: Progress, run_id: str) -> State[Any]:
    """Run one DVC stage with `dvc repro -s`; its output is streamed with the stage's name before each line."""
    logger = get_run_logger()
    command = [sys.executable, "-m", "dvc", "--wait-for-lock", "repro", "--single-item", stage]
    tail: list[str] = []
    started = time.monotonic()
    with children.start(command, workspace, stage_environment(run_id)) as process:
        for text in _worth_reading(process.stdout or ()):
            tail = [*tail[-19:], text]
            progress.line(stage, text)
            logger.info(text)
        code = process.wait()
    if code:
        return Failed(message=f"{stage}: `dvc repro` ended with code {code}", data="\n".join(tail))
    return Completed(message=f"{stage}: {time.monotonic() - started:.1f} s")


def _worth_reading(lines: Iterable[str]) -> Iterator[str]:
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


@flow(name="reproduce")
def reproduce(workspace: Path, workers: int) -> State[Any]:
    """Bring every stage of a workspace up to date, up to `workers` of them side by side.

    A failed stage stops what needs it and nothing else.
    """
    stages = read_graph(workspace)
    children = Children()
    progress = Progress(stages, workers)
    try:
        failed = _run_all(stages, workspace, workers, children, progress)
    finally:
        children.stop()  # also on Ctrl-C and on a cancelled flow run
        progress.close()
    if failed:
        return Failed(message=f"failed: {', '.join(sorted(failed))}")
    return Completed(message="all stages are up to date")


def _run_all(
    stages: list[Stage], workspace: Path, workers: int, children: Children, progress: Progress
) -> set[str]:
    done = {stage.name for stage in stages if not stage.stale}
    waiting = [stage for stage in stages if stage.stale]
    running: dict[concurrent.futures.Future[Any], tuple[str, PrefectConcurrentFuture[Any]]] = {}
    failed: set[str] = set()
    while waiting or running:
        blocked = {stage.name for stage in waiting if stage.needs & failed}
        if blocked:
            failed |= blocked
            waiting = [stage for stage in waiting if stage.name not in blocked]
            continue
        for stage in [stage for stage in waiting if stage.needs <= done][: workers - len(running)]:
            waiting.remove(stage)
            progress.start(stage)
            future = run_stage.submit(stage.name, workspace, children, progress, str(runtime.flow_run.id))
            assert isinstance(future, PrefectConcurrentFuture)  # the thread pool's kind
            running[future.wrapped_future] = (stage.name, future)
        finished, _ = concurrent.futures.wait(running, timeout=1.0, return_when="FIRST_COMPLETED")
        for wrapped in finished:
            name, future = running.pop(wrapped)
            future.wait()
            good = future.state.is_completed()
            (done if good else failed).add(name)
            progress.finish(name, good, future.state.message or "")
    return failed
