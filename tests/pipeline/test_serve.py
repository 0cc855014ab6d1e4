"""`margrpo serve` and `margrpo sweep` before any server starts."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from margrpo.cli import run
from pipeline import cli, processes, servers
from pipeline.servers import State
from tests.pipeline.conftest import Workspace
from tests.pipeline.pretended import make_project


@pytest.fixture
def project(tmp_path: Path, project_root: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    made = make_project(tmp_path / "project", project_root)
    monkeypatch.chdir(made.folder)
    monkeypatch.delenv("MARGRPO_HOME", raising=False)
    return made


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(cli.app, list(arguments)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    return printed.err.removeprefix("margrpo: error: ").strip()


def test_taken_port_is_named(project: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for option in ("--prefect-port", "--mlflow-port"):
            message = error_of(capsys, "serve", option, str(port))
            assert (
                message
                == f"{option}: port {port} of 127.0.0.1 is taken (Address already in use); give another"
            )
    assert servers.read_state(project.folder) is None


def test_second_serve_names_the_first(project: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    with processes.exclusive(project.folder / ".margrpo/locks/serve.lock"):
        assert "one is starting or stopping" in error_of(capsys, "serve")
        api, mlflow = "http://127.0.0.1:1/api", "http://127.0.0.1:2"
        state = State(**processes.identity(), api=api, prefect="http://127.0.0.1:1", mlflow=mlflow)
        servers.write_state(project.folder, state)
        assert error_of(capsys, "serve") == (
            "serve: one runs already: Prefect http://127.0.0.1:1, MLflow http://127.0.0.1:2 "
            f"(process {state.pid}); use that"
        )


def test_state_of_a_dead_process_counts_as_nothing(project: Workspace) -> None:
    dead = {**processes.identity(), "started": 1}
    servers.write_state(project.folder, State(**dead, api="a", prefect="b", mlflow="c"))
    assert json.loads(servers.state_file(project.folder).read_text())["started"] == 1
    assert servers.read_state(project.folder) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mtee"], "presets: mtee; allowed: grpo, "),
        (["mte", "--seeds", "0,x"], "seeds.1: x; allowed: "),
        (["mte", "--grid", "trajectories"], "--grid: trajectories; allowed: key=value,value"),
        (["mte", "--grid", "trajectories=1,[3"], "--grid trajectories: not YAML"),
        (["grpo", "--grid", "trajectories=3"], "variants.grpo.trajectories: 3; allowed: 1 with"),
        (["mte", "--set", "train.updates=0"], "train.updates: 0; allowed: integer >= 1"),
        (["mte", "--profile", "smok"], "profile: smok; allowed: smoke, "),
    ],
)
def test_sweep_refuses_what_the_form_refuses(
    project: Workspace, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert error_of(capsys, "sweep", *arguments).startswith(message)
    assert not (project.folder / ".margrpo/cells").exists()


def test_plan_of_a_sweep_is_printed(project: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "sweep",
        "mte",
        "--name",
        "tau",
        "--seeds",
        "0,1",
        "--grid",
        "consistency=null,0.01",
        "--plan",
    ]
    assert run(cli.app, [*arguments, "--updates", "6"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "margrpo: train.milestone 38 lies after 6 updates: dropped"
    assert [line.rpartition("-")[0] for line in lines[1:]] == [
        f"tau-mte-{seed}-consistency={tau}" for tau in ("null", "0.01") for seed in (0, 1)
    ]


def test_folder_that_is_no_project_is_refused(
    in_folder: Path, project_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (in_folder / "params.yaml").write_bytes((project_root / "params.yaml").read_bytes())
    for command in (["serve"], ["sweep", "mte"]):
        assert "no dvc.yaml here" in error_of(capsys, *command)
