"""The setting of the study: parameters, sizes, code version, software and machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

from margrpo.checkpoints import load_policy, sha256
from pipeline.report.data import StudyData

BASE_CHECKPOINT = Path("artifacts/base/policy.safetensors")
_PACKAGES = ("torch", "numpy", "scipy", "dvc", "mlflow", "prefect")
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
        ("Code", _commit(root)),
        ("Software", f"Python {platform.python_version()}, {', '.join(_versions())}"),
        (
            "Machine of this report",
            f"{_cpu()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        ),
    ]


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
        f"{head:,} in the head; sha256 {digest[:12]}"
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
    return f"git commit {commit[:12]}{', with uncommitted changes' if changed else ''}"


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown CPU"
