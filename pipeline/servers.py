"""The servers of `margrpo serve`: which ones run for a project, free ports, and whether they answer."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path

from margrpo.checkpoints import write_atomic
from margrpo.errors import MargrpoError
from pipeline import processes

HOST = "127.0.0.1"


@dataclass(frozen=True)
class State:
    """What runs: the process of `margrpo serve`, Prefect's API and UI, MLflow's UI."""

    pid: int
    started: int
    boot_id: str
    api: str
    prefect: str
    mlflow: str

    @property
    def alive(self) -> bool:
        """Whether that process still runs."""
        return processes.is_alive({"pid": self.pid, "started": self.started, "boot_id": self.boot_id})


def state_file(project: Path) -> Path:
    """Return where the state of a project's servers is kept."""
    return project / ".margrpo" / "serve.json"


def read_state(project: Path) -> State | None:
    """Return what serves a project now; None if nothing does."""
    try:
        state = State(**json.loads(state_file(project).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return state if state.alive else None


def write_state(project: Path, state: State) -> None:
    """Let other commands of the project know what runs."""
    write_atomic(state_file(project), json.dumps(asdict(state), indent=1).encode())


def check_port(option: str, port: int) -> None:
    """Refuse a port that somebody listens on.

    Raises:
        MargrpoError: the port is taken.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that was just closed is free
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise MargrpoError(
                f"{option}: port {port} of {HOST} is taken ({error.strerror}); give another"
            ) from None


def answers(url: str, seconds: float = 5.0) -> bool:
    """Return whether a server answers a GET with success."""
    try:
        with urllib.request.urlopen(url, timeout=seconds) as response:
            return bool(200 <= response.status < 300)
    except (OSError, urllib.error.URLError, ValueError):
        return False
