"""The Prefect flow over a workspace whose stages only pretend to work."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline import processes
from pipeline.graph import Stage
from pipeline.progress import Progress, duration
from pipeline.reproduce import prepare_prefect
from tests.pipeline.conftest import Workspace


@pytest.fixture(scope="module")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A Prefect server of these tests alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_HOME", str(tmp_path_factory.mktemp("prefect")))
        prepare_prefect(Path.cwd())
        from prefect.testing.utilities import prefect_test_harness

        with prefect_test_harness(server_startup_timeout=120):
            yield


def test_flow_runs_stages_in_order_and_side_by_side(prefect_server: None, workspace: Workspace) -> None:
    from pipeline.flows import reproduce

    workspace.tell(seconds=1.0)
    state = reproduce(workspace.folder, workers=2, return_state=True)

    assert state.is_completed()
    trace = workspace.trace()
    assert len(trace) == 11
    for run in ("mar_grpo-0", "mar_grpo-1", "grpo-0"):
        assert trace[f"train@{run}"][0] >= max(trace["prompts"][1], trace["checkpoint"][1])
        assert trace[f"evaluate@{run}"][0] >= trace[f"train@{run}"][1]
    assert trace["report"][0] >= max(end for name, (_, end) in trace.items() if name != "report")

    def overlap(first: str, second: str) -> float:
        return min(trace[first][1], trace[second][1]) - max(trace[first][0], trace[second][0])

    assert overlap("train@mar_grpo-0", "train@mar_grpo-1") > 0
    busy = max(sum(start <= moment < end for start, end in trace.values()) for moment, _ in trace.values())
    assert busy == 2  # the number of workers

    assert workspace.dvc("status") == "Data and pipelines are up to date.\n"
    assert reproduce(workspace.folder, workers=2, return_state=True).is_completed()
    assert workspace.trace() == {}


def test_failed_stage_stops_only_what_needs_it(
    prefect_server: None, workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    from pipeline.flows import reproduce

    workspace.tell(fails=["train@mar_grpo-0"])
    state = reproduce(workspace.folder, workers=2, return_state=True)

    assert state.is_failed()
    assert state.message == "failed: evaluate@mar_grpo-0, report, train@mar_grpo-0"
    ran = set(workspace.trace())
    assert {"evaluate@mar_grpo-1", "evaluate@grpo-0", "evaluate_base"} <= ran
    assert not {"evaluate@mar_grpo-0", "report"} & ran
    printed = capsys.readouterr()
    assert "[train@mar_grpo-0] this stage was told to fail" in printed.out
    assert "Traceback" not in printed.out + printed.err

    workspace.tell()
    assert reproduce(workspace.folder, workers=2, return_state=True).is_completed()
    assert set(workspace.trace()) == {"train@mar_grpo-0", "evaluate@mar_grpo-0", "report"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_stopping_the_flow_stops_every_process(
    number: signal.Signals, prefect_server: None, workspace: Workspace, project_root: Path
) -> None:
    from prefect.settings import PREFECT_API_URL

    workspace.tell(lingers=["prompts"])
    environment = {**os.environ, "PREFECT_API_URL": PREFECT_API_URL.value(), "PYTHONPATH": str(project_root)}
    flow = subprocess.Popen(
        [sys.executable, "-m", "pipeline", "reproduce"],
        cwd=workspace.folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # a test run in the background of a shell ignores Ctrl-C and would pass that on
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    pid_file = workspace.folder / "lingering.pid"
    deadline = time.monotonic() + 300  # a busy machine
    while not (pid_file.exists() and pid_file.read_text()):
        assert time.monotonic() < deadline
        assert flow.poll() is None, flow.communicate()[0]
        time.sleep(0.1)
    child = processes.identity(int(pid_file.read_text()))
    stage = processes.identity(_parent(child["pid"]))
    dvc = processes.identity(_parent(stage["pid"]))
    assert processes.is_alive(child)

    flow.send_signal(number)
    output, _ = flow.communicate(timeout=120)

    assert flow.returncode == {signal.SIGINT: 130, signal.SIGTERM: -15, signal.SIGKILL: -9}[number]
    assert "Traceback" not in output
    # The kernel tells only the children of a killed process; a real stage then ends with DVC.
    watched = [dvc] if number == signal.SIGKILL else [dvc, stage, child]
    deadline = time.monotonic() + 20
    while any(processes.is_alive(process) for process in watched):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    for left in (stage, child):
        if processes.is_alive(left):
            os.kill(left["pid"], signal.SIGKILL)


def test_second_reproduction_waits_for_the_first(workspace: Workspace, project_root: Path) -> None:
    workspace.dvc("repro", "--quiet")  # nothing is left to do: Prefect is not needed
    workspace.trace()
    lock = workspace.folder / ".margrpo/locks/reproduce-project.lock"
    with processes.exclusive(lock):
        second = subprocess.Popen(
            [sys.executable, "-m", "pipeline", "reproduce"],
            cwd=workspace.folder,
            env={**os.environ, "PYTHONPATH": str(project_root)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert second.stderr is not None
        assert second.stderr.readline() == "margrpo: another reproduction of . is running; waiting\n"
    output, error = second.communicate(timeout=60)
    assert second.returncode == 0, error
    assert output.startswith("margrpo: up to date after ")
    assert "report   reports/report.html" in output
    assert workspace.trace() == {}


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_progress_estimates_the_rest_from_what_ran() -> None:
    stages = [
        Stage("prompts", frozenset(), False),
        *(Stage(f"train@{i}", frozenset(), True) for i in range(3)),
    ]
    stream = io.StringIO()
    progress = Progress(stages, workers=2, stream=stream)
    assert progress.seconds_left() is None
    progress.start(stages[1])
    progress.started["train@0"] -= 60.0
    progress.finish("train@0", True, "")
    assert progress.seconds_left() == pytest.approx(60.0, abs=0.5)  # two stages of 60 s, two workers
    progress.line("train@1", "hello")
    progress.start(stages[2])
    progress.finish("train@1", False, "code 2")
    progress.close()
    assert stream.getvalue().splitlines() == [
        "[2/4] train@0 done in 1 min 00 s, about 1 min 00 s left",
        "[train@1] hello",
        "[3/4] train@1 FAILED (code 2), about 30 s left",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (60, "1 min 00 s"), (3725, "62 min 05 s")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
