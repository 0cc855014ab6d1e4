"""The follower: the one process of a project that imports mlflow and ships the jobs of `pipeline.jobs`.

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

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run

IDLE_SECONDS = 20.0  # longer than the pause between two stages of `dvc repro`
PATIENCE_SECONDS = 60.0  # with an unreachable server, once no stage runs any more
POLL_SECONDS = 1.0
_DROPPED_ERRORS = ("INVALID_PARAMETER_VALUE", "INVALID_STATE", "RESOURCE_DOES_NOT_EXIST", "BAD_REQUEST")
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "GIT_PYTHON_REFRESH": "quiet",
}


@dataclass
class Follower:
    """Ships jobs until there are none.

    Attributes:
        home: the project folder; MLflow's own artifacts of a local store lie in its `mlartifacts`.
    """

    home: Path
    _clients: dict[str, Any] = field(default_factory=dict)
    _runs: dict[str, str] = field(default_factory=dict)  # job id -> MLflow run id
    _shipped: dict[str, int] = field(default_factory=dict)  # job id -> rows of metrics.csv

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
        if job.kind == "train":
            self._ship_train(job)
            if job.status is not None or killed:
                self._client(job.uri).set_terminated(self._runs[job.id], job.status or "KILLED")
                return True
            return False
        if job.status is None:
            return killed
        if job.kind == "evaluate":
            if any(other.kind == "train" and other.cell == job.cell for other in before):
                return False
            self._ship_evaluation(job)
        else:
            if any(other.study_hash == job.study_hash for other in before):
                return False
            self._ship_report(job)
        return True

    def _ship_train(self, job: jobs.Job) -> None:
        client = self._client(job.uri)
        if job.id not in self._runs:
            self._runs[job.id] = self._child(job)
        points = read_points(job.file("metrics.csv"), job.file("timing.csv"))
        start = self._shipped.get(job.id, 0)
        for row in points[start:]:
            client.log_batch(self._runs[job.id], metrics=row)
        self._shipped[job.id] = max(start, len(points))

    def _ship_evaluation(self, job: jobs.Job) -> None:
        client = self._client(job.uri)
        trained = self._search(job, {"margrpo.cell": job.cell})
        found = [run.info.run_id for run in trained if run.info.status == "FINISHED"]
        run_id = found[0] if found else self._child(job)
        if not found:  # trained elsewhere, or taken from DVC's cache
            for row in read_points(job.file("metrics.csv"), job.file("timing.csv")):
                client.log_batch(run_id, metrics=row)
        content = json.loads(job.file("metrics.json").read_text(encoding="utf-8"))
        step = int(job.params.get("train.updates", 0))
        client.log_batch(run_id, metrics=_metrics(jobs.flatten(content, "eval"), _milliseconds(job), step))
        if job.file("grid.png").is_file():
            client.log_artifact(run_id, str(job.file("grid.png")))
        client.set_terminated(run_id, "FINISHED")

    def _ship_report(self, job: jobs.Job) -> None:
        client, parent = self._client(job.uri), self._parent(job)
        if job.file("metrics.json").is_file():
            content = json.loads(job.file("metrics.json").read_text(encoding="utf-8"))
            client.log_batch(parent, metrics=_metrics(jobs.flatten(content, "report"), _milliseconds(job), 0))
        if job.file("report.html").is_file():
            client.log_artifact(parent, str(job.file("report.html")))
        client.set_terminated(parent, job.status)

    def _child(self, job: jobs.Job) -> str:
        """Find or create the run of a job; its params are sent again, in case an outage cut them off."""
        from mlflow.entities import Param

        client, parent = self._client(job.uri), self._parent(job)
        found = self._search(job, {"margrpo.job": job.id})
        if found:
            run_id = str(found[0].info.run_id)
        else:
            own = {"mlflow.parentRunId": parent, "margrpo.job": job.id, "margrpo.cell": job.cell}
            start, experiment = _milliseconds(job), self._experiment(job)
            created = client.create_run(experiment, start, run_name=job.run, tags={**job.tags, **own})
            run_id = str(created.info.run_id)
        items = [Param(key, value) for key, value in sorted(job.params.items())]
        for index in range(0, len(items), 100):
            client.log_batch(run_id, params=items[index : index + 100])
        return run_id

    def _parent(self, job: jobs.Job) -> str:
        client = self._client(job.uri)
        found = self._search(job, {"margrpo.study": job.study_hash})
        if not found:
            tags = {"margrpo.study": job.study_hash, "study": job.study}
            run = client.create_run(self._experiment(job), run_name=job.study, tags=tags)
            return str(run.info.run_id)
        if found[0].info.status != "RUNNING":
            client.update_run(found[0].info.run_id, status="RUNNING")
        return str(found[0].info.run_id)

    def _search(self, job: jobs.Job, tags: dict[str, str]) -> list[Run]:
        query = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
        return list(self._client(job.uri).search_runs([self._experiment(job)], query))  # newest first

    def _experiment(self, job: jobs.Job) -> str:
        client = self._client(job.uri)
        found = client.get_experiment_by_name(job.experiment)
        if found is not None:
            return str(found.experiment_id)
        local = job.uri.startswith("sqlite:")
        folder = (self.home / "mlartifacts").as_uri() if local else None
        return str(client.create_experiment(job.experiment, artifact_location=folder))

    def _client(self, uri: str) -> MlflowClient:
        if uri not in self._clients:
            from mlflow import MlflowClient

            client = MlflowClient(uri)
            close_dead_runs(client)
            self._clients[uri] = client
        return self._clients[uri]


def close_dead_runs(client: MlflowClient) -> None:
    """Close as KILLED every run that claims to be running but whose process is gone, and all studies."""
    kept = {job.id for job in jobs.pending()}
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    for run in client.search_runs(experiments, "attributes.status = 'RUNNING'", max_results=1000):
        tags = run.data.tags
        if tags.get("margrpo.job") in kept:
            continue
        if "margrpo.study" in tags:
            client.set_terminated(run.info.run_id, "KILLED")  # its next job opens it again
        elif "boot_id" in tags and "margrpo.job" in tags:
            started = int(tags["process_started"])
            process = {"pid": tags["pid"], "started": started, "boot_id": tags["boot_id"]}
            if not processes.is_alive(process):
                client.set_terminated(run.info.run_id, "KILLED")


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

    numbers = {
        re.sub(r"[^\w./ -]", "_", key): float(
            value
        )  # MLflow refuses other characters; a category may have some
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
            return set()
        if queue and not running and now - last_success >= patience:
            _log(f"gave up for now: {len(queue)} jobs wait for the next start")
            return {job.id for job in queue}
        time.sleep(POLL_SECONDS if healthy else 5 * POLL_SECONDS)


def _log(text: str) -> None:
    print(time.strftime("%Y-%m-%d %H:%M:%S"), " ".join(text.split())[:500], file=sys.stderr, flush=True)


if __name__ == "__main__":
    for _name, _value in _ENVIRONMENT.items():
        os.environ.setdefault(_name, _value)
    os.environ["MARGRPO_HOME"] = sys.argv[1]
    os.nice(5)
    follow(Path(sys.argv[1]))
