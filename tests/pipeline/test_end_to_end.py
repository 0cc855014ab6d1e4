"""The smoke profile in fresh clones: with Prefect, and with plain DVC that is killed on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from mlflow import MlflowClient
from ruamel.yaml import YAML

from margrpo.checkpoints import read_header
from margrpo.params import load_params
from pipeline import processes
from pipeline.scratch import _copy_code

pytestmark = pytest.mark.e2e

RUNS = ["grpo-0", "frozen_head_committed-0", "mar_grpo_bridged-0"]
KILLED = "frozen_head_committed-0"


def clone(source: Path, target: Path) -> Path:
    """Return a clone that also has what is not committed yet, and no results."""
    subprocess.run(["git", "clone", "--quiet", str(source), str(target)], check=True)
    _copy_code(source, target)
    return target


def run(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "SHELL": "/bin/sh", "GIT_CONFIG_COUNT": "0"}


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def updates_done(folder: Path) -> int:
    """Return the update of the newest resume state."""
    states = list(folder.glob(".margrpo/resume/*/state.safetensors"))
    return int(read_header(states[0])["done"]) if states else 0


def trainer_of(folder: Path) -> int | None:
    """Return the pid of the trainer that works in a folder."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().split(b"\0")
            if (
                b"pipeline.stages" in command
                and b"train" in command
                and (entry / "cwd").resolve() == folder.resolve()
            ):
                return int(entry.name)
        except OSError:
            continue
    return None


def test_smoke_profile_and_killed_runs(tmp_path: Path, project_root: Path) -> None:
    project = clone(project_root, tmp_path / "project")
    before = subprocess.check_output(["git", "status", "--porcelain"], cwd=project)
    printed = run(project, "-m", "pipeline", "reproduce", "--profile", "smoke")
    scratch = project / ".margrpo/scratch/smoke"
    assert "report   .margrpo/scratch/smoke/reports/report.html" in printed
    assert subprocess.check_output(["git", "status", "--porcelain"], cwd=project) == before
    results = pd.read_csv(scratch / "reports/results.csv")
    assert set(results["run"]) == {*RUNS, "base"}
    store = MlflowClient(f"sqlite:///{project / 'mlflow.db'}")
    experiment = store.get_experiment_by_name("margrpo")
    logged = store.search_runs([experiment.experiment_id])
    assert sorted(run.info.run_name for run in logged) == sorted([*RUNS, "base", "mar_grpo_ablation"])
    assert {run.info.status for run in logged} == {"FINISHED"}
    assert all(run.data.metrics for run in logged)
    assert len({frozenset(run.data.params) for run in logged if run.info.run_name in RUNS}) == 1
    assert "up to date" in run(project, "-m", "pipeline", "reproduce", "--profile", "smoke")

    # The same experiment with plain DVC, its own cache, and two deaths on the way.
    plain = clone(project_root, tmp_path / "plain")
    params = load_params(plain / "params.yaml", profile="smoke")
    with open(plain / "params.yaml", "w") as file:
        YAML().dump(params, file)
    command = [sys.executable, "-m", "dvc", "repro", f"train@{KILLED}"]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, cwd=plain, env=environment(), stdout=subprocess.DEVNULL)

    dvc = start()
    wait_until(lambda: updates_done(plain) >= 2, 120)
    trainer = trainer_of(plain)
    assert trainer is not None
    os.kill(trainer, signal.SIGKILL)
    assert dvc.wait(timeout=60) != 0
    assert updates_done(plain) < 6

    dvc = start()
    wait_until(lambda: updates_done(plain) >= 4, 120)
    trainer = trainer_of(plain)
    assert trainer is not None
    orphan = processes.identity(trainer)
    dvc.kill()
    dvc.wait()
    wait_until(lambda: not processes.is_alive(orphan), 10)  # no trainer goes on without DVC
    assert updates_done(plain) < 6

    printed = run(plain, "-m", "dvc", "repro")
    assert f"resuming {KILLED} after update 4" in printed
    for name in RUNS:
        for file in ("metrics.csv", "summary.json"):  # the summary holds the hashes of the weights
            path = Path("reports/runs") / name / file
            assert (plain / path).read_bytes() == (scratch / path).read_bytes(), path
        for file in ("metrics.json", "prompts.csv", "grid.png"):
            path = Path("reports/evaluation") / name / file
            assert (plain / path).read_bytes() == (scratch / path).read_bytes(), path
    assert "up to date" in run(plain, "-m", "dvc", "repro")
    assert "up to date" in run(plain, "-m", "dvc", "status")
