"""Where the curves of a sweep are in MLflow: ids of runs, and addresses that its UI understands."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from pipeline import jobs, paths
from pipeline.servers import read_state
from pipeline.store import Store, quiet
from pipeline.sweeps.plan import Plan

FLUSH_SECONDS = 60.0  # how long the end of a sweep waits for MLflow


def tracking_uri(plan: Plan) -> str:
    """Return the tracking server of the project."""
    return plan.cells[0].config.tracking.uri or f"sqlite:///{paths.home() / 'mlflow.db'}"


def ui_address(plan: Plan) -> str:
    """Return the address of MLflow's UI: that of `margrpo serve`, else of a remote server; empty if unknown."""
    state = read_state(paths.home())
    if state is not None:
        return state.mlflow
    uri = tracking_uri(plan)
    return uri.rstrip("/") if uri.startswith(("http:", "https:")) else ""


def compare_link(address: str, experiment: str, runs: Sequence[str]) -> str:
    """Return the address of MLflow's page that compares exactly these runs."""
    wanted, of = quote(json.dumps(list(runs))), quote(json.dumps([experiment]))
    return f"{address}/#/compare-runs?runs={wanted}&experiments={of}"


def reward_link(address: str, experiment: str, runs: Sequence[str]) -> str:
    """Return the address of MLflow's page with the reward of exactly these runs by update."""
    texts = {"runs": json.dumps(list(runs)), "metric": '"reward"', "experiments": json.dumps([experiment])}
    texts |= {"plot_metric_keys": '["reward"]', "plot_layout": "{}", "x_axis": "step"}
    return f"{address}/#/metric?{'&'.join(f'{key}={quote(text)}' for key, text in texts.items())}"


def run_link(address: str, experiment: str, run: str) -> str:
    """Return the address of MLflow's page of a run."""
    return f"{address}/#/experiments/{experiment}/runs/{run}"


def find_runs(plan: Plan, names: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return the id of the MLflow experiment, and experiment of DVC -> id of the MLflow run, once shipped.

    A cell whose run MLflow does not know is left out.
    """
    quiet()
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    deadline = time.monotonic() + FLUSH_SECONDS
    while time.monotonic() < deadline and any(_waits(job, names) for job in jobs.pending()):
        time.sleep(0.5)
    uri = tracking_uri(plan)
    if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).is_file():
        return "", {}
    try:
        store = Store.open(MlflowClient(uri), plan.cells[0].config.tracking.experiment, None)
        found = {}
        for name in names:
            runs = [run for run in store.find({"dvc_experiment": name}) if "seed" in run.data.tags]
            if runs:  # the newest first; the base policy has no seed
                found[name] = str(runs[0].info.run_id)
    except MlflowException:
        return "", {}
    return store.experiment, found


def _waits(job: jobs.Job, names: Sequence[str]) -> bool:
    return job.tags.get("dvc_experiment") in names
