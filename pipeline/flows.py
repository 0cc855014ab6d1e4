"""Prefect flows: one task per DVC stage, independent stages side by side.

Import this module only after `pipeline.reproduce.prepare_prefect`: Prefect reads its settings on import.
"""

from __future__ import annotations

import concurrent.futures
import sys
import time
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.futures import PrefectConcurrentFuture
from prefect.states import Completed, Failed

from pipeline.children import Children, stage_environment, worth_reading
from pipeline.graph import Stage, read_graph
from pipeline.progress import Progress


@task(task_run_name="{stage}", cache_policy=NO_CACHE, persist_result=False)
def run_stage(stage: str, workspace: Path, children: Children, progress: Progress, run_id: str) -> State[Any]:
    """Run one DVC stage with `dvc repro -s`; its output is streamed with the stage's name before each line."""
    logger = get_run_logger()
    command = [sys.executable, "-m", "dvc", "--wait-for-lock", "repro", "--single-item", stage]
    tail: list[str] = []
    started = time.monotonic()
    with children.start(command, workspace, stage_environment(run_id)) as process:
        for text in worth_reading(process.stdout or ()):
            tail = [*tail[-19:], text]
            progress.line(stage, text)
            logger.info(text)
        code = process.wait()
    if code:
        return Failed(message=f"{stage}: `dvc repro` ended with code {code}", data="\n".join(tail))
    return Completed(message=f"{stage}: {time.monotonic() - started:.1f} s")


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
