"""The stages as DVC calls them, without DVC."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from ruamel.yaml import YAML

from margrpo.benchmarks import suite
from margrpo.benchmarks.scenes import load_split
from margrpo.checkpoints import SHIPPED, sha256
from margrpo.errors import ConfigError
from margrpo.maps import load_maps
from margrpo.params import load_config, load_params
from margrpo.prompts import read_prompts
from pipeline import inputs, jobs, paths, stages

SMALL = [
    "train.updates=3",
    "train.milestone=2",
    "train.checkpoint_every=1",
    "train.validation_images=8",
    "train.prompts_per_update=2",
    "evaluation.prompts=4",
    "evaluation.images_per_prompt=2",
    "evaluation.kl_prompts=2",
    "evaluation.grid_prompts=2",
]


@pytest.fixture
def project(in_folder: Path, project_root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with small params and the outputs of the first two stages."""
    monkeypatch.setattr(jobs, "ensure_follower", lambda: None)
    write_params(project_root, SMALL)
    assert stages.main(["prompts"]) == 0
    assert stages.main(["checkpoint"]) == 0
    return in_folder


def write_params(project_root: Path, overrides: list[str]) -> None:
    content = load_params(project_root / "params.yaml", overrides, "smoke")
    content.pop("profiles")
    with open("params.yaml", "w") as file:
        YAML().dump(content, file)


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert stages.main(arguments) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("margrpo: error: ")
    return error


def test_one_thread_per_stage() -> None:
    program = "import pipeline.stages, os; print(os.environ['OMP_NUM_THREADS'])"
    environment = {**os.environ, "OMP_NUM_THREADS": "8"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout == "1\n"


def test_stages_load_neither_prefect_nor_mlflow(project_root: Path) -> None:
    program = (
        "import sys, pipeline.stages, pipeline.report, margrpo.trainer, margrpo.evaluation, margrpo.base\n"
        "print({'prefect', 'mlflow', 'dvc'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=project_root, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


def test_prompts(project: Path) -> None:
    manifest = json.loads((paths.PROMPTS / "manifest.json").read_text())
    for split in ("train", "validation", "test"):
        prompts = read_prompts(paths.PROMPTS / f"{split}.jsonl")
        assert [(p.text, p.spec, p.seen) for p in prompts] == [
            (p.text, p.spec, p.seen) for p in load_split(split)
        ]
    assert "version" in manifest
    assert (project / "artifacts/prompts/manifest.json").is_file()


def test_shipped_checkpoint_is_copied(project: Path) -> None:
    assert paths.BASE.read_bytes() == SHIPPED.read_bytes()
    facts = json.loads(paths.BASE.with_suffix(".json").read_text())
    assert facts["sha256"] == hashlib.sha256(SHIPPED.read_bytes()).hexdigest()
    assert facts["source"] == "shipped"


def test_checkpoint_of_a_path_needs_its_hash(
    project: Path, project_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copyfile(SHIPPED, "own.safetensors")
    given = ["checkpoint.source=path", "checkpoint.path=own.safetensors"]
    write_params(project_root, given)
    assert error_of(capsys, "checkpoint").endswith(f"the file's hash, {sha256(SHIPPED)}")
    write_params(project_root, [*given, f"checkpoint.sha256={'ab' * 32}"])
    assert "checkpoint.sha256: abab" in error_of(capsys, "checkpoint")
    write_params(project_root, [*given, f"checkpoint.sha256={sha256(SHIPPED)}"])
    paths.BASE.unlink()
    assert stages.main(["checkpoint"]) == 0
    assert paths.BASE.read_bytes() == SHIPPED.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "prompts | checkpoint | train"),
        (["deploy"], "stage: deploy"),
        (["train", "grpo-9"], "run: grpo-9; allowed: grpo-0"),
        (["evaluate", "grpo-0"], "no such file"),
        (["report"], "grpo-0"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], text: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert text in error_of(capsys, *arguments)
    assert [job.status for job in jobs.pending()] in ([], ["FAILED"])


def test_train_evaluate_report(project: Path) -> None:
    runs = ["grpo-0", "frozen_head_committed-0", "mar_grpo_bridged-0"]
    for run in runs:
        assert stages.main(["train", run]) == 0
        assert stages.main(["evaluate", run]) == 0
    assert stages.main(["evaluate", "base"]) == 0
    assert stages.main(["diagnose"]) == 0
    assert stages.main(["report"]) == 0

    assert (project / "reports/report.html").is_file()
    assert {path.name for path in (project / "artifacts/runs/grpo-0").iterdir()} == {
        *(f"{name}.safetensors" for name in ("last", "best", "milestone")),
        "validation",
    }
    with open(paths.DIAGNOSE / "noise.csv", newline="") as file:
        assert [row["variant"] for row in csv.DictReader(file)] == [run.removesuffix("-0") for run in runs]
    maps, facts = load_maps(paths.DIAGNOSE / "maps.safetensors")
    assert maps is not None
    assert (facts["variant"], len(facts["prompts"])) == ("mar_grpo", 4)
    assert "figures/token_maps.png" in (project / "reports/report.md").read_text()
    assert not list((project / ".margrpo/resume").glob("*"))
    queue = jobs.pending()
    assert [(job.kind, job.run, job.status) for job in queue] == [
        *((kind, run, "FINISHED") for run in runs for kind in ("train", "evaluate")),
        ("evaluate", "base", "FINISHED"),
        ("report", "", "FINISHED"),
    ]
    train, evaluate = queue[0], queue[1]
    assert train.cell == evaluate.cell != queue[2].cell
    assert len({job.study_hash for job in queue}) == 1
    assert train.params["objective.trainable"] == "all"
    assert train.params["train.updates"] == "3"
    assert train.tags["base_sha256"] == sha256(SHIPPED)
    assert train.file("metrics.csv").read_bytes() == (paths.LOGS / "grpo-0/metrics.csv").read_bytes()
    for job in (train, evaluate):
        assert job.tags["checkpoint_path"] == str(project / "artifacts/runs/grpo-0/last.safetensors")
        assert job.tags["checkpoint_last_sha256"] == sha256(paths.RUNS / "grpo-0/last.safetensors")
        assert list(job.grids()) == [3]  # the one validation: every third update
        grid = paths.RUNS / "grpo-0/validation/000003.png"
        assert job.grids()[3].read_bytes() == grid.read_bytes()
    keys = {frozenset(job.params) for job in queue if job.kind == "train"}
    assert len(keys) == 1  # all variants have the same keys


def test_cell_key_is_what_the_result_depends_on(
    project: Path, project_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config("params.yaml")
    key = stages.cell_key(config, "grpo", 0)

    def changed(*overrides: str) -> str:
        return stages.cell_key(load_config("params.yaml", overrides), "grpo", 0)

    assert changed() == key
    assert changed("evaluation.images_per_prompt=4", "variants.mte.trajectories=5", "report.level=0.9") == key
    others = [
        stages.cell_key(config, "grpo", 1),
        stages.cell_key(config, "frozen_head", 0),
        changed("train.updates=4"),
        changed("sampler.eta=0.6"),
        changed("objective.beta=0.02"),
        changed("reward.weights.scenes=2.0"),
    ]
    assert len({key, *others}) == len(others) + 1

    copied = project / "library"
    shutil.copytree(
        project_root / "margrpo", copied, ignore=shutil.ignore_patterns("*.safetensors", "__pycache__")
    )
    monkeypatch.setattr(stages, "_PACKAGE", copied)
    assert changed() == key
    (copied / "objective.py").write_text("changed")
    assert changed() != key


def test_weight_files_of_a_reward_need_their_hash(
    project: Path, project_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path("weights/jpeg")
    folder.mkdir(parents=True)
    (folder / "model.bin").write_bytes(b"first")
    (folder / ".cache").write_bytes(b"does not count")

    def given(path: str, digest: str) -> list[str]:
        option = f"{{jpeg_size: {{path: {path}, files_sha256: {digest}}}}}"
        return [*SMALL, "reward.weights={jpeg_size: 1.0}", f"reward.options={option}"]

    def hash_of(content: bytes) -> str:
        listed = f"{hashlib.sha256(content).hexdigest()}  model.bin\n"
        return hashlib.sha256(listed.encode()).hexdigest()

    first, second = hash_of(b"first"), hash_of(b"second")
    write_params(project_root, given("weights/jpeg", "null"))
    wanted = f"reward.options.jpeg_size.files_sha256: None; allowed with a path: the folder's hash, {first}"
    assert error_of(capsys, "train", "grpo-0").endswith(wanted)
    assert error_of(capsys, "evaluate", "base").endswith(wanted)
    write_params(project_root, given("weights/jpeg", first))
    config = inputs.for_training(load_config("params.yaml"))
    key = stages.cell_key(config, "grpo", 0)
    # the place does not matter, the content does
    shutil.copytree(folder, "elsewhere")
    moved = inputs.for_training(
        load_config("params.yaml", [f"reward.options.jpeg_size.path={Path('elsewhere').resolve()}"])
    )
    assert moved.reward.options["jpeg_size"].path != config.reward.options["jpeg_size"].path
    assert stages.cell_key(moved, "grpo", 0) == key
    (folder / "model.bin").write_bytes(b"second")
    error = error_of(capsys, "train", "grpo-0")
    assert f"files_sha256: {first}; allowed: the hash of the files in " in error
    assert error.endswith(second)
    write_params(project_root, given("weights/jpeg", second))
    changed = inputs.for_training(load_config("params.yaml"))
    assert stages.cell_key(changed, "grpo", 0) != key


def test_paths_are_those_of_the_project_in_a_scratch_clone(
    project: Path,
    project_root: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    home = tmp_path_factory.mktemp("home")
    (home / "own.txt").write_text("a red circle\n")
    section = "evaluation.benchmarks.own={prompts: file, path: own.txt, scores: [jpeg_size]}"
    monkeypatch.setenv("MARGRPO_HOME", str(home))
    config = load_config("params.yaml", [section])
    record = {"category": "prompts", "seen": False, "spec": {}, "text": "a red circle"}
    digest = hashlib.sha256((json.dumps(record) + "\n").encode()).hexdigest()
    with pytest.raises(ConfigError, match=f"benchmarks.own.sha256: None; allowed with a path: .* {digest}"):
        inputs.for_evaluation(config)
    config = load_config("params.yaml", [section, f"evaluation.benchmarks.own.sha256={digest}"])
    assert inputs.for_evaluation(config).evaluation.benchmarks["own"].path == str(home / "own.txt")


def test_an_interrupted_benchmark_goes_on(
    project: Path, project_root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("own.txt").write_text("a red circle\ntwo blue squares\n")
    section = "{own: {prompts: file, path: own.txt, scores: [jpeg_size], images_per_prompt: 2, sha256: null}}"
    write_params(project_root, [*SMALL, f"evaluation.benchmarks={section}"])
    digest = error_of(capsys, "evaluate", "base").rpartition(" ")[2]
    write_params(project_root, [*SMALL, f"evaluation.benchmarks={section.replace('null', digest)}"])
    from margrpo.rewards import jpeg_size

    monkeypatch.setattr(jpeg_size, "QUALITY", None)  # breaks the score after the images are drawn
    monkeypatch.setattr("margrpo.rewards.runner.PATIENCE", 1)
    assert "no score for 4 of 4 images" in error_of(capsys, "evaluate", "base")
    assert len(list((project / ".margrpo/benchmarks").rglob("*.png"))) == 4
    monkeypatch.undo()
    monkeypatch.chdir(project)
    monkeypatch.setattr(jobs, "ensure_follower", lambda: None)
    seen = []
    generate = suite.draw_images
    monkeypatch.setattr(suite, "draw_images", lambda *given: seen.append(generate(*given)))
    assert stages.main(["evaluate", "base"]) == 0
    assert seen == [0]
    table = pd.read_csv(paths.EVALUATION / "base/benchmarks.csv")
    assert table["images"].tolist() == [2, 2]
    assert not list((project / ".margrpo/benchmarks").rglob("*.png"))


def test_second_trainer_of_a_run_waits_for_the_first(project: Path, project_root: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(project_root), "MARGRPO_HOME": str(project)}
    command = [sys.executable, "-c", _STAGE_WITHOUT_FOLLOWER, "train", "frozen_head_committed-0"]
    options: dict[str, Any] = {
        "env": environment,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
    }
    both = [subprocess.Popen(command, **options) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    waited = ["another training of it is running; waiting" in output for output in outputs]
    assert sorted(waited) == [False, True]


_STAGE_WITHOUT_FOLLOWER = """
import sys
from pipeline import jobs, stages
jobs.ensure_follower = lambda: None
sys.exit(stages.main(sys.argv[1:]))
"""


def test_prompts_of_a_folder_need_its_hash(
    project: Path, project_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("own").mkdir()
    for split, text in (("train", "a red cube\n"), ("validation", "two dogs\n"), ("test", "a red cube\n")):
        Path(f"own/{split}.txt").write_text(text)
    given = ["prompts.source=path", "prompts.path=own"]
    write_params(project_root, given)
    listed = "".join(
        f"{sha256(Path(f'own/{name}.txt'))}  {name}.txt\n" for name in ("test", "train", "validation")
    )
    digest = hashlib.sha256(listed.encode()).hexdigest()
    assert error_of(capsys, "prompts").endswith(f"the folder's hash, {digest}")
    write_params(project_root, [*given, f"prompts.sha256={'f' * 64}"])
    assert f"prompts.sha256: {'f' * 64}" in error_of(capsys, "prompts")
    write_params(project_root, [*given, f"prompts.sha256={digest}"])
    assert stages.main(["prompts"]) == 0
    assert [(p.text, p.seen) for p in read_prompts(paths.PROMPTS / "test.jsonl")] == [("a red cube", True)]
    manifest = json.loads((paths.PROMPTS / "manifest.json").read_text())
    assert manifest["files"]["train.txt"] == sha256(Path("own/train.txt"))
