"""`margrpo compare` against a store with known runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mlflow import MlflowClient
from PIL import Image

from margrpo.cli import run as run_cli
from margrpo.config import Config
from margrpo.errors import MargrpoError
from margrpo.params import load_config
from pipeline.cli import app
from pipeline.compare import compare, resolve
from pipeline.store import Store

# Held-out rewards by variant and seed.
REWARDS = {"grpo": (0.30, 0.32, 0.34), "mte": (0.40, 0.43, 0.43)}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Return a store with two studies: `old` (one run, mte-0) and `new` (three seeds of two variants)."""
    folder = tmp_path_factory.mktemp("home")
    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    made = Store(
        client, client.create_experiment("margrpo", artifact_location=(folder / "artifacts").as_uri())
    )

    def add(parent: str, variant: str, seed: int, reward: float, start: int, status: str = "FINISHED") -> str:
        tags = {"variant": variant, "seed": str(seed), "margrpo.cell": "x", "mlflow.parentRunId": parent}
        run_id = client.create_run(made.experiment, start, tags, f"{variant}-{seed}").info.run_id
        client.log_param(run_id, "objective.trajectories", 3 if variant == "mte" else 1)
        client.log_param(run_id, "train.updates", 2)
        client.log_param(run_id, "seed", seed)
        for update in (1, 2):
            client.log_metric(run_id, "reward", 0.1 * update, timestamp=start + update, step=update)
            client.log_metric(run_id, "grad_norm", 0.5, timestamp=start + update, step=update)
            client.log_metric(run_id, "kl", 0.0, timestamp=start + update, step=update)
            client.log_metric(run_id, "time/core_s", 7.0 * update, timestamp=start + update, step=update)
        client.log_metric(run_id, "eval/last/sde/reward", reward, timestamp=start + 3, step=2)
        client.set_terminated(run_id, status)
        return str(run_id)

    parents = {
        name: client.create_run(made.experiment, 1, {"margrpo.study": name, "study": name}, name).info.run_id
        for name in ("old", "new")
    }
    add(parents["old"], "mte", 0, 0.9, 10)
    for variant, values in REWARDS.items():
        for seed, value in enumerate(values):
            add(parents["new"], variant, seed, value, 100 + seed)
    add(parents["new"], "grpo", 0, 0.0, 200, "KILLED")
    return made


@pytest.fixture
def config(store: Store, project_root: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    home = Path(str(store.client.tracking_uri).removeprefix("sqlite:///")).parent
    monkeypatch.setenv("MARGRPO_HOME", str(home))
    return load_config(project_root / "params.yaml")


def test_names_ids_and_variants(store: Store) -> None:
    one = resolve(store, "grpo-0")
    assert one.values("eval/last/sde/reward") == {0: 0.30}  # the newest that finished, not the killed one
    run_id = one.runs[0].info.run_id
    assert resolve(store, run_id).values("eval/last/sde/reward") == {0: 0.30}
    assert resolve(store, "mte").values("eval/last/sde/reward") == dict(enumerate(REWARDS["mte"]))
    old = store.find({"study": "old"})[0].info.run_id
    assert resolve(store, "mte", old).values("eval/last/sde/reward") == {0: 0.9}


def test_table_differences_and_curves(config: Config, tmp_path: Path) -> None:
    out = tmp_path / "curves.png"
    header, first, second, *rest = compare(config, ["grpo", "mte"], None, out).splitlines()
    assert header.split()[:4] == ["run", "runs", "status", "SDE"]
    # .32 with half width t(2) .02 / sqrt 3 = 4.3027 * .011547 = .0497.
    assert "0.320 ± 0.050" in first
    assert " 14.0" in first  # core-seconds of a run
    # Differences .10, .11, .09: mean .1, sd .01, half width 4.3027 * .01 / sqrt 3 = .0248.
    assert "+0.100 [+0.075, +0.125]" in second
    assert rest[0].startswith("grpo, mte: of new (")
    assert rest[1:] == ["objective.trajectories: 1 | 3", f"curves: {out}"]
    with Image.open(out) as picture:
        assert picture.width > 800


def test_within_a_study(config: Config, tmp_path: Path) -> None:
    text = compare(config, ["mte"], "old", tmp_path / "curves.png")
    assert "0.900" in text
    with pytest.raises(MargrpoError, match="--within: none; allowed: new, old, or a run id"):
        compare(config, ["mte"], "none", tmp_path / "other.png")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "RUN: nothing; allowed: a run id, a variant, or a name: grpo-0, grpo-1"),
        (["0" * 32], "MLflow: "),
        (["grpo", "--out", "curves.jpg"], "--out: curves.jpg; allowed: a file that ends in .png"),
        (["grpo", "--set", "tracking.experiment=none"], "tracking.experiment: none; allowed: margrpo"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str],
    message: str,
    config: Config,
    in_folder: Path,
    project_root: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = run_cli(app, ["compare", *arguments, "--params", str(project_root / "params.yaml")])
    error = capsys.readouterr().err.strip().splitlines()
    assert code == 2
    assert len(error) == 1
    assert message in error[0]
    assert list(in_folder.glob("*.png")) == []


def test_documented_filters_are_mlflow_s(store: Store, project_root: Path) -> None:
    text = (project_root / "docs/tracking.md").read_text()
    lines = [line for line in text.splitlines() if re.match(r"(tags|params|metrics)\.", line)]
    filters = [re.split(r" {2,}", line)[0] for line in lines]
    found = {query: len(store.client.search_runs([store.experiment], query)) for query in filters}
    assert len(found) == 7
    assert found["params.`objective.trajectories` = '3'"] == 4
    assert found["metrics.`eval/last/sde/reward` > 0.35"] == 4
    assert found["tags.seed = '0' AND tags.variant != 'base' AND attributes.status = 'FINISHED'"] == 3


def test_no_store(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARGRPO_HOME", str(tmp_path))
    with pytest.raises(MargrpoError, match=r"mlflow\.db: there is no such store"):
        compare(config, ["grpo"], None, tmp_path / "curves.png")
    assert list(tmp_path.iterdir()) == []
