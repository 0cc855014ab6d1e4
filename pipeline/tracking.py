"""The follower: the one process of a project that ships the jobs of `pipeline.jobs` to MLflow.

Stages start it when none runs; it ends when nothing is left to ship. Metrics carry the time stamps of
timing.csv and MLflow drops equal points, so that sending rows again after an outage is safe.
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import jobs, processes
from pipeline.machine import Machine
from pipeline.store import Store, close_dead_runs, quiet

if TYPE_CHECKING:
    from mlflow.entities import Metric

IDLE_SECONDS = 20.0  # longer than the pause between two stages of `dvc repro`
PATIENCE_SECONDS = 60.0  # with an unreachable server, once no stage runs any more
POLL_SECONDS = 1.0
_DROPPED_ERRORS = ("INVALID_PARAMETER_VALUE", "INVALID_STATE", "RESOURCE_DOES_NOT_EXIST", "BAD_REQUEST")


@dataclass
class Follower:
    """Ships jobs until there are none.

    Attributes:
        home: the project folder; MLflow's own artifacts of a local store lie in its `mlartifacts`.
    """

    home: Path
    machine: Machine = field(default_factory=Machine)
    _clients: dict[str, Any] = field(default_factory=dict)
    _stores: dict[tuple[str, str], Store] = field(default_factory=dict)  # uri and experiment
    _runs: dict[str, str] = field(default_factory=dict)  # job id -> MLflow run id
    _shipped: dict[str, int] = field(default_factory=dict)  # job id -> rows of metrics.csv
    _grids: dict[str, set[int]] = field(default_factory=dict)  # MLflow run id -> updates
    _sweeps: dict[tuple[str, str], tuple[Store, str]] = field(default_factory=dict)  # parents without own job

    def step(self) -> bool:
        """Ship what can be shipped now; return False if the tracking server did not take something."""
        from mlflow.exceptions import MlflowException

        healthy = True
        before: list[jobs.Job] = []  # the older jobs that are not shipped
        for job in jobs.pending():
            try:
                shipped = self._ship(job, before)
            except MlflowException as error:
                shipped = error.error_code in _DROPPED_ERRORS
                healthy = healthy and shipped
                _log(f"{'dropped' if shipped else 'later'} {job.id}: {error}")
            except OSError as error:
                shipped = healthy = False
                _log(f"later {job.id}: {error}")
            except (ValueError, KeyError, TypeError) as error:  # files that nobody can read, also not later
                shipped = True
                _log(f"dropped {job.id}: {error!r}")
            if shipped:
                jobs.remove(job)
            else:
                before.append(job)
        return healthy

    def _ship(self, job: jobs.Job, before: list[jobs.Job]) -> bool:
        """Ship what there is of a job; return whether that was all."""
        killed = jobs.is_killed(job)
        if job.kind in ("train", "sweep"):  # runs that live as long as their process
            if job.kind == "train":
                self._ship_train(job)
            elif not self._ship_sweep(job, before):
                return False
            if job.status is not None or killed:
                self._store(job).client.set_terminated(self._runs[job.id], job.status or "KILLED")
                return True
            return False
        if job.status is None:
            return killed
        if job.kind == "evaluate":
            if any(other.kind == "train" and other.cell == job.cell for other in before):
                return False
            self._ship_evaluation(job)
        elif not job.sweep_id:  # the report of one cell says nothing about its sweep
            if any(other.study_hash == job.study_hash for other in before):
                return False
            self._ship_report(job)
        return True

    def _ship_train(self, job: jobs.Job) -> None:
        store = self._store(job)
        if job.id not in self._runs:
            self._runs[job.id] = self._child(job)
        run_id = self._runs[job.id]
        points = read_points(job.file("metrics.csv"), job.file("timing.csv"))
        start = self._shipped.get(job.id, 0)
        for row in points[start:]:
            store.client.log_batch(run_id, metrics=row)
        self._shipped[job.id] = max(start, len(points))
        self._ship_grids(job, run_id)
        if job.status is not None:
            store.tag(run_id, job.tags)
            return
        used = self.machine.sample(job.process)
        if used:
            now = time.time_ns() // 1_000_000
            store.client.log_batch(run_id, metrics=_metrics(used, now, (now - _milliseconds(job)) // 1000))

    def _ship_grids(self, job: jobs.Job, run_id: str) -> None:
        """Add the sample grids that the run does not have."""
        found = job.grids()
        if found and run_id not in self._grids:
            self._grids[run_id] = self._store(job).grids(run_id)
        for update in sorted(found.keys() - self._grids.get(run_id, set())):
            self._store(job).add_grid(run_id, update, found[update])
            self._grids[run_id].add(update)

    def _ship_sweep(self, job: jobs.Job, before: list[jobs.Job]) -> bool:
        """Open the parent of a sweep; once that has ended, add its files after those of all its cells."""
        store = self._store(job)
        if job.id not in self._runs:
            self._runs[job.id] = store.parent(job)
            store.tag(self._runs[job.id], {**job.tags, "margrpo.job": job.id})
            self._sweeps.pop((job.uri, job.sweep_id), None)
        if job.status is None:
            return True
        if any(other.sweep_id == job.sweep_id for other in jobs.pending() if other.id != job.id):
            return False
        self._ship_files(job, self._runs[job.id], "sweep")
        return True

    def _ship_evaluation(self, job: jobs.Job) -> None:
        store = self._store(job)
        trained = store.find({"margrpo.cell": job.cell, "margrpo.parent": job.parent[1]})
        found = [run.info.run_id for run in trained if run.info.status == "FINISHED"]
        run_id = found[0] if found else self._child(job)
        if not found:  # trained elsewhere, or taken from DVC's cache
            for row in read_points(job.file("metrics.csv"), job.file("timing.csv")):
                store.client.log_batch(run_id, metrics=row)
            self._ship_grids(job, run_id)
            store.tag(run_id, job.tags)
        content = json.loads(job.file("metrics.json").read_text(encoding="utf-8"))
        step = int(job.params.get("train.updates", 0))
        metrics = _metrics(jobs.flatten(content, "eval"), _milliseconds(job), step)
        store.client.log_batch(run_id, metrics=metrics)
        if job.file("grid.png").is_file():
            store.client.log_artifact(run_id, str(job.file("grid.png")))
        store.client.set_terminated(run_id, "FINISHED")

    def _ship_report(self, job: jobs.Job) -> None:
        store = self._store(job)
        parent = store.parent(job)
        self._ship_files(job, parent, "report")
        store.client.set_terminated(parent, job.status)

    def _ship_files(self, job: jobs.Job, run_id: str, prefix: str) -> None:
        """Log the numbers of metrics.json below a prefix and every other file as an artifact."""
        client = self._store(job).client
        for file in sorted(job.folder.iterdir()):
            if file.name == "metrics.json":
                content = jobs.flatten(json.loads(file.read_text(encoding="utf-8")), prefix)
                client.log_batch(run_id, metrics=_metrics(content, _milliseconds(job), 0))
            elif file.is_file() and file.name != "job.json":
                client.log_artifact(run_id, str(file))

    def _child(self, job: jobs.Job) -> str:
        store = self._store(job)
        run_id = store.child(job, _milliseconds(job))
        owned = any(other.kind == "sweep" and other.sweep_id == job.sweep_id for other in jobs.pending())
        if job.sweep_id and not owned:
            self._sweeps[job.uri, job.sweep_id] = (store, store.parent(job))
        return run_id

    def close_sweeps(self) -> None:
        """Close the parents of sweeps that no process of their own closes: FAILED if a cell did not finish."""
        from mlflow.exceptions import MlflowException

        for store, parent in self._sweeps.values():
            try:
                finished = all(run.info.status == "FINISHED" for run in store.children(parent))
                store.client.set_terminated(parent, "FINISHED" if finished else "FAILED")
            except MlflowException as error:  # the next follower closes it as KILLED
                _log(f"cannot close the sweep {parent}: {error}")
        self._sweeps.clear()

    def _store(self, job: jobs.Job) -> Store:
        if job.uri not in self._clients:
            from mlflow import MlflowClient

            client = MlflowClient(job.uri)
            close_dead_runs(client)
            self._clients[job.uri] = client
        key = (job.uri, job.experiment)
        if key not in self._stores:
            artifacts = self.home / "mlartifacts" if job.uri.startswith("sqlite:") else None
            self._stores[key] = Store.open(self._clients[job.uri], job.experiment, artifacts)
        return self._stores[key]


def read_points(metrics: Path, timing: Path) -> list[list[Metric]]:
    """Return the points of every complete row of metrics.csv and timing.csv that both have."""
    times = {row["update"]: row for row in _rows(timing)}
    points = []
    for row in _rows(metrics):
        clock = times.get(row["update"])
        if clock is None:
            break
        spent = {f"time/{key}": value for key, value in clock.items() if key.endswith("_s")}
        texts = {key: value for key, value in {**row, **spent}.items() if key != "update" and value}
        numbers = {key: float(value) for key, value in texts.items()}
        points.append(_metrics(numbers, int(clock["timestamp_ms"]), int(row["update"])))
    return points


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    complete = text[: text.rfind("\n") + 1]  # a row may be half written
    return list(csv.DictReader(complete.splitlines()))


def _metrics(values: dict[str, Any], stamp: int, step: int) -> list[Metric]:
    from mlflow.entities import Metric

    # MLflow refuses other characters in a key; a category may have some.
    numbers = {
        re.sub(r"[^\w./ -]", "_", key): float(value)
        for key, value in values.items()
        if isinstance(value, int | float)
    }
    return [Metric(key, value, stamp, step) for key, value in numbers.items() if math.isfinite(value)]


def _milliseconds(job: jobs.Job) -> int:
    return int(job.id.split("-")[0]) // 1_000_000


def follow(home: Path, idle: float = IDLE_SECONDS, patience: float = PATIENCE_SECONDS) -> None:
    """Ship jobs until none is left, or until the server stays away; then the next command goes on.

    Only one follower per project runs; a second one returns at once.
    """
    follower = Follower(home)
    while True:
        with processes.try_exclusive(jobs.follower_lock()) as free:
            if not free:
                return
            left = _follow_until_idle(follower, idle, patience)
        # A stage that announced a job just before the release saw the lock and started no other follower.
        if {job.id for job in jobs.pending()} <= left:
            return


def _follow_until_idle(follower: Follower, idle: float, patience: float) -> set[str]:
    """Ship jobs; return the ids of those that are left because the server stays away."""
    last_work = last_success = time.monotonic()
    while True:
        healthy = follower.step()
        now = time.monotonic()
        queue = jobs.pending()
        last_success = now if healthy else last_success
        last_work = now if queue else last_work
        running = any(job.status is None and processes.is_alive(job.process) for job in queue)
        if not queue and now - last_work >= idle:
            follower.close_sweeps()
            return set()
        if queue and not running and now - last_success >= patience:
            _log(f"gave up for now: {len(queue)} jobs wait for the next start")
            return {job.id for job in queue}
        time.sleep(POLL_SECONDS if healthy else 5 * POLL_SECONDS)


def _log(text: str) -> None:
    print(time.strftime("%Y-%m-%d %H:%M:%S"), " ".join(text.split())[:500], file=sys.stderr, flush=True)


if __name__ == "__main__":
    quiet()
    os.environ["MARGRPO_HOME"] = sys.argv[1]
    os.nice(5)
    follow(Path(sys.argv[1]))
