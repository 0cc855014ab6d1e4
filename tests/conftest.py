"""Shared settings of the tests: one thread per process, no state outside of temporary folders."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"  # before torch is imported: the tests run side by side
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
for _name in ("MARGRPO_HOME", "MARGRPO_PROFILE", "MARGRPO_PREFECT_RUN"):
    os.environ.pop(_name, None)

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session", autouse=True)
def _shared_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Name a folder for what several tests share; pytest removes it with its own."""
    os.environ["MARGRPO_TEST_FOLDER"] = str(tmp_path_factory.mktemp("shared"))


@pytest.fixture
def project_root() -> Path:
    """Return the repository."""
    return ROOT


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run a test in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
