"""The state of the project that a sweep runs: its commit, its uncommitted files, and experiments made from them."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pipeline import paths, processes
from pipeline.jobs import digest
from pipeline.scratch import git


@dataclass(frozen=True)
class Snapshot:
    """The project at one moment.

    Attributes:
        project: the user's folder.
        commit: HEAD, the baseline of the experiments.
        tree: git tree of all files that git knows or would add, uncommitted changes included.
        dirty: whether the tree is not that of the commit.
    """

    project: Path
    commit: str
    tree: str
    dirty: bool

    def ref(self, name: str) -> str:
        """Return the git reference of an experiment of this commit."""
        return f"refs/exps/{self.commit[:2]}/{self.commit[2:]}/{name}"

    def has(self, name: str) -> bool:
        """Return whether the project has an experiment."""
        return bool(git(self.project, "for-each-ref", self.ref(name)))

    def read(self, name: str, path: Path) -> str:
        """Return a file of an experiment.

        Raises:
            MargrpoError: the experiment has no such file.
        """
        return git(self.project, "show", f"{self.ref(name)}:{path}")


def take(project: Path) -> Snapshot:
    """Return the state of a project; its files and its index are only read.

    Raises:
        MargrpoError: no git repository with a commit.
    """
    commit = git(project, "rev-parse", "HEAD^{commit}").strip()
    index = project / git(project, "rev-parse", "--git-path", "index").strip()
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / "index"
        if index.is_file():  # it knows the files that did not change
            shutil.copyfile(index, own)
        environment = {**os.environ, "GIT_INDEX_FILE": str(own)}
        git(project, "add", "--all", environment=environment)
        tree = git(project, "write-tree", environment=environment).strip()
    dirty = tree != git(project, "rev-parse", f"{commit}^{{tree}}").strip()
    return Snapshot(project, commit, tree, dirty)


def checkout(snapshot: Snapshot, folder: Path) -> None:
    """Make a fresh clone whose HEAD is the commit and whose files are those of the snapshot, staged.

    It shares the objects of the project: an experiment made there has the uncommitted files too.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    git(snapshot.project, "clone", "--quiet", "--shared", "--no-checkout", str(snapshot.project), str(folder))
    git(folder, "update-ref", "--no-deref", "HEAD", snapshot.commit)
    git(folder, "read-tree", "--reset", "-u", snapshot.tree)
    for key, value in (("user.name", "margrpo"), ("user.email", "margrpo@localhost")):
        if not git(folder, "config", "--default", "", "--get", key).strip():
            git(folder, "config", key, value)  # DVC commits the experiment


def fetch(snapshot: Snapshot, name: str, folder: Path) -> None:
    """Bring an experiment from the clone it was made in to the project, where `dvc exp show` finds it.

    Raises:
        MargrpoError: git could not.
    """
    ref = snapshot.ref(name)
    quiet = ("--quiet", "--no-tags", "--no-write-fetch-head", "--no-auto-maintenance")
    with processes.exclusive(paths.state("locks", "fetch.lock")):
        git(snapshot.project, "fetch", *quiet, str(folder), f"+{ref}:{ref}")


def code_digest(snapshot: Snapshot) -> str:
    """Return what tells the code of a snapshot from other code; params and results are no part of it."""
    return digest(git(snapshot.project, "ls-tree", snapshot.tree, "--", "margrpo", "pipeline", "dvc.yaml"))
