"""`margrpo serve`: Prefect's server, MLflow's UI and the deployments, on loopback, started and stopped together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from margrpo.errors import MargrpoError
from margrpo.params import load_config
from pipeline import paths, processes
from pipeline.reproduce import prepare_prefect
from pipeline.servers import HOST, State, answers, check_port, read_state, state_file, write_state

START_SECONDS = 300.0  # the first start creates databases; minutes on a busy machine
STOP_SECONDS = 60.0
_POLL_SECONDS = 0.5


def serve(project: Path, prefect_port: int, mlflow_port: int) -> None:
    """Start what is missing, wait until all of it answers, print where, and stop all of it on Ctrl-C.

    Raises:
        MargrpoError: params are wrong, a second one, a taken port, or a server that ends by itself.
    """
    config = load_config(project / paths.PARAMS)
    if not (project / "dvc.yaml").is_file():
        raise MargrpoError(f"{project}: no dvc.yaml here; run this in the folder of the project")
    os.environ["MARGRPO_HOME"] = str(project)
    with ExitStack() as stack:
        if not stack.enter_context(processes.try_exclusive(paths.state("locks", "serve.lock"))):
            raise MargrpoError(_says_running(project))
        api = os.environ.get("PREFECT_API_URL", "").rstrip("/")
        if not api:
            check_port("--prefect-port", prefect_port)
        check_port("--mlflow-port", mlflow_port)
        given, api = bool(api), api or f"http://{HOST}:{prefect_port}/api"
        prepare_prefect(project, api)
        uri = config.tracking.uri or f"sqlite:///{project / 'mlflow.db'}"
        remote = uri.rstrip("/") if uri.startswith(("http:", "https:")) else ""
        mlflow = remote or f"http://{HOST}:{mlflow_port}"
        servers = _Servers()
        with _stops(servers):
            if not given:
                servers.start("prefect", _prefect_command(prefect_port))
            if not remote:
                servers.start("mlflow", _mlflow_command(project, uri, mlflow_port))
            servers.wait("Prefect", lambda: answers(f"{api}/health"))
            servers.wait("MLflow", lambda: answers(f"{mlflow}/health"))
            state = State(**processes.identity(), api=api, prefect=api.removesuffix("/api"), mlflow=mlflow)
            write_state(project, state)
            stack.callback(state_file(project).unlink, missing_ok=True)
            ready = paths.state("serve", "ready")
            ready.unlink(missing_ok=True)
            servers.start("deployments", [sys.executable, "-m", "pipeline.deployments", str(ready)])
            servers.wait("the deployments", ready.exists)
            print(
                f"Prefect  {state.prefect}\nMLflow   {mlflow}\n"
                "Next: open Prefect, Deployments, ablation-sweep, Run, Custom run. Ctrl-C here stops all of it.",
                flush=True,
            )
            servers.watch()


def _says_running(project: Path) -> str:
    state = read_state(project)
    if state is None:
        return "serve: one is starting or stopping in this project; wait a moment"
    return f"serve: one runs already: Prefect {state.prefect}, MLflow {state.mlflow} (process {state.pid}); use that"


def _prefect_command(port: int) -> list[str]:
    return [sys.executable, "-m", "prefect", "server", "start", "--host", HOST, "--port", str(port)]


def _mlflow_command(project: Path, uri: str, port: int) -> list[str]:
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--host",
        HOST,
        "--port",
        str(port),
        "--workers",
        "1",
    ]
    artifacts = (project / "mlartifacts").as_uri()
    return [*command, "--backend-store-uri", uri, "--default-artifact-root", artifacts]


class _Servers:
    """Processes that run until this one stops them."""

    def __init__(self) -> None:
        self.running: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str, command: list[str]) -> None:
        """Start a server; its output goes to a log."""
        log = _log(name)
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ,
            "PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED": "true",
            "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        }
        with open(log, "w", encoding="utf-8") as output:
            self.running[name] = processes.start_group(command, Path.cwd(), environment, output)

    def wait(self, what: str, ready: Callable[[], bool]) -> None:
        """Wait until a server is ready.

        Raises:
            MargrpoError: it is not in time, or one ended.
        """
        deadline = time.monotonic() + START_SECONDS
        while not ready():
            self.check()
            if time.monotonic() > deadline:
                raise MargrpoError(
                    f"serve: {what} does not answer after {START_SECONDS:.0f} s; see {_log('*')}"
                )
            time.sleep(_POLL_SECONDS)

    def check(self) -> None:
        """Raise MargrpoError if a server has ended."""
        for name, process in self.running.items():
            code = process.poll()
            if code is not None:
                raise MargrpoError(f"serve: {name} ended with code {code}; see {_log(name)}")

    def watch(self) -> None:
        """Wait for Ctrl-C, or for a server that ends."""
        while True:
            self.check()
            time.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        """End all servers, the last one first: it cancels the flow runs, for which it needs the others."""
        for process in reversed(self.running.values()):
            processes.stop_group(process, STOP_SECONDS)
        self.running.clear()


def _log(name: str) -> Path:
    return Path(os.path.relpath(paths.state("serve", f"{name}.log")))


@contextmanager
def _stops(servers: _Servers) -> Iterator[None]:
    """Stop the servers at the end, also on SIGTERM; a second signal does not interrupt that."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        servers.stop()
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, signal.default_int_handler)
