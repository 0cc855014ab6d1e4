"""What has to reach MLflow: a folder per job in `.margrpo/tracking`; stages write, the follower reads.

A stage only writes small files here, so that neither a slow nor a dead tracking server can hold it up.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from margrpo.checkpoints import write_atomic
from margrpo.config import Config
from pipeline import paths, processes

Kind = Literal["train", "evaluate", "report", "sweep"]
IMAGES = "validation"
"""Folder of a job, and key in MLflow, of the sample grids by update."""
_CODE = ("margrpo", "pipeline", "params.yaml", "dvc.yaml")


@dataclass(frozen=True)
class Job:
    """One thing to ship.

    Attributes:
        study, study_hash: the parent run, unless the stage runs in a sweep.
        sweep, sweep_id: name and id of the sweep whose run is the parent; empty outside of sweeps.
        cell: hash of all that the result of a train run depends on.
        source: folder with the files to ship while the stage runs; afterwards they lie in the job's folder.
        pictures: the same for the sample grids, `<update>.png`.
        status: FINISHED or FAILED once the stage ended; None while it runs, or if it was killed.
    """

    id: str
    kind: Kind
    study: str
    study_hash: str
    uri: str
    experiment: str
    run: str = ""
    cell: str = ""
    tags: dict[str, str] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)
    source: str = ""
    pictures: str = ""
    sweep: str = ""
    sweep_id: str = ""
    process: dict[str, Any] = field(default_factory=dict)
    status: str | None = None

    @property
    def folder(self) -> Path:
        """Return the folder of this job."""
        return queue() / self.id

    def file(self, name: str) -> Path:
        """Return where a file to ship lies now."""
        kept = self.folder / name
        return kept if self.status is not None else Path(self.source) / name

    def grids(self) -> dict[int, Path]:
        """Return the sample grids that are there by update."""
        folder = self.folder / IMAGES if self.status is not None else Path(self.pictures or self.folder)
        return {int(file.stem): file for file in sorted(folder.glob("*.png")) if file.stem.isdecimal()}

    @property
    def parent(self) -> tuple[str, str, str]:
        """Return what the parent run is found by: tag and its value; and the parent's name."""
        if self.sweep_id:
            return "margrpo.sweep", self.sweep_id, self.sweep
        return "margrpo.study", self.study_hash, self.study


def queue() -> Path:
    """Return the folder of all jobs."""
    return paths.state("tracking", "jobs")


def announce(job: Job) -> Job:
    """Put a job of this process into the queue and see to it that a follower runs."""
    entered = replace(job, process=processes.identity())
    _write(entered)
    ensure_follower()
    return entered


def finish(
    job: Job,
    status: Literal["FINISHED", "FAILED", "KILLED"],
    files: Mapping[str, Path],
    tags: Mapping[str, str] | None = None,
) -> None:
    """Copy what has to be shipped into the job's folder and mark the job as ended.

    Args:
        files: name in the job's folder -> file; those that are not there are left out.
        tags: what is known of the run only now.
    """
    for name, file in files.items():
        target = job.folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.is_file():
            shutil.copyfile(file, target)
    _write(replace(job, status=status, tags={**job.tags, **(tags or {})}))
    ensure_follower()


def pending() -> list[Job]:
    """Return the jobs that are not shipped yet, oldest first."""
    found = (read(file) for file in sorted(queue().glob("*/job.json")))
    return [job for job in found if job is not None]


def read(file: Path) -> Job | None:
    """Return the job of a job.json; None if it is being removed, or from another version."""
    try:
        return Job(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def is_killed(job: Job) -> bool:
    """Return whether the stage of a job died without ending it."""
    if job.status is not None or processes.is_alive(job.process):
        return False
    now = read(job.folder / "job.json")  # it may have ended after `job` was read: a stage writes, then exits
    return now is None or now.status is None


def remove(job: Job) -> None:
    """Take a job out of the queue."""
    shutil.rmtree(job.folder, ignore_errors=True)


def _write(job: Job) -> None:
    write_atomic(job.folder / "job.json", json.dumps(asdict(job), indent=1).encode())


def ensure_follower() -> None:
    """Start the follower of this project unless it runs."""
    with processes.try_exclusive(follower_lock()) as free:
        if not free:
            return
    home = paths.home()
    command = [sys.executable, "-m", "pipeline.tracking", str(home)]
    processes.spawn_detached(command, home, paths.state("tracking", "follower.log"))


def follower_lock() -> Path:
    """Return the lock that the one follower of a project holds."""
    return paths.state("tracking", "follower.lock")


def make(config: Config, kind: Kind, **facts: Any) -> Job:
    """Return a job of this moment with the study's name and tags."""
    stamp = f"{time.time_ns():020d}-{os.getpid()}"
    uri = config.tracking.uri or f"sqlite:///{paths.home() / 'mlflow.db'}"
    return Job(
        id=f"{stamp}-{kind}",
        kind=kind,
        study=config.study.name,
        study_hash=study_hash(config),
        uri=uri,
        experiment=config.tracking.experiment,
        sweep=os.environ.get("MARGRPO_SWEEP", ""),
        sweep_id=os.environ.get("MARGRPO_SWEEP_ID") or os.environ.get("MARGRPO_SWEEP", ""),
        **facts,
    )


def make_sweep(config: Config, name: str, sweep_id: str) -> Job:
    """Return the job of a whole sweep, for the process that runs its cells: their parent run.

    `announce` opens the parent; `finish` closes it, with every file given as its artifact and the numbers of
    a `metrics.json` among them as metrics. If the process dies before that, the parent is closed as KILLED.
    """
    tags = {"sweep": name, **origin_tags()}
    return replace(make(config, "sweep", tags=tags), sweep=name, sweep_id=sweep_id)


def study_hash(config: Config) -> str:
    """Return the hash of what the runs of a study share: comparisons between them are fair.

    Variants are not part of it: after a change of one, its new runs join the same study.
    """
    shared = ["checkpoint", "sampler", "train", "reward", "objective"]
    shared += ["pretrain"] if config.checkpoint.source == "pretrain" else []
    content = {name: getattr(config, name).model_dump() for name in shared}
    return digest({"name": config.study.name, **content})


def digest(content: Any) -> str:
    """Return 16 hex digits that depend on JSON content."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def origin_tags() -> dict[str, str]:
    """Return where a run comes from: git, DVC, Prefect, process."""
    process = processes.identity()
    sha, dirty = git_state(paths.home())
    given = {
        "mlflow.source.git.commit": sha,
        "git_dirty": dirty,
        "prefect_run": os.environ.get("MARGRPO_PREFECT_RUN", ""),
        "profile": os.environ.get("MARGRPO_PROFILE", ""),
        "dvc_stage": os.environ.get("DVC_STAGE", ""),
        "dvc_experiment": os.environ.get("DVC_EXP_NAME", ""),
        "sweep": os.environ.get("MARGRPO_SWEEP", ""),
        "sweep_cell": os.environ.get("MARGRPO_CELL", ""),
        "pid": str(process["pid"]),
        "process_started": str(process["started"]),
        "boot_id": process["boot_id"],
        "host": platform.node(),
    }
    return {name: value for name, value in given.items() if value}


def git_state(folder: Path) -> tuple[str, str]:
    """Return the commit and whether code or params differ from it ("true" | "false"); empty without git."""
    try:
        sha = _git(folder, "rev-parse", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--", *_CODE)
    except (OSError, subprocess.CalledProcessError):
        return "", ""
    return sha, "true" if changed else "false"


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def flatten(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one, with keys joined by `/` (metrics) below `prefix`."""
    flat: dict[str, Any] = {}
    for name, value in content.items():
        key = f"{prefix}/{name}" if prefix else str(name)
        flat |= flatten(value, key) if isinstance(value, Mapping) else {key: value}
    return flat
