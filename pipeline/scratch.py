"""Scratch clones: a profile or an override runs in its own workspace and leaves the user's files alone."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ruamel.yaml import YAML

from margrpo.errors import MargrpoError
from margrpo.params import load_params
from pipeline import paths

# What the scratch workspace owns itself: its results, their lock file, its params.
_OWN = ("reports", "artifacts", "dvc.lock", "params.yaml", ".dvc/config.local")


def workspace_of(project: Path, params: Path, overrides: Sequence[str], profile: str | None) -> Path:
    """Return where the scratch clone of a profile or of changed params lies."""
    custom = [] if params == paths.PARAMS else [str(params.resolve())]
    changed = [*custom, *overrides]
    code = hashlib.sha256(json.dumps(changed).encode()).hexdigest()[:8]
    name = "-".join([profile or "params", *([code] if changed else [])])
    return project / ".margrpo" / "scratch" / name


def prepare_workspace(project: Path, params: Path, overrides: Sequence[str], profile: str | None) -> Path:
    """Return an up-to-date scratch clone of the project with other params, sharing its DVC cache.

    Committed and uncommitted code of the project is what runs there.

    Raises:
        MargrpoError: the project is no git repository.
    """
    content = load_params(params, overrides, profile)
    workspace = workspace_of(project, params, overrides, profile)
    if not (workspace / ".git").is_dir():
        workspace.parent.mkdir(parents=True, exist_ok=True)
        git(project, "clone", "--quiet", "--shared", "--no-checkout", str(project), str(workspace))
    commit = git(project, "rev-parse", "HEAD").strip()
    git(workspace, "fetch", "--quiet", "--no-tags", str(project), commit)
    git(workspace, "reset", "--quiet", commit)  # moves HEAD, not the files
    _copy_code(project, workspace)
    with open(workspace / paths.PARAMS, "w", encoding="utf-8") as file:
        yaml = YAML()
        yaml.indent(mapping=2, sequence=4, offset=2)
        yaml.dump({key: value for key, value in content.items() if key != "profiles"}, file)
    cache = f"[cache]\n    dir = {json.dumps(str(cache_folder(project)))}\n"
    (workspace / ".dvc" / "config.local").write_text(cache, encoding="utf-8")
    return workspace


def _copy_code(project: Path, workspace: Path) -> None:
    """Make the files that git knows, or would add, the same in the workspace, but for what that owns."""
    listed = git(project, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    wanted = {name for name in listed if name and not _owned(name) and (project / name).is_file()}
    present = git(workspace, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    for name in sorted({name for name in present if name and not _owned(name)} - wanted):
        (workspace / name).unlink(missing_ok=True)
    for name in sorted(wanted):
        source, target = project / name, workspace / name
        content = source.read_bytes()
        if not target.is_file() or target.read_bytes() != content:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            target.chmod(source.stat().st_mode & 0o777)


def _owned(name: str) -> bool:
    return any(name == own or name.startswith(f"{own}/") for own in _OWN)


def cache_folder(project: Path) -> Path:
    """Return the folder of the DVC cache of a project."""
    from dvc.repo import Repo

    with Repo(str(project)) as repo:
        return Path(repo.cache.local_cache_dir)


def git(folder: Path, *arguments: str, environment: dict[str, str] | None = None) -> str:
    """Run git in a folder and return what it printed.

    Raises:
        MargrpoError: git failed or is not installed.
    """
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, check=True, capture_output=True, text=True, env=environment
        )
    except FileNotFoundError as error:
        raise MargrpoError("git is not installed; sweeps, profiles and overrides need it") from error
    except subprocess.CalledProcessError as error:
        reason = " ".join(error.stderr.split())
        raise MargrpoError(
            f"git {arguments[0]} in {folder}: {reason}; sweeps, profiles and overrides need a git repository "
            "with a commit"
        ) from error
    return done.stdout
