"""The Prefect flow of a sweep: a task per cell, some of them side by side, artifacts at the end.

Import this module only after `pipeline.reproduce.prepare_prefect`: Prefect reads its settings on import.
"""

from __future__ import annotations

import concurrent.futures
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import flow, get_run_logger, runtime, task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.concurrency.sync import concurrency
from prefect.futures import PrefectConcurrentFuture
from prefect.states import Completed, Failed

from margrpo.errors import MargrpoError
from pipeline import paths, processes
from pipeline.children import Children, stage_environment, worth_reading
from pipeline.graph import Stage
from pipeline.progress import Progress
from pipeline.scratch import cache_folder
from pipeline.sweeps import cells, summary
from pipeline.sweeps.form import Sweep, read_form
from pipeline.sweeps.plan import Cell, Plan, make_plan
from pipeline.sweeps.slots import GPU_LIMIT, place
from pipeline.sweeps.snapshot import Snapshot, code_digest, fetch, take

_PROGRESS_SECONDS = 3.0  # between two states of a cell's progress artifact
# What tells best why a stage failed, best first; else its last line.
_REASONS = (re.compile("margrpo: error: "), re.compile(r"ERROR|\w*Error: "))


def _run_name() -> str:
    given = runtime.flow_run.parameters.get("sweep")
    return str(given.get("name", "sweep") if isinstance(given, dict) else getattr(given, "name", "sweep"))


@flow(name="ablation-sweep", flow_run_name=_run_name, validate_parameters=False)
def ablation_sweep(sweep: Sweep) -> State[Any]:
    """Train and evaluate presets x seeds x grid; every cell becomes a DVC experiment and an MLflow run."""
    logger = get_run_logger()
    try:  # also what the form cannot know: combinations of switches that mean nothing, for instance
        plan, snapshot = prepare(sweep if isinstance(sweep, Sweep) else read_form(sweep))
    except MargrpoError as error:
        return Failed(message=f"refused, nothing was started: {' '.join(str(error).split())}")
    os.environ["MARGRPO_PREFECT_RUN"] = str(runtime.flow_run.id)  # a tag of the sweep's run in MLflow
    for note in plan.notes:
        logger.warning(note)
    done = {cell.name for cell in plan.cells if snapshot.has(cell.name)}
    logger.info(
        "%d cells, %d of them made before%s",
        len(plan.cells),
        len(done),
        "; uncommitted changes are part of the experiments" if snapshot.dirty else "",
    )
    stages = [Stage(_stage(cell), frozenset(), cell.name not in done) for cell in plan.cells]
    children, progress = Children(), Progress(stages, plan.sweep.max_parallel)
    try:
        with summary.tracked(plan) as parent:
            failed = _run_all(plan, snapshot, done, children, progress, parent.id)
            summary.publish(plan, snapshot, failed, parent)
    finally:
        children.stop()  # also on Ctrl-C and on a cancelled flow run
        progress.close()
    if failed:
        reasons = "; ".join(f"{label} ({why})" for label, why in failed.items())
        return Failed(message=f"{len(failed)} of {len(plan.cells)} cells failed: {reasons}")
    return Completed(message=f"{len(plan.cells)} cells, {len(done)} of them made before")


def prepare(form: Sweep) -> tuple[Plan, Snapshot]:
    """Return what a form means for the project as it is now.

    Raises:
        MargrpoError: anything wrong with the form, the params or the project.
    """
    project = paths.home()
    os.environ["MARGRPO_HOME"] = str(project)
    if not (project / "dvc.yaml").is_file():
        raise MargrpoError(f"{project}: no dvc.yaml here; run this in the folder of the project")
    snapshot = take(project)
    return make_plan(form, project / paths.PARAMS, code_digest(snapshot)), snapshot


def _stage(cell: Cell) -> str:
    return f"cell@{cell.label}"


def _run_all(
    plan: Plan, snapshot: Snapshot, done: set[str], children: Children, progress: Progress, sweep_id: str
) -> dict[str, str]:
    """Run the cells that are missing; return label -> why of those that failed."""
    cache = cache_folder(snapshot.project)
    waiting = [cell for cell in plan.cells if cell.name not in done]
    running: dict[concurrent.futures.Future[Any], tuple[Cell, PrefectConcurrentFuture[Any]]] = {}
    failed: dict[str, str] = {}
    while waiting or running:
        while waiting and len(running) < plan.sweep.max_parallel:
            cell = waiting.pop(0)
            progress.start(Stage(_stage(cell), frozenset(), True))
            environment = {
                **stage_environment(str(runtime.flow_run.id)),
                "MARGRPO_SWEEP": plan.sweep.name,
                "MARGRPO_SWEEP_ID": sweep_id,
                "MARGRPO_CELL": cell.label,
            }
            future = run_cell.submit(cell.label, cell, snapshot, cache, environment, children, progress)
            assert isinstance(future, PrefectConcurrentFuture)  # the thread pool's kind
            running[future.wrapped_future] = (cell, future)
        finished, _ = concurrent.futures.wait(running, timeout=1.0, return_when="FIRST_COMPLETED")
        for wrapped in finished:
            cell, future = running.pop(wrapped)
            future.wait()
            good = future.state.is_completed()
            if not good:
                failed[cell.label] = future.state.message or "no reason is known"
            progress.finish(_stage(cell), good, future.state.message or "")
    return failed


@task(task_run_name="{label}", cache_policy=NO_CACHE, persist_result=False)
def run_cell(
    label: str,
    cell: Cell,
    snapshot: Snapshot,
    cache: Path,
    environment: dict[str, str],
    children: Children,
    progress: Progress,
) -> State[Any]:
    """Run `dvc exp run` for one cell in a clone of its own and bring the experiment back."""
    started = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(_owned(cell, lambda: children.stopped))
        if snapshot.has(cell.name):
            return Completed(message="made by another sweep meanwhile")
        if cell.device == "cuda":
            stack.enter_context(_gpu_slot(lambda: children.stopped))
        binding = stack.enter_context(place(cell.device, lambda: children.stopped))
        folder = cells.prepare(snapshot, cell, cache)
        why = _run(cell, folder, {**environment, **binding}, children, progress)
        if why:
            return Failed(message=f"{why}; its clone is kept in {os.path.relpath(folder, snapshot.project)}")
        bring_back(cell, snapshot, folder)
        shutil.rmtree(folder, ignore_errors=True)
    return Completed(message=f"{time.monotonic() - started:.1f} s")


@task(
    task_run_name="fetch {cell.label}",
    retries=4,
    retry_delay_seconds=[1, 2, 5, 10],
    cache_policy=NO_CACHE,
    persist_result=False,
)
def bring_back(cell: Cell, snapshot: Snapshot, folder: Path) -> None:
    """Fetch the experiment of a finished cell into the project."""
    fetch(snapshot, cell.name, folder)


def _run(
    cell: Cell, folder: Path, environment: dict[str, str], children: Children, progress: Progress
) -> str:
    """Run the cell's experiment, streaming its output; return why it failed, or nothing."""
    logger = get_run_logger()
    command = [sys.executable, "-m", "dvc", *cells.command(cell)]
    artifact = create_progress_artifact(0.0, key=summary.slug(cell.name), description=f"Cell {cell.label}")
    assert isinstance(artifact, UUID)
    tail: list[str] = []
    cached, told = False, time.monotonic()

    def lines(stream: Iterable[str]) -> Iterator[str]:
        nonlocal cached
        for line in stream:
            cached = cached or bool(
                re.match(rf"Stage 'evaluate@{re.escape(cell.run)}' (is cached|didn't)", line)
            )
            yield line

    with children.start(command, folder, environment) as process:
        for text in worth_reading(lines(process.stdout or ())):
            tail = [*tail[-49:], text]
            progress.line(_stage(cell), text)
            logger.info(text)
            if time.monotonic() - told > _PROGRESS_SECONDS:
                told = time.monotonic()
                update_progress_artifact(artifact, 100 * cells.progress(folder, cell))
        code = process.wait()
    if code == 0:
        if cached:  # no stage has told MLflow
            log = [sys.executable, "-m", "pipeline.stages", "log", cell.run]
            with children.start(log, folder, {**environment, "DVC_EXP_NAME": cell.name}) as process:
                for text in process.stdout or ():
                    logger.warning(text.rstrip())
        update_progress_artifact(artifact, 100.0)
        return ""
    killed = f"killed by signal {-code}" if code < 0 else f"`dvc exp run` ended with code {code}"
    found = [text for reason in _REASONS for text in tail if reason.match(text)] or tail[-1:]
    return f"{killed}: {found[0]}" if found else killed


@contextmanager
def _owned(cell: Cell, stopped: Callable[[], bool]) -> Iterator[None]:
    """Hold the lock of a cell's clone; a sweep that was started twice makes each cell once."""
    lock = paths.state("locks", f"cell-{cell.name}.lock")
    while not stopped():
        with processes.try_exclusive(lock) as free:
            if free:
                yield
                return
        time.sleep(0.5)
    raise RuntimeError("the sweep was stopped")


@contextmanager
def _gpu_slot(stopped: Callable[[], bool]) -> Iterator[None]:
    """Hold a slot of Prefect's global concurrency limit for GPUs, if the server has one."""
    while not stopped():
        with ExitStack() as stack:
            try:
                stack.enter_context(concurrency(GPU_LIMIT, timeout_seconds=20))
            except TimeoutError:
                continue
            yield
            return
    raise RuntimeError("the sweep was stopped")
