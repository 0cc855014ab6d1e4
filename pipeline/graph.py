"""The stage graph of a workspace as DVC sees it: who needs whom, and what is not up to date."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from margrpo.errors import MargrpoError


@dataclass(frozen=True)
class Stage:
    """A DVC stage: its name, the stages it needs, and whether it has to run (or may have to, after those)."""

    name: str
    needs: frozenset[str]
    stale: bool

    @property
    def kind(self) -> str:
        """Return the name without its run, for instance "train"."""
        return self.name.partition("@")[0]


def read_graph(workspace: Path) -> list[Stage]:
    """Return the stages of a workspace, every stage after those it needs, early ones of the graph first.

    Raises:
        MargrpoError: DVC cannot read the workspace.
    """
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    try:
        with _inside(workspace), Repo(str(workspace)) as repo:
            graph = repo.index.graph
            needs = {node.addressing: {other.addressing for other in graph[node]} for node in graph}
            changed = set(repo.status())
    except DvcException as error:
        raise MargrpoError(f"dvc: {error}; see dvc.yaml and `dvc status`") from error
    depth: dict[str, int] = {}
    while len(depth) < len(needs):
        for name, others in needs.items():
            if name not in depth and others <= depth.keys():
                depth[name] = 1 + max((depth[other] for other in others), default=0)
    stages: dict[str, Stage] = {}
    for name in sorted(needs, key=lambda name: depth[name]):  # stable: the order of dvc.yaml within a depth
        stale = name in changed or any(stages[other].stale for other in needs[name])
        stages[name] = Stage(name, frozenset(needs[name]), stale)
    return list(stages.values())


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)  # DVC names stages relative to the current folder
    try:
        yield
    finally:
        os.chdir(before)
