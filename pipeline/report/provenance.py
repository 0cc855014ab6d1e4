"""Where the numbers come from: setting, code, params, data, checkpoints, software, machine."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from margrpo.checkpoints import load_policy, sha256
from pipeline.report.data import StudyData
from pipeline.report.tables import Table

BASE_CHECKPOINT = Path("artifacts/base/policy.safetensors")
_PROMPTS = Path("artifacts/prompts")
_PACKAGES = (
    *("margrpo", "torch", "numpy", "scipy", "pandas", "safetensors", "matplotlib", "pillow"),
    *("diffusers", "transformers", "dvc", "mlflow", "prefect"),
)
# What decides results: a changed note or an output of DVC does not make the code dirty.
_CODE = ("margrpo", "pipeline", "params.yaml", "dvc.yaml", "pyproject.toml", "constraints.txt")


def describe_setting(study: StudyData, root: Path) -> list[tuple[str, str]]:
    """Return label and text of every line of the setting."""
    config = study.config
    train, sampler, evaluation = config.train, config.sampler, config.evaluation
    prompts = study.base.prompts
    test_prompts = prompts.drop_duplicates("prompt")
    seen = int(test_prompts["seen"].astype(bool).sum()) if "seen" in test_prompts else 0
    weights = ", ".join(f"{name} × {weight:g}" for name, weight in config.reward.weights.items())
    images = len(test_prompts) * evaluation.images_per_prompt
    return [
        ("Base policy", f"{config.checkpoint.source}; {_base(study, root)}"),
        (
            "Training",
            f"{train.updates} updates of {train.prompts_per_update} prompts × {train.images_per_prompt} "
            f"images; AdamW, rate {train.learning_rate:g}, gradient norm clipped at "
            f"{train.max_grad_norm:g}; KL weight {config.objective.beta:g} ({config.objective.kl}); reward: "
            f"{weights}",
        ),
        (
            "Sampler",
            f"{sampler.ar_steps} AR steps, {sampler.denoising_steps} denoising steps, eta {sampler.eta:g}, "
            f"{sampler.final_step} final step; per update {train.ar_steps} AR and {train.denoising_steps} "
            "denoising steps are scored",
        ),
        (
            "Evaluation",
            f"{len(test_prompts)} test prompts ({seen} with seen, {len(test_prompts) - seen} with unseen "
            f"compositions) × {evaluation.images_per_prompt} images = {images:,} images per sampler "
            f"({', '.join(name.upper() for name in evaluation.samplers)}); the noise of an image depends on "
            "its prompt and index only, so every policy gets the same",
        ),
    ]


def describe_provenance(study: StudyData, root: Path) -> list[tuple[str, str]]:
    """Return label and text of every line that says which code, params, data and machine made the report."""
    return [
        *describe_machine(root)[:1],
        ("Params", f"sha256 {params_sha256(study)} of the validated content, which is below"),
        ("dvc.lock", _lock(root)),
        ("Data", _data(root)),
        *describe_machine(root)[1:],
        (
            "Again",
            "`git checkout` of that commit and `make repro`: the same numbers on the same kind of machine; another CPU "
            "rounds differently",
        ),
    ]


def describe_machine(root: Path) -> list[tuple[str, str]]:
    """Return the lines on code, software and machine."""
    return [
        ("Code", _commit(root)),
        ("Software", f"Python {platform.python_version()}, {', '.join(_versions())}"),
        ("Machine of this report", f"{_cpu()}, {os.cpu_count()} cores, {_memory()}, {platform.platform()}"),
    ]


def params_text(study: StudyData) -> str:
    """Return the validated params as JSON; profiles and tracking are left out: they change no number."""
    content = study.config.model_dump(exclude={"profiles", "tracking"})
    return json.dumps(content, indent=1, sort_keys=True)


def params_sha256(study: StudyData) -> str:
    """Return the hash of `params_text`."""
    return hashlib.sha256(params_text(study).encode()).hexdigest()


def checkpoints_table(study: StudyData) -> Table:
    """Return the hashes of the policies that the runs ended with."""
    rows = tuple(
        (
            run.name,
            str(run.summary.get("updates", run.updates())),
            str(run.summary.get("last_sha256", "n/a")),
            str(run.summary.get("best_sha256", "n/a")),
        )
        for run in study.runs
    )
    return Table(
        "Checkpoints of the runs",
        ("run", "updates", "sha256 of last.safetensors", "sha256 of best.safetensors"),
        rows,
        "In artifacts/runs/<run>; `dvc pull` or `dvc checkout` brings them, `sha256sum` compares.",
        folded=True,
    )


def _base(study: StudyData, root: Path) -> str:
    """Return sizes and hash of the base policy, and whether the runs started from this very file."""
    path = root / BASE_CHECKPOINT
    if not path.is_file():
        return f"{BASE_CHECKPOINT} is not here"
    policy = load_policy(path)
    backbone = sum(parameter.numel() for parameter in policy.backbone_parameters())
    head = sum(parameter.numel() for parameter in policy.head_parameters())
    digest = sha256(path)
    others = sorted(run.name for run in study.runs if run.summary.get("base_sha256") != digest)
    return (
        f"{policy.tokens} tokens of {policy.channels} channels, {backbone:,} parameters in the backbone and "
        f"{head:,} in the head; sha256 {digest}"
    ) + (f"; NOT the base of {', '.join(others)}" if others else "")


def _versions() -> list[str]:
    found = []
    for package in _PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _commit(root: Path) -> str:
    commit = _git(root, "rev-parse", "HEAD")
    if not commit:
        return "no git repository"
    present = [name for name in _CODE if (root / name).exists()]
    changed = _git(root, "status", "--porcelain", "--", *present)
    return f"git commit {commit}{', with uncommitted changes' if changed else ''}"


def _lock(root: Path) -> str:
    """Return the hash of what dvc.lock says of all stages but this report's own, which DVC writes after it."""
    try:
        content: dict[str, Any] = YAML(typ="safe").load((root / "dvc.lock").read_text(encoding="utf-8")) or {}
    except (OSError, YAMLError):
        return "is not here"
    stages = {name: stage for name, stage in (content.get("stages") or {}).items() if name != "report"}
    digest = hashlib.sha256(json.dumps(stages, sort_keys=True).encode()).hexdigest()
    return f"sha256 {digest} of its {len(stages)} stages other than the report, as sorted JSON"


def _data(root: Path) -> str:
    found = [f"{file.name} {sha256(file)}" for file in sorted((root / _PROMPTS).glob("*.jsonl"))]
    return f"sha256 of the prompts: {', '.join(found)}" if found else f"{_PROMPTS} is not here"


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _memory() -> str:
    return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown CPU"
