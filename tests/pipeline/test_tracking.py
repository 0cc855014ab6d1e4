"""The follower against a real MLflow store, with outages, resends and killed processes."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.exceptions import MlflowException
from PIL import Image

from margrpo.config import Config
from margrpo.params import load_config
from pipeline import jobs, machine, processes, tracking
from pipeline.store import Store

HEADER = "update,reward,grad_norm/head,validation/reward\n"
CLOCK = "update,timestamp_ms,wall_s,core_s\n"
START = 1_700_000_000_000


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a new store: MLflow takes seconds to make one."""
    file = tmp_path_factory.mktemp("store") / "mlflow.db"
    MlflowClient(f"sqlite:///{file}").search_experiments()
    return file


@pytest.fixture
def home(tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a project whose stages start no follower of their own."""
    shutil.copyfile(empty_store, tmp_path / "mlflow.db")
    monkeypatch.setenv("MARGRPO_HOME", str(tmp_path))
    monkeypatch.setattr(jobs, "ensure_follower", lambda: None)
    return tmp_path


@pytest.fixture
def config(project_root: Path) -> Config:
    return load_config(project_root / "params.yaml")


@pytest.fixture
def client(home: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{home / 'mlflow.db'}")


def write_rows(folder: Path, count: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [f"{u},{u / 10},,{u / 100 if u % 2 == 0 else ''}\n" for u in range(1, count + 1)]
    clock = [f"{u},{START + 1000 * u},{u}.0,{u}.5\n" for u in range(1, count + 1)]
    (folder / "metrics.csv").write_text(HEADER + "".join(rows))
    (folder / "timing.csv").write_text(CLOCK + "".join(clock))


def train_job(config: Config, folder: Path, cell: str = "cell", run: str = "grpo-0") -> jobs.Job:
    tags = {"variant": "grpo", "seed": "0", **jobs.origin_tags()}
    params = {"train.updates": "4", "seed": "0"}
    return jobs.make(config, "train", run=run, cell=cell, source=str(folder), tags=tags, params=params)


def find(client: MlflowClient, **tags: str) -> list[Run]:
    ids = [experiment.experiment_id for experiment in client.search_experiments()]
    names = {"cell": "margrpo.cell", "study": "margrpo.study"}
    query = " and ".join(f"tags.`{names[key]}` = '{value}'" for key, value in tags.items())
    return list(client.search_runs(ids, query))


def history(client: MlflowClient, run: Run, key: str) -> list[tuple[int, int, float]]:
    points = client.get_metric_history(run.info.run_id, key)
    return sorted((point.step, point.timestamp, point.value) for point in points)


def test_curves_grow_with_the_run(home: Path, config: Config, client: MlflowClient) -> None:
    logs = home / "logs"
    job = jobs.announce(train_job(config, logs))
    follower = tracking.Follower(home)
    assert follower.step()  # nothing written yet

    write_rows(logs, 2)
    with open(logs / "metrics.csv", "a") as file:
        file.write("3,0.")  # half a row
    assert follower.step()
    run = find(client, cell="cell")[0]
    assert run.info.status == "RUNNING"
    assert history(client, run, "reward") == [(1, START + 1000, 0.1), (2, START + 2000, 0.2)]

    write_rows(logs, 4)
    files = {name: logs / name for name in ("metrics.csv", "timing.csv")}
    jobs.finish(job, "FINISHED", files)
    write_rows(logs, 1)  # the next attempt may overwrite what was copied
    assert follower.step()

    run = find(client, cell="cell")[0]
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "grpo-0"
    assert [point[0] for point in history(client, run, "reward")] == [1, 2, 3, 4]
    assert history(client, run, "validation/reward") == [(2, START + 2000, 0.02), (4, START + 4000, 0.04)]
    assert history(client, run, "time/core_s")[-1] == (4, START + 4000, 4.5)
    assert "grad_norm/head" not in run.data.metrics  # empty cells are no points
    assert run.data.params == {"train.updates": "4", "seed": "0"}
    assert run.data.tags["boot_id"] == processes.boot_id()
    parent = client.get_run(run.data.tags["mlflow.parentRunId"])
    assert parent.info.run_name == "mar_grpo_ablation"
    assert parent.info.status == "RUNNING"  # the report closes it
    assert jobs.pending() == []


def test_rows_are_sent_again_after_an_outage_without_duplicates(
    home: Path, config: Config, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = home / "logs"
    job = jobs.announce(train_job(config, logs))
    write_rows(logs, 2)
    assert tracking.Follower(home).step()

    def unreachable(*_: Any, **__: Any) -> None:
        raise MlflowException("connection refused")

    write_rows(logs, 4)
    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "log_batch", unreachable)
        jobs.finish(job, "FINISHED", {name: logs / name for name in ("metrics.csv", "timing.csv")})
        assert not tracking.Follower(home).step()
        assert len(jobs.pending()) == 1

    assert tracking.Follower(home).step()  # another process: it does not know what was sent
    runs = find(client, cell="cell")
    assert len(runs) == 1
    assert [point[0] for point in history(client, runs[0], "reward")] == [1, 2, 3, 4]
    assert runs[0].info.status == "FINISHED"
    assert jobs.pending() == []


def test_hanging_server_costs_a_stage_nothing(
    home: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts and never answers
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        changed = config.model_copy(update={"tracking": config.tracking.model_copy(update={"uri": address})})
        started = time.monotonic()
        job = jobs.announce(train_job(changed, home / "logs"))
        write_rows(home / "logs", 2)
        jobs.finish(job, "FINISHED", {"metrics.csv": home / "logs/metrics.csv"})
        assert time.monotonic() - started < 1.0

        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        monkeypatch.setattr(tracking, "POLL_SECONDS", 0.01)
        tracking.follow(home, idle=0.0, patience=0.5)  # gives up by itself
        assert len(jobs.pending()) == 1


def test_killed_run_is_closed(home: Path, config: Config, client: MlflowClient) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    process = processes.identity(child.pid)
    job = train_job(config, home / "logs")
    jobs._write(jobs.replace(job, process=process))
    write_rows(home / "logs", 1)
    follower = tracking.Follower(home)
    assert follower.step()
    assert find(client, cell="cell")[0].info.status == "RUNNING"
    child.kill()
    child.wait()
    assert follower.step()
    run = find(client, cell="cell")[0]
    assert run.info.status == "KILLED"
    assert history(client, run, "reward") == [(1, START + 1000, 0.1)]
    assert jobs.pending() == []


def test_run_that_ends_between_two_looks_is_not_killed(
    home: Path, config: Config, client: MlflowClient
) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    early = jobs.replace(train_job(config, home / "logs"), process=processes.identity(child.pid))
    jobs._write(early)
    write_rows(home / "logs", 2)
    jobs.finish(early, "FINISHED", {name: home / "logs" / name for name in ("metrics.csv", "timing.csv")})
    child.wait()
    follower = tracking.Follower(home)
    assert not jobs.is_killed(early)  # what was read before the end
    assert not follower._ship(early, [])
    assert find(client, cell="cell")[0].info.status == "RUNNING"
    assert follower.step()
    assert find(client, cell="cell")[0].info.status == "FINISHED"


def test_next_start_closes_runs_of_dead_processes(home: Path, config: Config, client: MlflowClient) -> None:
    job = jobs.announce(train_job(config, home / "logs"))
    assert tracking.Follower(home).step()
    run = find(client, cell="cell")[0]
    jobs.remove(job)  # as if .margrpo had been deleted

    tracking.close_dead_runs(client)
    assert client.get_run(run.info.run_id).info.status == "RUNNING"  # its process, this one, lives
    assert find(client, study=job.study_hash)[0].info.status == "KILLED"

    client.set_tag(run.info.run_id, "boot_id", "an earlier boot")
    client.set_tag(run.info.run_id, "host", "another machine")
    tracking.close_dead_runs(client)
    assert client.get_run(run.info.run_id).info.status == "RUNNING"  # that machine knows
    client.set_tag(run.info.run_id, "host", platform.node())
    tracking.close_dead_runs(client)
    assert client.get_run(run.info.run_id).info.status == "KILLED"

    jobs.announce(train_job(config, home / "logs", cell="next"))
    assert tracking.Follower(home).step()
    assert find(client, study=job.study_hash)[0].info.status == "RUNNING"  # opened again
    assert len(find(client, study=job.study_hash)) == 1


def test_evaluation_joins_the_training_run_and_report_closes_the_study(
    home: Path, config: Config, client: MlflowClient
) -> None:
    logs, out = home / "logs", home / "evaluation"
    write_rows(logs, 4)
    curves = {name: logs / name for name in ("metrics.csv", "timing.csv")}
    jobs.finish(jobs.announce(train_job(config, logs)), "FINISHED", curves)
    out.mkdir()
    (out / "metrics.json").write_text(json.dumps({"last": {"sde": {"reward": 0.5}, "kl_to_base": 0.02}}))
    (out / "grid.png").write_bytes(b"png")
    found = {name: out / name for name in ("metrics.json", "grid.png")}
    params = {"train.updates": "4", "seed": "0"}
    for cell, run in (("cell", "grpo-0"), ("from the cache", "grpo-1")):
        job = jobs.make(config, "evaluate", run=run, cell=cell, params=params, tags={"variant": "grpo"})
        jobs.finish(jobs.announce(job), "FINISHED", {**found, **curves})
    (home / "metrics.json").write_text(json.dumps({"variants": {"grpo": {"reward_sde": 0.5}}}))
    (home / "report.html").write_text("<html>")
    report = {name: home / name for name in ("metrics.json", "report.html")}
    job = jobs.make(config, "report")
    jobs.finish(jobs.announce(job), "FINISHED", report)

    assert tracking.Follower(home).step()
    assert jobs.pending() == []

    trained, cached = find(client, cell="cell"), find(client, cell="from the cache")
    assert len(trained) == len(cached) == 1
    for run in (*trained, *cached):
        assert run.info.status == "FINISHED"
        assert [point[0] for point in history(client, run, "reward")] == [1, 2, 3, 4]
        assert history(client, run, "eval/last/sde/reward")[0][::2] == (4, 0.5)
        assert run.data.metrics["eval/last/kl_to_base"] == 0.02
        assert [artifact.path for artifact in client.list_artifacts(run.info.run_id)] == ["grid.png"]
    parent = find(client, study=job.study_hash)
    assert len(parent) == 1
    assert parent[0].info.status == "FINISHED"
    assert parent[0].data.metrics == {"report/variants/grpo/reward_sde": 0.5}
    assert (home / "mlartifacts").is_dir()


def test_run_deleted_by_the_user_does_not_block_the_queue(
    home: Path, config: Config, client: MlflowClient
) -> None:
    write_rows(home / "logs", 1)
    jobs.announce(train_job(config, home / "logs"))
    follower = tracking.Follower(home)
    assert follower.step()
    client.delete_run(find(client, cell="cell")[0].info.run_id)
    write_rows(home / "logs", 2)
    assert follower.step()
    assert jobs.pending() == []


def test_unreadable_files_do_not_block_the_queue(home: Path, config: Config, client: MlflowClient) -> None:
    (home / "logs").mkdir()
    (home / "logs" / "metrics.csv").write_text(HEADER + "1,a word,,\n")
    (home / "logs" / "timing.csv").write_text(CLOCK + f"1,{START},1.0,1.0\n")
    jobs.announce(train_job(config, home / "logs"))
    write_rows(home / "other", 2)
    jobs.announce(train_job(config, home / "other", cell="other"))
    assert tracking.Follower(home).step()
    assert len(history(client, find(client, cell="other")[0], "reward")) == 2
    assert [job.cell for job in jobs.pending()] == ["other"]


def test_study_is_what_makes_runs_comparable(config: Config) -> None:
    def changed(section: str, **update: Any) -> Config:
        return config.model_copy(update={section: getattr(config, section).model_copy(update=update)})

    same = jobs.study_hash(config)
    assert jobs.study_hash(config.model_copy(update={"variants": {"grpo": {"trajectories": 9}}})) == same
    assert jobs.study_hash(changed("evaluation", images_per_prompt=4)) == same
    assert jobs.study_hash(changed("pretrain", steps=7)) == same  # the shipped policy is not pretrained here
    assert jobs.study_hash(changed("train", updates=60)) != same
    assert jobs.study_hash(changed("objective", beta=0.5)) != same
    assert jobs.study_hash(changed("study", name="other")) != same


def test_follower_of_a_project_is_alone_and_ends_when_idle(
    home: Path, config: Config, client: MlflowClient, project_root: Path
) -> None:
    jobs.finish(jobs.announce(jobs.make(config, "report")), "FINISHED", {})
    program = "from pathlib import Path; from pipeline import tracking; tracking.follow(Path.cwd(), idle={})"
    environment = {**os.environ, "PYTHONPATH": str(project_root)}

    def start(idle: float) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", program.format(idle)], cwd=home, env=environment)

    first = start(600.0)
    deadline = time.monotonic() + 180
    while jobs.pending():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert start(600.0).wait(timeout=120) == 0  # sees the first one
    assert first.poll() is None
    first.kill()
    first.wait()
    assert start(0.0).wait(timeout=120) == 0
    assert [run.info.status for run in client.search_runs(["1"])] == ["FINISHED"]


def test_stage_starts_a_follower_unless_one_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARGRPO_HOME", str(tmp_path))
    started: list[list[str]] = []
    monkeypatch.setattr(processes, "spawn_detached", lambda command, cwd, log: started.append(command))
    jobs.ensure_follower()
    assert started == [[sys.executable, "-m", "pipeline.tracking", str(tmp_path)]]
    with processes.try_exclusive(jobs.follower_lock()) as free:
        assert free
        jobs.ensure_follower()
    assert len(started) == 1


def png(path: Path, red: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (40, 30), (red, 0, 0)).save(path)
    return path


def images(client: MlflowClient, run: Run) -> list[int]:
    files = [artifact.path for artifact in client.list_artifacts(run.info.run_id, "images")]
    return sorted(int(file.split("+")[2]) for file in files if file.endswith(".png"))


def test_sample_grids_are_shipped_once_by_update(home: Path, config: Config, client: MlflowClient) -> None:
    logs, grids = home / "logs", home / "grids"
    write_rows(logs, 2)
    png(grids / "000002.png", 10)
    (grids / ".000004.png.1.tmp").write_bytes(b"half a picture")
    job = jobs.announce(jobs.replace(train_job(config, logs), pictures=str(grids)))
    follower = tracking.Follower(home)
    assert follower.step()
    assert follower.step()
    run = find(client, cell="cell")[0]
    assert images(client, run) == [2]
    write_rows(logs, 4)
    png(grids / "000004.png", 20)
    files = {name: logs / name for name in ("metrics.csv", "timing.csv")}
    files |= {f"validation/{file.name}": file for file in sorted(grids.glob("*.png"))}
    known = {"checkpoint_path": "/somewhere/last.safetensors", "checkpoint_last_sha256": "ab" * 32}
    jobs.finish(job, "FINISHED", files, known)
    shutil.rmtree(grids)  # the next attempt of the stage would
    assert tracking.Follower(home).step()  # another follower: it asks MLflow what there is
    run = find(client, cell="cell")[0]
    assert images(client, run) == [2, 4]
    assert run.data.tags["checkpoint_last_sha256"] == "ab" * 32
    assert run.data.tags["checkpoint_path"] == "/somewhere/last.safetensors"
    assert [artifact.path for artifact in client.list_artifacts(run.info.run_id)] == ["images"]  # no weights


def test_system_metrics_of_a_running_stage(
    home: Path, config: Config, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "INTERVAL_SECONDS", 0.0)
    jobs.announce(train_job(config, home / "logs"))
    follower = tracking.Follower(home)
    assert follower.step()
    assert "system/process_memory_megabytes" not in find(client, cell="cell")[0].data.metrics  # first look
    sum(range(3_000_000))
    assert follower.step()
    found = find(client, cell="cell")[0].data.metrics
    memory = psutil.Process().memory_info().rss / 1e6
    assert found["system/process_memory_megabytes"] == pytest.approx(memory, rel=0.3)
    assert found["system/process_cpu_percentage"] > 0
    assert 0 < found["system/system_memory_usage_percentage"] < 100


def test_process_that_is_gone_has_no_system_metrics() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    process = processes.identity(child.pid)
    child.wait()
    assert machine.Machine().sample(process) == {}


def test_cells_of_a_sweep_share_a_parent_and_its_process_closes_it(
    home: Path, config: Config, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = jobs.announce(jobs.make_sweep(config, "tau", "sweep-1"))
    monkeypatch.setenv("MARGRPO_SWEEP", "tau")
    monkeypatch.setenv("MARGRPO_SWEEP_ID", "sweep-1")
    cells = []
    for index, beta in enumerate((0.01, 0.02)):  # other studies: what the cells share is the sweep
        monkeypatch.setenv("DVC_EXP_NAME", f"tau-grpo-0-beta={beta}")
        changed = config.model_copy(update={"objective": config.objective.model_copy(update={"beta": beta})})
        write_rows(home / f"logs{index}", 2)
        cells.append(jobs.announce(train_job(changed, home / f"logs{index}", cell=f"cell{index}")))
    assert cells[0].study_hash != cells[1].study_hash
    follower = tracking.Follower(home)
    assert follower.step()
    parents = client.search_runs(["1"], "tags.`margrpo.sweep` = 'sweep-1'")
    assert [run.info.status for run in parents] == ["RUNNING"]
    parent = parents[0].info.run_id
    for index, job in enumerate(cells):
        run = find(client, cell=f"cell{index}")[0]
        assert run.data.tags["mlflow.parentRunId"] == parent
        assert run.data.tags["sweep"] == "tau"
        assert run.info.run_name == f"tau-grpo-0-beta={(0.01, 0.02)[index]}"
        jobs.finish(
            job, "FINISHED", {name: home / f"logs{index}" / name for name in ("metrics.csv", "timing.csv")}
        )
    jobs.finish(jobs.announce(jobs.make(config, "report")), "FINISHED", {})  # of one cell: it closes nothing
    assert follower.step()
    assert client.get_run(parent).info.status == "RUNNING"
    (home / "report.html").write_text("<html>")
    (home / "metrics.json").write_text(json.dumps({"cells": 2}))
    jobs.finish(sweep, "FINISHED", {name: home / name for name in ("report.html", "metrics.json")})
    assert follower.step()
    assert jobs.pending() == []
    closed = client.get_run(parent)
    assert (closed.info.status, closed.info.run_name) == ("FINISHED", "tau")
    assert closed.data.metrics == {"sweep/cells": 2.0}
    assert [artifact.path for artifact in client.list_artifacts(parent)] == ["report.html"]
    assert len(client.search_runs(["1"], "tags.`margrpo.study` != ''")) == 0


def test_sweep_whose_process_died_is_closed_as_killed(
    home: Path, config: Config, client: MlflowClient
) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    job = jobs.replace(jobs.make_sweep(config, "tau", "sweep-2"), process=processes.identity(child.pid))
    jobs._write(job)
    follower = tracking.Follower(home)
    assert follower.step()
    child.kill()
    child.wait()
    assert follower.step()
    found = client.search_runs(["1"], "tags.`margrpo.sweep` = 'sweep-2'")
    assert [run.info.status for run in found] == ["KILLED"]
    assert jobs.pending() == []


def test_sweep_without_a_process_of_its_own_is_closed_when_the_follower_ends(
    home: Path, config: Config, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARGRPO_SWEEP", "alone")
    monkeypatch.setattr(tracking, "POLL_SECONDS", 0.01)
    monkeypatch.setenv("MARGRPO_CELL", "grpo-0-eta=0.5")
    for cell, status in (("good", "FINISHED"), ("bad", "FAILED")):
        write_rows(home / cell, 2)
        files = {name: home / cell / name for name in ("metrics.csv", "timing.csv")}
        jobs.finish(jobs.announce(train_job(config, home / cell, cell=cell)), status, files)  # type: ignore[arg-type]
    tracking.follow(home, idle=0.0)
    found = client.search_runs(["1"], "tags.`margrpo.sweep` = 'alone'")
    assert [run.info.status for run in found] == ["FAILED"]
    assert find(client, cell="good")[0].info.run_name == "grpo-0-eta=0.5"


def test_everybody_takes_the_oldest_parent(home: Path, config: Config, client: MlflowClient) -> None:
    """Two machines that share a server and no lock: the younger parent goes."""
    experiment = client.create_experiment("margrpo")
    store = Store(client, experiment)
    job = jobs.make_sweep(config, "tau", "sweep-3")
    tags = {"margrpo.sweep": "sweep-3"}
    seen: list[str] = []
    search = Store.find

    def late(self: Store, wanted: dict[str, str], newest_first: bool = True) -> list[Run]:
        if not seen:  # the other machine creates its run just after this look
            seen.append(client.create_run(experiment, start_time=1, tags=tags).info.run_id)
            return []
        return search(self, wanted, newest_first)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "find", late)
        assert store.parent(job) == seen[0]
    assert len(client.search_runs([experiment], "tags.`margrpo.sweep` = 'sweep-3'")) == 1
