"""`margrpo reproduce`: the workspace to run in, Prefect's settings, and what to say at the end."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from margrpo.config import Config
from margrpo.errors import MargrpoError
from margrpo.params import load_config
from pipeline import jobs, paths, processes
from pipeline.graph import read_graph
from pipeline.progress import duration
from pipeline.scratch import prepare_workspace, workspace_of
from pipeline.servers import read_state

FLUSH_SECONDS = 60.0  # how long the end of a run waits for MLflow


def reproduce(
    project: Path, params: Path, overrides: Sequence[str], profile: str | None, workers: int | None
) -> None:
    """Run every stage that is not up to date and say where the results are.

    Raises:
        MargrpoError: params are wrong, this is no project folder, or stages failed.
    """
    started = time.monotonic()
    with workspace_for(project, params, overrides, profile) as (config, workspace):
        if any(stage.stale for stage in read_graph(workspace)):  # else Prefect has nothing to do
            _run_flow(project, workspace, workers or len(os.sched_getaffinity(0)))
        _say_where(config, workspace, time.monotonic() - started)


@contextmanager
def workspace_for(
    project: Path, params: Path, overrides: Sequence[str], profile: str | None
) -> Iterator[tuple[Config, Path]]:
    """Hold the lock of the workspace for these params while it is worked in; yields the params and the folder.

    Raises:
        MargrpoError: params are wrong, or this is no project folder.
    """
    config = load_config(params, overrides, profile)
    if not (project / "dvc.yaml").is_file():
        raise MargrpoError(f"{project}: no dvc.yaml here; run this in the folder of the project")
    os.environ["MARGRPO_HOME"] = str(project)
    changed = profile is not None or overrides or params.resolve() != (project / paths.PARAMS).resolve()
    workspace = workspace_of(project, params, overrides, profile) if changed else project
    lock = paths.state("locks", f"reproduce-{workspace.name if changed else 'project'}.lock")
    with processes.exclusive(
        lock, f"another reproduction of {os.path.relpath(workspace)} is running; waiting"
    ):
        if changed:
            prepare_workspace(project, params, overrides, profile)
            os.environ["MARGRPO_PROFILE"] = workspace.name
            where = os.path.relpath(workspace)
            print(
                f"margrpo: running in {where}; params.yaml, dvc.lock and reports/ stay as they are",
                flush=True,
            )
        if jobs.pending():  # left by an outage or a killed run
            jobs.ensure_follower()
        yield config, workspace


def _run_flow(project: Path, workspace: Path, workers: int) -> None:
    prepare_prefect(project)
    from pipeline.flows import reproduce as flow

    state = flow(workspace, workers, return_state=True)
    if state.is_crashed() and "interrupt" in (state.message or ""):
        raise KeyboardInterrupt
    if not state.is_completed():
        raise MargrpoError(f"{state.message}; after the cause is gone, the same command goes on from here")


def prepare_prefect(project: Path, api: str = "") -> None:
    """Set what Prefect reads on import, unless the user has set it: state in .margrpo, quiet, no analytics.

    `api`: the server to use; default that of `margrpo serve` if it runs, else one of this process alone.
    """
    served = read_state(project)
    api = api or (served.api if served is not None else "")
    defaults = {
        **({"PREFECT_API_URL": api} if api else {}),
        "PREFECT_HOME": str(project / ".margrpo" / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
        "PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL",
        "PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED": "false",
        "PREFECT_SERVER_SERVICES_LATE_RUNS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    Path(os.environ["PREFECT_HOME"]).mkdir(parents=True, exist_ok=True)  # Prefect makes no parents


def _say_where(config: Config, workspace: Path, seconds: float) -> None:
    deadline = time.monotonic() + FLUSH_SECONDS
    while jobs.pending() and time.monotonic() < deadline:
        time.sleep(0.5)
    waiting = len(jobs.pending())
    late = f"\n           {waiting} jobs wait for MLflow: .margrpo/tracking/follower.log" if waiting else ""
    store = config.tracking.uri or "sqlite:///mlflow.db"
    tools = Path(sys.executable).parent
    tools = tools.relative_to(Path.cwd()) if tools.is_relative_to(Path.cwd()) else tools
    folder = os.path.relpath(workspace)
    inside = "" if folder == "." else f" --cd {folder}"
    prefect = "" if "PREFECT_API_URL" in os.environ else "PREFECT_HOME=.margrpo/prefect "
    print(
        f"margrpo: up to date after {duration(seconds)}\n"
        f"  report   {os.path.relpath(workspace / paths.REPORT)}\n"
        f"  curves   {tools}/mlflow ui --backend-store-uri {store}{late}\n"
        f"  stages   {prefect}{tools}/prefect server start\n"
        f"  numbers  {tools}/dvc{inside} metrics show"
    )
