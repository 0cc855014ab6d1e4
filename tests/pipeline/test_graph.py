"""The stage graph: what there is, what a change makes stale, which code it depends on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from pipeline.graph import read_graph
from tests.pipeline.conftest import Workspace

RUNS = ["mar_grpo-0", "mar_grpo-1", "grpo-0"]
# They only carry params, which DVC compares itself, or names.
POLICIES = ["policies.tiny", "policies.families", "policies.mar", "policies.harmon", "policies.nova"]
ON_DEMAND = {"policies/nova/sampling.py"}  # imported when an option asks for it
NO_RESULT = {"config.py", "params.py", "progress.py", "scoring.py", "sources.py", "switches.py", "errors.py"}


def stale(workspace: Workspace) -> set[str]:
    return {stage.name for stage in read_graph(workspace.folder) if stage.stale}


def test_every_stage_comes_after_what_it_needs(workspace: Workspace) -> None:
    stages = read_graph(workspace.folder)
    names = [stage.name for stage in stages]
    needs = {stage.name: set(stage.needs) for stage in stages}

    assert len(names) == 5 + 2 * len(RUNS)
    assert all(names.index(other) < names.index(name) for name, others in needs.items() for other in others)
    assert needs["prompts"] == set()
    assert needs["checkpoint"] == set()
    assert needs["train@grpo-0"] == {"prompts", "checkpoint"}
    assert needs["diagnose"] == {"prompts", "checkpoint"}
    assert needs["evaluate@grpo-0"] == {"prompts", "checkpoint", "train@grpo-0"}
    assert needs["evaluate_base"] == {"prompts", "checkpoint"}
    assert needs["report"] >= {
        "evaluate_base",
        "diagnose",
        *(f"{verb}@{run}" for run in RUNS for verb in ("train", "evaluate")),
    }
    assert all(stage.stale for stage in stages)


def test_what_a_change_makes_stale(workspace: Workspace) -> None:
    workspace.dvc("repro", "--quiet")
    assert len(workspace.trace()) == 5 + 2 * len(RUNS)
    assert stale(workspace) == set()
    original = (workspace.folder / "params.yaml").read_bytes()
    trains = {f"train@{run}" for run in RUNS}
    evaluations = {f"evaluate@{run}" for run in RUNS}

    def after(*overrides: str) -> set[str]:
        workspace.change(*overrides)
        found = stale(workspace)
        (workspace.folder / "params.yaml").write_bytes(original)
        return found

    of_variant = {f"{verb}@mar_grpo-{seed}" for verb in ("train", "evaluate") for seed in (0, 1)}
    assert after("variants.mar_grpo.trajectories=5") == of_variant | {"diagnose", "report"}
    assert after("train.updates=60") == trains | evaluations | {"report"}
    assert after("train.images_per_prompt=4") == trains | evaluations | {"diagnose", "report"}
    assert after("objective.beta=0.02") == trains | evaluations | {"diagnose", "report"}
    assert after("evaluation.guidance=2") == {"evaluate_base", "report"} | trains | evaluations
    assert after("evaluation.images_per_prompt=4") == {"evaluate_base", "report"} | evaluations
    assert after("report.level=0.9") == {"report"}
    assert after("tracking.experiment=other") == set()
    assert after("profiles.smoke.train.updates=7") == set()
    assert (
        after("pretrain.steps=7")
        == {"checkpoint", "diagnose", "evaluate_base", "report"} | trains | evaluations
    )

    def after_editing(file: str) -> set[str]:
        path = workspace.folder / file
        before = path.read_text()
        path.write_text("changed")
        found = stale(workspace)
        path.write_text(before)
        return found

    assert after_editing("margrpo/cli.py") == set()
    assert (
        after_editing("margrpo/policies/code.py")
        == {"checkpoint", "diagnose", "evaluate_base", "report"} | trains | evaluations
    )
    assert after_editing("margrpo/objective.py") == trains | evaluations | {"diagnose", "report"}
    assert after_editing("margrpo/evaluation.py") == {"evaluate_base", "report"} | evaluations
    assert after_editing("pipeline/report/code.py") == {"report"}

    workspace.dvc("repro", "--quiet")
    assert workspace.trace() == {}
    workspace.change("variants.mar_grpo.trajectories=5")
    workspace.dvc("repro", "--quiet")
    assert set(workspace.trace()) == of_variant | {"diagnose", "report"}


@pytest.mark.parametrize(
    ("stage", "modules"),
    [
        ("prompts", ["benchmarks.scenes", "prompts"]),
        ("checkpoint", ["base", "checkpoints", "pretrain", *POLICIES]),
        ("train", ["trainer", "prompts", *POLICIES]),
        ("diagnose", ["diagnose", "maps", "prompts", *POLICIES]),
        ("evaluate", ["evaluation", "prompts", *POLICIES]),
        ("evaluate_base", ["evaluation", "prompts", *POLICIES]),
    ],
)
def test_stages_depend_on_the_code_they_run(stage: str, modules: list[str], project_root: Path) -> None:
    graph = YAML(typ="safe").load((project_root / "dvc.yaml").read_text())["stages"][stage]
    paths = [project_root / name for name in graph.get("do", graph)["deps"] if name.startswith("margrpo/")]
    named = [file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])]
    package = project_root / "margrpo"
    listed = {str(file.relative_to(package)) for file in named if file.suffix == ".py"}
    listed -= {name for name in listed if name.endswith("__init__.py")}
    program = (
        f"import sys; {'; '.join(f'import margrpo.{name}' for name in modules)}\n"
        "print(*(m.__file__ for n, m in sys.modules.items() if n.startswith('margrpo.')), sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=project_root, check=True
    )
    files = {str(Path(line).relative_to(project_root / "margrpo")) for line in done.stdout.splitlines()}
    run = {file for file in files if file not in NO_RESULT and not file.endswith("__init__.py")}

    assert run - listed == set(), "add these to the deps of the stage in dvc.yaml"
    assert listed - run - ON_DEMAND == set(), "the stage does not use these"
