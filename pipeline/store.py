"""Runs of a tracking server: find, create and close them, and read their curves; with `tracking` all of mlflow."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import jobs, paths, processes

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

_IMAGE = re.compile(
    rf"images/{jobs.IMAGES}[+%]step[+%](\d+)[+%]timestamp[+%].*\.webp"
)  # the last file of an image

_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "GIT_PYTHON_REFRESH": "quiet",
}


def quiet() -> None:
    """Set what mlflow reads on import, unless the user has: no telemetry, short waits for a dead server."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@dataclass(frozen=True)
class Store:
    """One experiment of a tracking server.

    Attributes:
        client: of the server. experiment: id of the experiment.
    """

    client: MlflowClient
    experiment: str

    @classmethod
    def open(cls, client: MlflowClient, name: str, artifacts: Path | None) -> Store:
        """Return an experiment by name, made if it is missing; `artifacts`: where a local one keeps its files."""
        found = client.get_experiment_by_name(name)
        if found is not None:
            return cls(client, str(found.experiment_id))
        location = None if artifacts is None else artifacts.as_uri()
        return cls(client, str(client.create_experiment(name, artifact_location=location)))

    def find(self, tags: dict[str, str], newest_first: bool = True) -> list[Run]:
        """Return the runs with these tags."""
        quote = {value: '"' if "'" in value else "'" for value in tags.values()}
        query = " and ".join(
            f"tags.`{key}` = {quote[value]}{value}{quote[value]}" for key, value in tags.items()
        )
        order = "DESC" if newest_first else "ASC"
        by = [f"attributes.start_time {order}", "attributes.run_id ASC"]
        return list(self.client.search_runs([self.experiment], query, order_by=by, max_results=1000))

    def parent(self, job: jobs.Job) -> str:
        """Return the id of the run of a job's study or sweep, made or opened again.

        All cells of a sweep get the same one: processes of this project by a lock, others in that everybody
        takes the oldest run and deletes a younger one of his own.
        """
        tag, value, name = job.parent
        with processes.exclusive(paths.state("locks", f"parent-{jobs.digest([tag, value])}.lock")):
            found = self.find({tag: value}, newest_first=False)
            if not found:
                tags = {tag: value, tag.removeprefix("margrpo."): name, "host": platform.node()}
                made = self.client.create_run(self.experiment, run_name=name, tags=tags)
                found = self.find({tag: value}, newest_first=False) or [made]
                if found[0].info.run_id != made.info.run_id:
                    self.client.delete_run(made.info.run_id)
        if found[0].info.status != "RUNNING":
            self.client.update_run(found[0].info.run_id, status="RUNNING")
        return str(found[0].info.run_id)

    def child(self, job: jobs.Job, started: int) -> str:
        """Return the id of the run of a job; its params are sent again, in case an outage cut them off."""
        from mlflow.entities import Param

        parent = self.parent(job)
        found = self.find({"margrpo.job": job.id})
        if found:
            run_id = str(found[0].info.run_id)
        else:
            own = {"mlflow.parentRunId": parent, "margrpo.parent": job.parent[1]}
            tags = {**job.tags, **own, "margrpo.job": job.id, "margrpo.cell": job.cell}
            # The cells of a variant are told apart by their own names; the base policy has no seed.
            swept = job.sweep_id and "seed" in job.tags
            names = [job.tags.get(tag, "") for tag in ("sweep_cell", "dvc_experiment") if swept]
            name = next(filter(None, names), job.run)
            run_id = str(self.client.create_run(self.experiment, started, tags, name).info.run_id)
        items = [Param(key, value) for key, value in sorted(job.params.items())]
        for index in range(0, len(items), 100):
            self.client.log_batch(run_id, params=items[index : index + 100])
        return run_id

    def named(self, name: str) -> list[Run]:
        """Return the runs of a name, newest first."""
        quote = '"' if "'" in name else "'"
        query, by = f"attributes.run_name = {quote}{name}{quote}", ["attributes.start_time DESC"]
        return list(self.client.search_runs([self.experiment], query, order_by=by, max_results=1000))

    def children(self, parent: str) -> list[Run]:
        """Return the runs below a parent, newest first."""
        return self.find({"mlflow.parentRunId": parent})

    def tag(self, run_id: str, tags: dict[str, str]) -> None:
        """Set tags of a run."""
        from mlflow.entities import RunTag

        self.client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()])

    def grids(self, run_id: str) -> set[int]:
        """Return the updates whose sample grid the run has."""
        files = [artifact.path for artifact in self.client.list_artifacts(run_id, "images")]
        return {int(found[1]) for file in files if (found := _IMAGE.fullmatch(file))}

    def add_grid(self, run_id: str, update: int, file: Path) -> None:
        """Add a sample grid to the images that MLflow shows by step."""
        from PIL import Image

        with Image.open(file) as picture:
            stamp = int(file.stat().st_mtime * 1000)
            self.client.log_image(
                run_id, picture.convert("RGB"), key=jobs.IMAGES, step=update, timestamp=stamp
            )


def close_dead_runs(client: MlflowClient) -> None:
    """Close as KILLED every run of this machine that claims to be running but whose process is gone.

    A parent without a process of its own is closed too: its next job opens it again.
    """
    kept = {job.id for job in jobs.pending()}
    here = platform.node()
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    for run in client.search_runs(experiments, "attributes.status = 'RUNNING'", max_results=1000):
        tags = run.data.tags
        if tags.get("margrpo.job") in kept or tags.get("host", here) != here:
            continue
        dead = "margrpo.study" in tags or "margrpo.sweep" in tags
        if "boot_id" in tags and "margrpo.job" in tags:
            started = int(tags["process_started"])
            process = {"pid": tags["pid"], "started": started, "boot_id": tags["boot_id"]}
            dead = not processes.is_alive(process)
        if dead:
            client.set_terminated(run.info.run_id, "KILLED")
