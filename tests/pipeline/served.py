"""`margrpo serve` of a test's project, and what a test asks its servers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "CRASHED")


@dataclass(frozen=True)
class Served:
    """The servers of a project."""

    process: subprocess.Popen[str]
    prefect: str
    mlflow: str

    def api(self, path: str, content: dict[str, Any] | None = None) -> Any:
        """Ask Prefect's API: GET, or POST with content."""
        data = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(
            f"{self.prefect}/api/{path}", data, {"Content-Type": "application/json"}
        )
        for pause in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, None):
            try:
                with urllib.request.urlopen(request, timeout=60) as response:
                    return json.load(response)
            except urllib.error.HTTPError as error:
                # SQLite was locked and nothing was written; Prefect's own client asks again too
                if error.code != 503 or pause is None:
                    raise
                time.sleep(pause)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def deployment(self, name: str) -> str:
        """Return the id of a deployment."""
        found = {row["name"]: row["id"] for row in self.api("deployments/filter", {})}
        return str(found[name])

    def start(self, deployment: str, **parameters: Any) -> str:
        """Create a flow run as the UI does; return its id."""
        run = self.api(
            f"deployments/{self.deployment(deployment)}/create_flow_run", {"parameters": parameters}
        )
        return str(run["id"])

    def state(self, run: str) -> dict[str, Any]:
        """Return the state of a flow run."""
        state: dict[str, Any] = self.api(f"flow_runs/{run}")["state"]
        return state

    def finish(
        self, run: str, seconds: float, meanwhile: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """Wait until a flow run has ended and return its state."""
        deadline = time.monotonic() + seconds
        while True:
            state = self.state(run)
            if state["type"] in ENDED:
                return state
            assert time.monotonic() < deadline, state
            meanwhile()
            time.sleep(1.0)

    def cancel(self, run: str) -> None:
        """Cancel a flow run as the UI does."""
        self.api(f"flow_runs/{run}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}})

    def artifacts(self, run: str) -> dict[str, dict[str, Any]]:
        """Return the artifacts of a flow run by key."""
        rows = self.api("artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run]}}, "limit": 200})
        return {row["key"]: row for row in rows}

    def logs(self, run: str) -> str:
        """Return all that a flow run and its tasks have logged."""
        text: list[str] = []
        while True:
            rows = self.api(
                "logs/filter",
                {"logs": {"flow_run_id": {"any_": [run]}}, "limit": 200, "offset": len(text)},
            )
            text += [row["message"] for row in rows]
            if not rows:
                return "\n".join(text)


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serve(folder: Path, environment: dict[str, str]) -> Iterator[Served]:
    """Run `margrpo serve` in a folder; at the end, Ctrl-C must stop all of it."""
    ports = [free_port(), free_port()]
    command = [sys.executable, "-m", "pipeline", "serve"]
    process = subprocess.Popen(
        [*command, "--prefect-port", str(ports[0]), "--mlflow-port", str(ports[1])],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        lines = [process.stdout.readline() for _ in range(3)]
        assert lines == [
            f"Prefect  http://127.0.0.1:{ports[0]}\n",
            f"MLflow   http://127.0.0.1:{ports[1]}\n",
            "Next: open Prefect, Deployments, ablation-sweep, Run, Custom run. Ctrl-C here stops all of it.\n",
        ], "".join(lines) + process.stdout.read()
        yield Served(process, f"http://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=300) == 130
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(timeout=300)
    assert processes_in(folder) == []


def processes_in(folder: Path) -> list[str]:
    """Return the command lines of processes that work in or below a folder, but for MLflow's follower."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            where = Path(os.readlink(entry / "cwd"))
            text = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if where.is_relative_to(folder.resolve()) and "pipeline.tracking" not in text and text:
            found.append(text)
    return found
