"""Where things lie: in the workspace (the folder with dvc.yaml) and in the home of the local state."""

from __future__ import annotations

import os
from pathlib import Path

PARAMS = Path("params.yaml")
PROMPTS = Path("artifacts/prompts")
BASE = Path("artifacts/base/policy.safetensors")
RUNS = Path("artifacts/runs")
LOGS = Path("reports/runs")
DIAGNOSE = Path("reports/diagnose")
EVALUATION = Path("reports/evaluation")
REPORT = Path("reports/report.html")


def home() -> Path:
    """Return the project folder whose `.margrpo` and `mlflow.db` are used.

    It is the workspace itself; a scratch clone uses the project it was cloned from (variable MARGRPO_HOME).
    """
    return Path(os.environ.get("MARGRPO_HOME") or Path.cwd()).resolve()


def state(*parts: str) -> Path:
    """Return a path in `.margrpo`, the git-ignored local state."""
    return home().joinpath(".margrpo", *parts)
