"""Scratch workspaces: what is carried into them and what stays untouched."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from margrpo.errors import MargrpoError
from margrpo.params import load_config
from pipeline.graph import read_graph
from pipeline.scratch import prepare_workspace

PARAMS = Path("params.yaml")


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    return subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture
def project(in_folder: Path, project_root: Path) -> Path:
    """Return a small repository with params, a lock file, a report and code."""
    git(in_folder, "init", "--quiet")
    (in_folder / ".dvc").mkdir()
    for name in (".dvc/config", ".dvc/.gitignore", ".gitignore", "params.yaml"):
        (in_folder / name).write_bytes((project_root / name).read_bytes())
    (in_folder / "dvc.yaml").write_text("stages: {}\n")
    (in_folder / "dvc.lock").write_text("schema: '2.0'\n")
    (in_folder / "reports").mkdir()
    (in_folder / "reports/report.md").write_text("the user's report")
    (in_folder / "code").mkdir()
    for name in ("kept.py", "edited.py", "removed.py"):
        (in_folder / "code" / name).write_text(f"# {name}\n")
    git(in_folder, "add", "--all")
    git(in_folder, "commit", "--quiet", "--message", "first")
    return in_folder


def test_profile_is_applied_and_the_project_left_alone(project: Path) -> None:
    before = {
        path: path.read_bytes() for path in project.rglob("*") if path.is_file() and ".git" not in path.parts
    }
    workspace = prepare_workspace(project, PARAMS, ["train.updates=7"], "smoke")

    config = load_config(workspace / "params.yaml")
    assert config.train.updates == 7
    assert config.train.validation_every == 3
    assert len(config.study.runs) == 3
    assert config.profiles == {}
    assert all(path.read_bytes() == content for path, content in before.items())
    assert git(project, "status", "--porcelain") == ""
    assert not (workspace / "reports").exists()  # results are the workspace's own
    assert not (workspace / "dvc.lock").exists()
    cache = YAML(typ="safe").load((workspace / ".dvc/config.local").read_text().split("=")[1])
    assert Path(cache) == project / ".dvc/cache/files/md5" or Path(cache).is_relative_to(
        project / ".dvc/cache"
    )
    assert read_graph(workspace) == []


def test_uncommitted_code_is_carried_and_results_are_kept(project: Path) -> None:
    workspace = prepare_workspace(project, PARAMS, [], "smoke")
    (workspace / "dvc.lock").write_text("of the workspace")
    (workspace / "reports").mkdir()
    (workspace / "reports/report.md").write_text("of the workspace")
    (project / "code/edited.py").write_text("# changed, not committed\n")
    (project / "code/new.py").write_text("# new\n")
    (project / "code/removed.py").unlink()
    (project / "mlflow.db").write_text("ignored by git")

    assert prepare_workspace(project, PARAMS, [], "smoke") == workspace

    assert {path.name: path.read_text() for path in (workspace / "code").iterdir()} == {
        "kept.py": "# kept.py\n",
        "edited.py": "# changed, not committed\n",
        "new.py": "# new\n",
    }
    assert (workspace / "dvc.lock").read_text() == "of the workspace"
    assert (workspace / "reports/report.md").read_text() == "of the workspace"
    assert not (workspace / "mlflow.db").exists()

    git(project, "add", "--all")
    git(project, "commit", "--quiet", "--message", "second")
    (project / "code/new.py").unlink()
    prepare_workspace(project, PARAMS, [], "smoke")
    assert not (workspace / "code/new.py").exists()
    assert git(workspace, "rev-parse", "HEAD") == git(project, "rev-parse", "HEAD")


def test_every_change_has_its_own_workspace(project: Path) -> None:
    (project / "other.yaml").write_bytes((project / "params.yaml").read_bytes())
    names = [
        prepare_workspace(project, params, overrides, profile).name
        for params, overrides, profile in [
            (PARAMS, [], "smoke"),
            (PARAMS, ["train.updates=7"], "smoke"),
            (PARAMS, ["train.updates=8"], "smoke"),
            (PARAMS, ["train.updates=7"], None),
            (Path("other.yaml"), [], None),
        ]
    ]
    assert names[0] == "smoke"
    assert len(set(names)) == 5


def test_folder_without_a_commit_is_refused(in_folder: Path, project_root: Path) -> None:
    (in_folder / "params.yaml").write_bytes((project_root / "params.yaml").read_bytes())
    with pytest.raises(MargrpoError, match="need a git repository with a commit"):
        prepare_workspace(in_folder, PARAMS, [], "smoke")
