"""What a cell's clone holds, what comes back, and that the user's folder is only read."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from margrpo.errors import MargrpoError
from margrpo.params import load_config, load_params
from pipeline.scratch import cache_folder
from pipeline.sweeps import cells, slots
from pipeline.sweeps.form import read_form
from pipeline.sweeps.plan import Cell, make_plan
from pipeline.sweeps.snapshot import checkout, code_digest, fetch, take
from tests.pipeline.conftest import Workspace
from tests.pipeline.pretended import experiments, git, make_project


@pytest.fixture
def project(tmp_path: Path, project_root: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    made = make_project(tmp_path / "project", project_root)
    monkeypatch.setenv("MARGRPO_HOME", str(made.folder))
    return made


def contents(folder: Path) -> dict[str, bytes]:
    found = [path for path in folder.rglob("*") if path.is_file() and ".git" not in path.parts]
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in found if ".margrpo" not in path.parts
    }


def cell_of(project: Workspace, **values: Any) -> Cell:
    return make_plan(read_form(values), project.folder / "params.yaml", "code").cells[0]


def test_snapshot_has_uncommitted_changes_and_reads_only(project: Workspace, tmp_path: Path) -> None:
    folder = project.folder
    clean = take(folder)
    assert not clean.dirty
    (folder / "fake_stage.py").write_text("# changed\n")
    (folder / "pipeline/new.py").write_text("# new\n")
    (folder / "reports/report.html").unlink()
    before, index = contents(folder), (folder / ".git/index").read_bytes()
    status = git(folder, "status", "--porcelain")

    snapshot = take(folder)

    assert snapshot.dirty
    assert snapshot.commit == clean.commit
    assert contents(folder) == before
    assert (folder / ".git/index").read_bytes() == index
    (folder / "fake_stage.py").write_text("# changed again, after the sweep began\n")
    checkout(snapshot, tmp_path / "cell")
    assert (tmp_path / "cell/fake_stage.py").read_text() == "# changed\n"
    assert (tmp_path / "cell/pipeline/new.py").read_text() == "# new\n"
    assert not (tmp_path / "cell/reports/report.html").exists()
    assert not (tmp_path / "cell/fake.json").exists()  # ignored by git
    assert git(tmp_path / "cell", "rev-parse", "HEAD").strip() == clean.commit
    assert git(tmp_path / "cell", "status", "--porcelain").split() == [
        *("M", "fake_stage.py", "A", "pipeline/new.py", "D", "reports/report.html"),
    ]
    assert status != git(folder, "status", "--porcelain") or "fake_stage.py" in status


def test_digest_of_the_code_ignores_params_and_results(project: Workspace) -> None:
    first = code_digest(take(project.folder))
    (project.folder / "params.yaml").write_text("{}\n")
    (project.folder / "reports/report.html").write_text("another\n")
    assert code_digest(take(project.folder)) == first
    (project.folder / "margrpo/trainer.py").write_text("# edited\n")
    assert code_digest(take(project.folder)) != first


def test_folder_without_a_commit_is_refused(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    with pytest.raises(MargrpoError, match="need a git repository with a commit"):
        take(tmp_path)


def test_cell_has_its_params_and_shares_the_cache(project: Workspace) -> None:
    cell = cell_of(project, presets=["mte"], seeds=[5], updates=6, grid={"trajectories": [4]})
    folder = cells.prepare(take(project.folder), cell, cache_folder(project.folder))
    text = (folder / "params.yaml").read_text()
    assert "# The only configuration of the project." in text  # comments survive
    config = load_config(folder / "params.yaml")
    assert list(config.study.runs) == ["mte-5"]
    assert config.train.updates == 6
    assert config.objective_of("mte").trajectories == 3  # the grid comes with -S
    assert "smoke" in config.profiles
    assert cells.command(cell) == ["exp", "run", "--name", cell.name, "-S", "++variants.mte.trajectories=4"]
    assert cache_folder(folder) == project.folder / ".dvc/cache"


def test_rewrite_changes_only_what_differs(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("# top\na: {b: 1, c: null} # why\nd: [1, 2]\ngone: 1\ne:\n  f: x # f\n")
    cells.rewrite(file, {"a": {"b": 2, "c": None}, "d": [1, 2], "e": {"f": "x", "g": [3]}})
    assert file.read_text() == "# top\na: {b: 2, c: null} # why\nd: [1, 2]\ne:\n  f: x # f\n  g:\n    - 3\n"


def test_progress_counts_what_the_stages_have_written(project: Workspace, tmp_path: Path) -> None:
    cell = cell_of(project, presets=["grpo"], updates=4)
    assert cells.progress(tmp_path, cell) == 0.0
    (tmp_path / "reports/runs/grpo-0").mkdir(parents=True)
    (tmp_path / "reports/runs/grpo-0/metrics.csv").write_text("update,reward\n1,0.5\n")
    assert cells.progress(tmp_path, cell) == pytest.approx(0.9 / 4)
    (tmp_path / "reports/runs/grpo-0/metrics.csv").write_text("update,reward\n1,.5\n2,.5\n3,.5\n4,.5\n")
    assert cells.progress(tmp_path, cell) == pytest.approx(0.9)
    (tmp_path / "reports/evaluation/grpo-0").mkdir(parents=True)
    (tmp_path / "reports/evaluation/grpo-0/metrics.json").write_text("{}")
    assert cells.progress(tmp_path, cell) == 0.99


def test_experiment_comes_back_and_nothing_else_changes(project: Workspace, project_root: Path) -> None:
    folder = project.folder
    before = contents(folder)
    snapshot = take(folder)
    cell = cell_of(project, presets=["mte"], seeds=[5], updates=4, grid={"trajectories": [4]})
    assert not snapshot.has(cell.name)
    place = cells.prepare(snapshot, cell, cache_folder(folder))
    Workspace(place).dvc(*cells.command(cell))
    fetch(snapshot, cell.name, place)

    assert snapshot.has(cell.name)
    after = {
        name: content
        for name, content in contents(folder).items()
        if not name.startswith((".dvc/", "pids/", "trace"))
    }
    assert after == {name: content for name, content in before.items() if not name.startswith(".dvc/")}
    assert git(folder, "status", "--porcelain") == ""
    row = experiments(project)[cell.name]
    assert float(row["reward"]) == pytest.approx(0.3 + 0.05 + 0.08)  # as the pretended stage has it
    result = cells.read_result(snapshot, cell)
    assert result.reward == pytest.approx(0.43)
    assert result.delta.mean == pytest.approx(0.13)
    assert result.delta.n == 8
    assert [update for update, _ in result.curve] == [1, 2, 3, 4]
    assert result.curve[0][1] == pytest.approx(0.431)
    project.dvc("exp", "apply", cell.name)
    assert YAML(typ="safe").load((folder / "params.yaml").read_text())["variants"]["mte"]["trajectories"] == 4
    assert load_params(folder / "params.yaml")["study"]["runs"] == {"mte-5": {"variant": "mte", "seed": 5}}
    assert (folder / "artifacts/runs/mte-5/last.safetensors").read_text() == "mte-5 0.43"
    assert "up to date" in project.dvc("status")


def test_places_are_shared_by_all_sweeps(project: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert slots.devices("cuda") == ["3", "5"]
    with slots.place("cuda", lambda: False) as first, slots.place("cuda", lambda: False) as second:
        assert [first, second] == [{"CUDA_VISIBLE_DEVICES": "3"}, {"CUDA_VISIBLE_DEVICES": "5"}]
        asked = iter([False, False, True])
        with pytest.raises(RuntimeError, match="stopped"), slots.place("cuda", lambda: next(asked)):
            pass
    with slots.place("cuda", lambda: False) as again:
        assert again == {"CUDA_VISIBLE_DEVICES": "3"}
    with slots.place("cpu", lambda: False) as core:
        assert core == {}
