"""A project whose stages only pretend to work, quickly, but write results that a sweep can read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from margrpo.params import load_params
from tests.pipeline.conftest import Workspace

# Runs as `python fake_stage.py VERB [RUN]`; the reward of a run depends on its params alone.
STAGE = """
import json, os, sys, time
from pathlib import Path
import yaml
verb, run = (*sys.argv[1:], "")[:2]
params = yaml.safe_load(open("params.yaml"))
home = Path(os.environ["MARGRPO_HOME"])
told = json.loads((home / "fake.json").read_text())
label = os.environ.get("DVC_EXP_NAME", "").partition("-")[2].rpartition("-")[0]
cell = params["study"]["runs"].get(run, {})
switches = {**params["objective"], **params["variants"].get(cell.get("variant"), {})}
reward = 0.3 + 0.01 * cell.get("seed", 0) + 0.02 * switches.get("trajectories", 1)
def write(path, text):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)
if verb == "prompts":
    write("artifacts/prompts/train.jsonl", "{}")
elif verb == "checkpoint":
    write("artifacts/base/policy.safetensors", "base")
elif verb == "train":
    sys.path.insert(0, "ROOT")
    from pipeline import processes
    processes.die_with_parent()  # as the real one does
    updates = params["train"]["updates"]
    print(f"margrpo: {run} of a {switches.get('trajectories')}", flush=True)
    if label in told.get("lingers", []):
        print(f"margrpo: {run} lingers", flush=True)
        write(home / "pids" / label, str(os.getpid()))
        time.sleep(3600)
    lines = ["update,reward"]
    write(home / "pids" / label, str(os.getpid()))
    for update in range(1, updates + 1):
        time.sleep(told.get("seconds", 0) / updates)
        lines.append(f"{update},{reward + 0.001 * update}")
        write(f"reports/runs/{run}/metrics.csv", "\\n".join(lines) + "\\n")
        print(f"margrpo: {run} {update}/{updates}", flush=True)
    if label in told.get("fails", []):
        sys.exit("margrpo: error: this cell was told to fail")
    for name in ("last", "best", "milestone"):
        write(f"artifacts/runs/{run}/{name}.safetensors", f"{run} {reward}")
    write(f"reports/runs/{run}/timing.csv", "update,core_s\\n")
    with open(home / "trace", "a") as trace:
        trace.write(f"{label} {time.time() - told.get('seconds', 0)} {time.time()}\\n")
elif verb == "diagnose":
    write("reports/diagnose/noise.csv", "variant\\n")
elif verb == "evaluate":
    mine = 0.3 if run == "base" else reward
    measured = {"reward": mine}
    write(f"reports/evaluation/{run}/metrics.json", json.dumps({"last": {"ode": measured, "sde": measured}}))
    rows = [f"last,{s},prompt {i},{mine + 0.01 * (i % 3)}" for s in ("ode", "sde") for i in range(8)]
    write(f"reports/evaluation/{run}/benchmarks.csv", "benchmark\\n")
    write(f"reports/evaluation/{run}/prompts.csv", "\\n".join(["checkpoint,sampler,prompt,reward", *rows]) + "\\n")
else:
    own = next(iter(params["study"]["runs"]))
    measured = json.load(open(f"reports/evaluation/{own}/metrics.json"))
    write("reports/metrics.json", json.dumps({"reward": measured["last"]["sde"]["reward"]}))
    write("reports/report.html", own)
graph = yaml.safe_load(open("dvc.yaml"))["stages"]
stage = graph["evaluate_base"] if run == "base" else graph[verb].get("do", graph[verb])
for entry in [out for kind in ("outs", "metrics", "plots") for out in stage.get(kind, [])]:
    path = Path((entry if isinstance(entry, str) else next(iter(entry))).replace("${key}", run))
    if not path.exists():
        write(path if path.suffix else path / "a.png", "{}")
"""


def make_project(folder: Path, root: Path) -> Workspace:
    """Return a git repository with the real params and graph, committed results, and pretended stages."""
    (folder / ".dvc").mkdir(parents=True)
    for name in (".dvc/config", ".dvc/.gitignore", ".gitignore", "params.yaml"):
        (folder / name).write_bytes((root / name).read_bytes())
    with open(folder / ".gitignore", "a") as ignored:
        ignored.write("/pids/\n/trace\n/fake.json\n")
    graph = YAML(typ="safe").load((root / "dvc.yaml").read_text())
    graph["vars"] = [{"stage": f"exec {sys.executable} fake_stage.py"}]
    with open(folder / "dvc.yaml", "w") as file:
        YAML().dump(graph, file)
    for stage in graph["stages"].values():
        for dependency in stage.get("do", stage)["deps"]:
            if dependency.startswith(("margrpo/", "pipeline/")):
                stand_in = folder / dependency
                stand_in = stand_in if stand_in.suffix else stand_in / "code.txt"
                stand_in.parent.mkdir(parents=True, exist_ok=True)
                stand_in.write_text(dependency)
    (folder / "fake_stage.py").write_text(STAGE.replace("ROOT", str(root)))
    results = {"reports/metrics.json": '{"reward": 0.123}\n', "reports/report.html": "the user's report\n"}
    for name, text in {**results, "dvc.lock": "schema: '2.0'\n"}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    project = Workspace(folder)
    project.tell()
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "first")
    return project


def git(folder: Path, *arguments: str) -> str:
    """Run git and return what it printed."""
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    return subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout


def experiments(project: Workspace) -> dict[str, dict[str, Any]]:
    """Return what `dvc exp show` lists: name -> its row."""
    import csv
    import io

    rows = csv.DictReader(io.StringIO(project.dvc("exp", "show", "--csv")))
    return {row["Experiment"]: row for row in rows if row["typ"] in ("branch_commit", "branch_base")}


def environment(root: Path, **more: str) -> dict[str, str]:
    """Return an environment in which the code of this repository runs in another folder."""
    return {**os.environ, "PYTHONPATH": str(root), "SHELL": "/bin/sh", **more}


__all__ = ["environment", "experiments", "git", "load_params", "make_project"]
