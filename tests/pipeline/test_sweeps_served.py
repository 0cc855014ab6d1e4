"""Sweeps through the API of the real servers; the stages only pretend to work."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipeline.conftest import Workspace
from tests.pipeline.pretended import environment, experiments, git, make_project
from tests.pipeline.served import Served, processes_in, serve

pytestmark = pytest.mark.slow

SECONDS = float(os.environ.get("MARGRPO_TEST_CELL_SECONDS", "10"))
"""How long a cell sleeps."""
KEPT = ("params.yaml", "dvc.lock", "reports/metrics.json", "reports/report.html", "dvc.yaml")
LOCKED = re.compile(
    r"unable to acquire lock|is busy|lockfile|index\.lock|database is locked|traceback", re.IGNORECASE
)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return make_project(tmp_path_factory.mktemp("sweeps") / "project", Path(__file__).parent.parent.parent)


@pytest.fixture(scope="module")
def served(project: Workspace) -> Iterator[Served]:
    root = Path(__file__).parent.parent.parent
    with serve(project.folder, environment(root)) as found:
        yield found


def hashes(project: Workspace) -> dict[str, str]:
    """Return what must not change: the hashes of the user's files, and what git says of them."""
    files = {name: hashlib.sha256((project.folder / name).read_bytes()).hexdigest() for name in KEPT}
    return {**files, "status": git(project.folder, "status", "--porcelain")}


def spans(project: Workspace) -> dict[str, tuple[float, float]]:
    """Return label -> start and end of every training that ran to its end."""
    lines = (project.folder / "trace").read_text().splitlines()
    return {label: (float(start), float(end)) for label, start, end in map(str.split, lines)}


def trainer(project: Workspace, label: str, seconds: float = 300) -> int:
    """Wait until a cell trains and return the pid of its trainer."""
    file = project.folder / "pids" / label
    deadline = time.monotonic() + seconds
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return int(file.read_text())


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def six(name: str) -> dict[str, object]:
    grid = {"trajectories": [2, 3, 4]}
    return {"name": name, "presets": ["mte"], "seeds": [0, 1], "updates": 5, "grid": grid, "max_parallel": 2}


def test_six_cells_two_at_a_time(project: Workspace, served: Served) -> None:
    project.tell(seconds=SECONDS)
    before = hashes(project)
    seen: list[dict[str, str]] = []
    started = time.monotonic()
    run = served.start("ablation-sweep", sweep=six("six"))
    state = served.finish(run, 1200 + 12 * SECONDS, lambda: seen.append(hashes(project)))
    wall = time.monotonic() - started

    assert state["type"] == "COMPLETED", state
    assert state["message"] == "6 cells, 0 of them made before"
    assert all(found == before for found in [*seen, hashes(project)])
    assert len(seen) >= 5
    found = spans(project)
    assert len(found) == 6
    busy = max(sum(start <= moment < end for start, end in found.values()) for moment, _ in found.values())
    assert busy == 2
    tasks = [
        row
        for row in served.api("task_runs/filter", {"task_runs": {"flow_run_id": {"any_": [run]}}})
        if row["name"].startswith("mte-")
    ]
    serial = sum(row["total_run_time"] for row in tasks)
    print(f"six cells: {wall:.0f} s; one after the other {serial:.0f} s; share {wall / serial:.2f}")
    if SECONDS >= 60:  # else starting processes takes most of the time
        assert wall <= 0.6 * serial
    logs = served.logs(run)
    assert "margrpo: mte-1 5/5" in logs
    assert not LOCKED.search(logs)
    for log in (project.folder / ".margrpo/serve").glob("*.log"):
        assert not LOCKED.search(log.read_text()), log

    rows = experiments(project)
    made = {name: row for name, row in rows.items() if name.startswith("six-")}
    assert len(made) == 6
    table = {row["cell"]: row for row in _table(served, run, "six")}
    assert set(table) == {f"mte-{seed}-trajectories={s}" for seed in (0, 1) for s in (2, 3, 4)}
    for label, row in table.items():
        name = row["take over with"].removeprefix("dvc exp apply ")
        seed, trajectories = int(label[4]), int(label[-1])
        reward = 0.3 + 0.01 * seed + 0.02 * trajectories  # as the pretended stage has it
        assert float(row["reward"]) == pytest.approx(reward, abs=1e-4)
        assert float(made[name]["reward"]) == pytest.approx(reward)
        assert int(float(made[name]["variants.mte.trajectories"])) == trajectories
        assert row["delta to base"].startswith(f"{reward - 0.3:+.4f} [")
    keys = served.artifacts(run).keys()
    assert len([key for key in keys if key.startswith("six-mte-")]) == 6  # progress of every cell
    assert "data:image/png;base64," in served.artifacts(run)["sweep-six"]["data"]


def test_killed_and_cancelled_cells_are_made_by_the_next_run(project: Workspace, served: Served) -> None:
    labels = [f"mte-{seed}-trajectories={s}" for s in (2, 3, 4) for seed in (0, 1)]
    for label in labels:  # the pids of the first sweep
        (project.folder / "pids" / label).unlink(missing_ok=True)
    killed, cancelled = labels[-2:]
    project.tell(seconds=SECONDS, lingers=[killed, cancelled])
    before = hashes(project)
    run = served.start("ablation-sweep", sweep=six("again"))
    dvc = parent(trainer(project, killed, 900 + 10 * SECONDS))
    other = trainer(project, cancelled)
    os.kill(dvc, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while "FAILED" not in _task_states(served, run, killed):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    served.cancel(run)
    assert served.finish(run, 120)["type"] == "CANCELLED"
    deadline = time.monotonic() + 20
    while _lives(other):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert processes_in(project.folder / ".margrpo/cells") == []
    assert len([name for name in experiments(project) if name.startswith("again-")]) == 4

    (project.folder / "trace").unlink(missing_ok=True)
    project.tell(seconds=SECONDS)
    state = served.finish(served.start("ablation-sweep", sweep=six("again")), 900 + 10 * SECONDS)
    assert state["type"] == "COMPLETED", state
    assert state["message"] == "6 cells, 4 of them made before"
    assert set(spans(project)) == {killed, cancelled}
    assert len([name for name in experiments(project) if name.startswith("again-")]) == 6
    assert hashes(project) == before


def test_failed_cell_stops_no_other_and_is_named(project: Workspace, served: Served) -> None:
    project.tell(fails=["mte-0-trajectories=3"])
    form = {"name": "fails", "presets": ["mte"], "updates": 5, "grid": {"trajectories": [2, 3, 4]}}
    run = served.start("ablation-sweep", sweep=form)
    state = served.finish(run, 900)
    assert state["type"] == "FAILED"
    assert state["message"].startswith(
        "1 of 3 cells failed: mte-0-trajectories=3 (`dvc exp run` ended with code "
    )
    assert "margrpo: error: this cell was told to fail" in state["message"]
    table = {row["cell"]: row for row in _table(served, run, "fails")}
    assert [row["state"] for row in table.values()] == ["complete", "failed", "complete"]
    assert "this cell was told to fail" in table["mte-0-trajectories=3"]["why"]


def test_wrong_forms_start_nothing(project: Workspace, served: Served) -> None:
    import urllib.error

    for wrong in ({"presets": []}, {"presets": ["nope"]}, {"presets": ["mte"], "max_parallel": 0}):
        with pytest.raises(urllib.error.HTTPError, match="409"):
            served.start("ablation-sweep", sweep=wrong)
    before = experiments(project)
    run = served.start("ablation-sweep", sweep={"presets": ["grpo"], "grid": {"trajectories": [1, 3]}})
    state = served.finish(run, 300)
    assert state["type"] == "FAILED"
    assert state["message"] == (
        "refused, nothing was started: variants.grpo.trajectories: 3; "
        "allowed: 1 with trajectory_source rollout (the rollout has one trajectory)"
    )
    assert experiments(project).keys() == before.keys()


def test_twenty_sweeps_while_cells_run(project: Workspace, served: Served) -> None:
    project.tell(seconds=SECONDS)
    running = served.start("ablation-sweep", sweep={**six("busy"), "seeds": [0]})
    created = [
        served.start("ablation-sweep", sweep={**six("busy"), "seeds": [0], "max_parallel": 1 + i % 3})
        for i in range(20)
    ]
    assert len(set(created)) == 20
    states = [served.finish(run, 3000)["type"] for run in [running, *created]]
    assert states == ["COMPLETED"] * 21
    assert len([name for name in experiments(project) if name.startswith("busy-")]) == 3  # each cell once


def test_second_serve_says_that_one_runs(project: Workspace, served: Served, project_root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", "serve"],
        cwd=project.folder,
        env=environment(project_root),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr == (
        f"margrpo: error: serve: one runs already: Prefect {served.prefect}, MLflow {served.mlflow} "
        f"(process {served.process.pid}); use that\n"
    )


def _table(served: Served, run: str, name: str) -> list[dict[str, str]]:
    import json

    rows: list[dict[str, str]] = json.loads(served.artifacts(run)[f"sweep-{name}-cells"]["data"])
    return rows


def _task_states(served: Served, run: str, label: str) -> list[str]:
    rows = served.api("task_runs/filter", {"task_runs": {"flow_run_id": {"any_": [run]}}})
    return [row["state_type"] for row in rows if row["name"] == label]


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
