"""A small workspace with the real dvc.yaml whose stages only pretend to work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from margrpo.params import load_params

# Runs in the workspace as `python fake_stage.py VERB [RUN]`; its behaviour is told by fake.json.
FAKE_STAGE = """
import json, os, subprocess, sys, time
verb, run = (*sys.argv[1:], "")[:2]
name = f"{verb}@{run}" if run not in ("", "base") else (f"{verb}_base" if run else verb)
told = json.load(open("fake.json"))
if name in told.get("lingers", []):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open("lingering.pid", "w").write(str(child.pid))
    time.sleep(600)
with open("trace.jsonl", "a") as trace:
    trace.write(json.dumps([name, "start", time.time()]) + "\\n")
print("hello from", name, flush=True)
time.sleep(told.get("seconds", 0))
outs = {
    "prompts": [f"artifacts/prompts/{x}" for x in ("train.jsonl", "validation.jsonl", "test.jsonl", "manifest.json")],
    "checkpoint": ["artifacts/base/policy.safetensors", "artifacts/base/policy.json"],
    "train": [f"artifacts/runs/{run}/{x}.safetensors" for x in ("last", "best", "milestone")]
    + [f"artifacts/runs/{run}/validation/000010.png"]
    + [f"reports/runs/{run}/{x}" for x in ("metrics.csv", "timing.csv", "summary.json")],
    "diagnose": ["reports/diagnose/noise.csv", "reports/diagnose/maps.safetensors"],
    "evaluate": [f"reports/evaluation/{run}/{x}.csv" for x in ("prompts", "benchmarks")]
    + [f"reports/evaluation/{run}/{x}" for x in ("metrics.json", "grid.png")],
    "report": ["reports/" + x for x in ("report.html", "report.md", "results.csv", "metrics.json", "figures/a.png")],
}[verb]
for out in outs:
    os.makedirs(os.path.dirname(out), exist_ok=True)
    with open(out, "w") as file:
        file.write("{}" if out.endswith(".json") else f"{name} {open('params.yaml').read()}")
with open("trace.jsonl", "a") as trace:
    trace.write(json.dumps([name, "end", time.time()]) + "\\n")
if name in told.get("fails", []):
    sys.exit("this stage was told to fail")
"""


@dataclass(frozen=True)
class Workspace:
    """A folder with dvc.yaml, params.yaml and stand-ins for code."""

    folder: Path

    def tell(self, **behaviour: Any) -> None:
        """Set how the pretended stages behave: seconds, fails, lingers."""
        (self.folder / "fake.json").write_text(json.dumps(behaviour))

    def change(self, *overrides: str) -> None:
        """Change keys of params.yaml."""
        _write_yaml(self.folder / "params.yaml", load_params(self.folder / "params.yaml", overrides))

    def trace(self) -> dict[str, tuple[float, float]]:
        """Return start and end of every stage that ran to its end since the last call."""
        file = self.folder / "trace.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        events = {(name, what): when for name, what, when in map(json.loads, lines)}
        ended = [name for name, what in events if what == "end"]
        return {name: (events[name, "start"], events[name, "end"]) for name in ended}

    def dvc(self, *arguments: str) -> str:
        """Run dvc and return what it printed."""
        environment = {**os.environ, "SHELL": "/bin/sh"}
        done = subprocess.run(
            [sys.executable, "-m", "dvc", *arguments],
            cwd=self.folder,
            capture_output=True,
            text=True,
            env=environment,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def _write_yaml(path: Path, content: Any) -> None:
    with open(path, "w") as file:
        YAML().dump(content, file)


@pytest.fixture
def workspace(tmp_path: Path, project_root: Path) -> Workspace:
    """Return a workspace of three runs: mar_grpo-0, mar_grpo-1, grpo-0."""
    folder = tmp_path / "workspace"
    (folder / ".dvc").mkdir(parents=True)
    (folder / ".dvc" / "config").write_bytes((project_root / ".dvc" / "config").read_bytes())
    (folder / ".gitignore").write_bytes((project_root / ".gitignore").read_bytes())
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    runs = {
        f"{variant}-{seed}": {"variant": variant, "seed": seed}
        for variant, seed in [("mar_grpo", 0), ("mar_grpo", 1), ("grpo", 0)]
    }
    params = load_params(project_root / "params.yaml")
    params["study"]["runs"] = runs
    _write_yaml(folder / "params.yaml", params)
    (folder / "fake_stage.py").write_text(FAKE_STAGE)
    graph = YAML(typ="safe").load((project_root / "dvc.yaml").read_text())
    graph["vars"] = [{"stage": f"exec {sys.executable} fake_stage.py"}]
    _write_yaml(folder / "dvc.yaml", graph)
    for stage in graph["stages"].values():
        for dependency in stage.get("do", stage)["deps"]:
            if dependency.startswith(("margrpo/", "pipeline/")):
                stand_in = folder / dependency
                stand_in = stand_in if stand_in.suffix else stand_in / "code.py"
                stand_in.parent.mkdir(parents=True, exist_ok=True)
                stand_in.write_text(dependency)
    (folder / "margrpo" / "cli.py").write_text("no stage depends on this")
    made = Workspace(folder)
    made.tell()
    return made
