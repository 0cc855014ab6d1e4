"""What each DVC stage runs: `python -m pipeline.stages prompts | checkpoint | train | diagnose | evaluate | report`.

A stage reads params.yaml; the paths are those of dvc.yaml. It imports neither Prefect nor mlflow.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"  # before numpy and torch are imported; stages run side by side, one a core

from margrpo.config import Config  # noqa: E402
from margrpo.errors import ConfigError, MargrpoError  # noqa: E402
from margrpo.params import load_config  # noqa: E402
from pipeline import inputs, jobs, paths, processes  # noqa: E402

BASE_RUN = "base"
_PACKAGE = Path(__file__).parent.parent / "margrpo"


def write_prompts(config: Config) -> None:
    """Write the prompt files of the splits and a manifest with their hashes.

    Raises:
        ConfigError: source `path` without the hash that tells DVC when its files are others.
    """
    import json

    from margrpo.benchmarks.scenes import manifest
    from margrpo.checkpoints import sha256, tree_sha256, write_atomic
    from margrpo.hub import check_tree
    from margrpo.prompts import dump_prompts, load_splits, split_files

    given = config.prompts
    facts = manifest()
    if given.path is not None:
        folder = paths.home() / Path(given.path).expanduser()
        given = given.model_copy(update={"path": str(folder)})
        hashes = {file.name: sha256(file) for file in split_files(folder).values()}
        if given.sha256 is None:
            allowed = f"allowed with a path: the folder's hash, {tree_sha256(hashes)}"
            raise ConfigError.of("prompts.sha256", None, allowed)
        check_tree("prompts.sha256", given.sha256, folder, hashes)
        facts = {"source": "path", "files": hashes}
    for split, prompts in load_splits(given).items():
        write_atomic(paths.PROMPTS / f"{split}.jsonl", dump_prompts(prompts).encode())
    text = json.dumps(facts, indent=2, sort_keys=True) + "\n"
    write_atomic(paths.PROMPTS / "manifest.json", text.encode())


def write_checkpoint(config: Config) -> None:
    """Write the base policy and a description of it.

    Raises:
        ConfigError: source `path` without the hash that tells DVC when the file is another one.
    """
    import json

    from margrpo.base import base_sha256, write_base
    from margrpo.checkpoints import read_header, write_atomic

    given = config.checkpoint
    if given.path is not None:
        found = paths.home() / Path(given.path).expanduser()
        if given.sha256 is None and found.exists():
            allowed = f"allowed with a path: the file's hash, {base_sha256(config, found)}"
            raise ConfigError.of("checkpoint.sha256", None, allowed)
    digest = write_base(_at_home(config), paths.BASE)
    facts = {"source": given.source, "sha256": digest, "header": read_header(paths.BASE)}
    text = json.dumps(facts, indent=2, sort_keys=True) + "\n"
    write_atomic(paths.BASE.with_suffix(".json"), text.encode())


def train(config: Config, run: str) -> None:
    """Train one cell of the study; goes on from the resume state of a killed attempt.

    The trainer dies with DVC, and a second one of the same cell waits for the first.
    """
    processes.die_with_parent()
    variant, seed = _cell(config, run)
    config = inputs.for_training(config)
    key = cell_key(config, variant, seed)
    waiting = f"{run}: another training of it is running; waiting"
    with ExitStack() as stack:
        for lock in (Path(".margrpo/locks") / run, paths.state("locks", key)):
            stack.enter_context(processes.exclusive(lock.with_suffix(".lock"), waiting))
        from margrpo import trainer
        from margrpo.prompts import read_prompts

        trainer.single_thread()
        logs = paths.LOGS / run
        job = jobs.announce(_run_job(config, "train", run, key, logs))
        prompts = {split: read_prompts(paths.PROMPTS / f"{split}.jsonl") for split in ("train", "validation")}
        resume = paths.state("resume", key, "state.safetensors")
        try:
            trainer.train(
                _at_home(config), variant, seed, paths.BASE, prompts, paths.RUNS / run, logs, resume
            )
        except Exception:
            jobs.finish(job, "FAILED", _curves(run))
            raise
        jobs.finish(job, "FINISHED", _curves(run), _checkpoint_tags(run))
        with suppress(OSError):  # not there, or a newer state in it
            resume.parent.rmdir()


def diagnose(config: Config) -> None:
    """Measure the gradient noise of the study's variants and the token maps of a few images at the base policy."""
    processes.die_with_parent()
    import torch

    from margrpo import diagnose as noise
    from margrpo import maps
    from margrpo.checkpoints import write_atomic
    from margrpo.prompts import read_prompts

    torch.set_num_threads(1)
    config, given = _at_home(inputs.for_training(config)), config.diagnose
    prompts = {split: read_prompts(paths.PROMPTS / f"{split}.jsonl") for split in ("train", "validation")}
    variants = list(dict.fromkeys(run.variant for run in config.study.runs.values()))
    if given.gradients is None or noise.REFERENCE not in config.variants:
        variants = []
    table = noise.diagnose(config, variants, given.seed, paths.BASE, prompts, given.gradients or 0)
    write_atomic(paths.DIAGNOSE / "noise.csv", table.to_csv(index=False).encode())
    found, facts = maps.map_base(config, paths.BASE, prompts["validation"])
    maps.save_maps(paths.DIAGNOSE / "maps.safetensors", found, facts)


def evaluate(config: Config, run: str) -> None:
    """Evaluate the checkpoints of a run, or the base policy, on the test prompts."""
    processes.die_with_parent()
    import torch

    from margrpo.evaluation import evaluate as evaluate_policies
    from margrpo.prompts import read_prompts

    torch.set_num_threads(1)
    config = inputs.for_evaluation(config)
    out = paths.EVALUATION / run
    if run == BASE_RUN:
        policies, key = {"last": paths.BASE}, jobs.digest(["base", _base_sha256()])
    else:
        folder = paths.RUNS / run
        policies = {name: folder / f"{name}.safetensors" for name in ("last", "best", "milestone")}
        key = cell_key(config, *_cell(config, run))
    job = jobs.announce(_run_job(config, "evaluate", run, key, out))
    prompts = read_prompts(paths.PROMPTS / "test.jsonl")
    images = paths.state("benchmarks", f"{run}-{jobs.digest(_code())}")
    try:
        evaluate_policies(_at_home(config), policies, paths.BASE, out, prompts, images=images)
    except Exception:
        jobs.remove(job)
        raise
    _finish_evaluation(job, run)


def log(config: Config, run: str) -> None:
    """Ship the results of a run that DVC has taken from its cache instead of making them."""
    key = cell_key(config, *_cell(config, run))
    _finish_evaluation(jobs.announce(_run_job(config, "evaluate", run, key, paths.EVALUATION / run)), run)


def _finish_evaluation(job: jobs.Job, run: str) -> None:
    files = {name: paths.EVALUATION / run / name for name in ("metrics.json", "grid.png")}
    jobs.finish(job, "FINISHED", files | _curves(run), _checkpoint_tags(run))


def write_report(config: Config) -> None:
    """Build the report of the study."""
    processes.die_with_parent()
    from pipeline.report import build

    job = jobs.announce(jobs.make(config, "report", source=str(Path.cwd() / "reports")))
    try:
        build(config, Path.cwd())
    except Exception:
        jobs.finish(job, "FAILED", {})
        raise
    jobs.finish(job, "FINISHED", {name: Path("reports") / name for name in ("metrics.json", "report.html")})


def cell_key(config: Config, variant: str, seed: int) -> str:
    """Return the hash of all that a cell's result depends on: params, base, prompts, code, torch."""
    import importlib.metadata

    from margrpo.checkpoints import sha256

    prompts = [sha256(paths.PROMPTS / f"{split}.jsonl") for split in ("train", "validation")]
    content = [_cell_params(config, variant, seed), _base_sha256(), prompts, _code()]
    return jobs.digest([*content, importlib.metadata.version("torch")])


def _code() -> dict[str, str]:
    from margrpo.checkpoints import sha256

    return {str(file.relative_to(_PACKAGE)): sha256(file) for file in sorted(_PACKAGE.rglob("*.py"))}


def _cell_params(config: Config, variant: str, seed: int) -> dict[str, Any]:
    sections = {name: getattr(config, name).model_dump() for name in ("sampler", "train", "reward")}
    sections["reward"]["options"] = inputs.without_paths(config.reward.options)
    objective = config.objective_of(variant).model_dump()
    validated = {"guidance": config.evaluation.guidance}
    return {"variant": variant, "seed": seed, **sections, "objective": objective, "evaluation": validated}


def _at_home(config: Config) -> Config:
    """Return the params with a relative checkpoint.path taken from the project, also in a scratch clone."""
    given = config.checkpoint
    if given.path is None:
        return config
    found = paths.home() / Path(given.path).expanduser()
    return config.model_copy(update={"checkpoint": given.model_copy(update={"path": str(found)})})


def _curves(run: str) -> dict[str, Path]:
    """Return what the curves of a run are shipped from: name in the job's folder -> file."""
    files = {name: paths.LOGS / run / name for name in ("metrics.csv", "timing.csv")}
    grids = sorted((paths.RUNS / run / jobs.IMAGES).glob("*.png"))
    return files | {f"{jobs.IMAGES}/{grid.name}": grid for grid in grids}


def _checkpoint_tags(run: str) -> dict[str, str]:
    """Return the tags that name the checkpoints of a finished run; the files themselves are not shipped."""
    import json

    file = paths.LOGS / run / "summary.json"
    if not file.is_file():  # the base policy
        return {}
    summary = json.loads(file.read_text(encoding="utf-8"))
    file = paths.RUNS / run / "last.safetensors"
    experiment = os.environ.get("MARGRPO_SWEEP") and os.environ.get(
        "DVC_EXP_NAME"
    )  # its clone will be removed
    tags = {"checkpoint_path": f"{experiment}:{file}" if experiment else str(Path.cwd() / file)}
    tags |= {f"checkpoint_{name}_sha256": summary[f"{name}_sha256"] for name in ("last", "best")}
    return tags | {"checkpoint_best_update": str(summary["best_update"])}


def _base_sha256() -> str:
    from margrpo.checkpoints import sha256

    return sha256(paths.BASE)


def _origin_of_base() -> dict[str, str]:
    """Return the tags that say which repository and commit of the hub the base policy is from, if any."""
    from margrpo.checkpoints import read_header

    origin = read_header(paths.BASE).get("provenance", {})
    return {f"base_{key}": str(origin[key]) for key in ("id", "revision", "commit") if origin.get(key)}


def _cell(config: Config, run: str) -> tuple[str, int]:
    if run not in config.study.runs:
        raise ConfigError.of("run", run, f"allowed: {', '.join(config.study.runs)}")
    cell = config.study.runs[run]
    return cell.variant, cell.seed


def _run_job(config: Config, kind: jobs.Kind, run: str, key: str, source: Path) -> jobs.Job:
    base = _base_sha256()
    params: dict[str, Any] = {}
    tags = {"variant": run, "base_sha256": base, **_origin_of_base(), **jobs.origin_tags()}
    if run != BASE_RUN:
        variant, seed = _cell(config, run)
        params = jobs.flatten(_cell_params(config, variant, seed))
        tags |= {"variant": variant, "seed": str(seed), "params_hash": jobs.digest(params)}
    named = {name.replace("/", "."): str(value) for name, value in params.items()}
    folders = {
        "source": str(Path.cwd() / source),
        "pictures": str(Path.cwd() / paths.RUNS / run / jobs.IMAGES),
    }
    return jobs.make(config, kind, run=run, cell=key, tags=tags, params=named, **folders)


_VERBS: dict[str, Callable[..., None]] = {
    "prompts": write_prompts,
    "checkpoint": write_checkpoint,
    "train": train,
    "diagnose": diagnose,
    "evaluate": evaluate,
    "log": log,
    "report": write_report,
}


def main(arguments: Sequence[str]) -> int:
    """Run a stage; return 2 after a one-line message for anything a person can correct."""
    try:
        if not arguments or arguments[0] not in _VERBS:
            raise ConfigError.of("stage", " ".join(arguments), f"allowed: {' | '.join(_VERBS)}")
        _VERBS[arguments[0]](load_config(paths.PARAMS), *arguments[1:])
    except MargrpoError as error:
        print(f"margrpo: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("margrpo: stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
