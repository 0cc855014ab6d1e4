"""A run of several processes (gloo) against the same run of one."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from margrpo.checkpoints import load_policy
from margrpo.errors import ConfigError
from margrpo.workers import Workers
from tests.support import make_config

ROOT = Path(__file__).parents[1]


def launch(processes: int, out: Path, variant: str, micro_batch: int) -> dict[str, Any]:
    out.mkdir()
    arguments = ["-m", "tests.ranks", str(out), variant, str(micro_batch)]
    if processes > 1:
        arguments = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes), *arguments]
        arguments[4:4] = ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = torch.load(out / "found.pt")
    with open(out / "logs" / "metrics.csv", newline="") as file:
        found["metrics"] = list(csv.DictReader(file))
    found["weights"] = load_policy(out / "weights" / "last.safetensors").state_dict()
    return found


@pytest.mark.parametrize(("variant", "processes"), [("released", 2), ("bridged", 3)])
def test_processes_give_what_one_gives(variant: str, processes: int, tmp_path: Path) -> None:
    # 2 groups of 3 images, one image a pass: 2 processes have a group each, of 3 the second has one of each group
    one = launch(1, tmp_path / "one", variant, 1)
    many = launch(processes, tmp_path / "many", variant, 1)
    assert torch.equal(one["advantages"], many["advantages"])
    assert len(set(one["advantages"].tolist())) == 6  # own random streams: no two images are the same
    for key in ("reward", "reward_std", "rewards/ranks_brightness/mean", "frac_reward_zero_std", "diversity"):
        assert one["row"][key] == many["row"][key]
    for key in ("loss", "kl", "grad_norm"):
        assert many["row"][key] == pytest.approx(one["row"][key], rel=1e-5)
    assert one["validation"] == many["validation"]
    scale = float(one["gradient"].abs().max())
    assert scale > 0
    assert float((one["gradient"] - many["gradient"]).abs().max()) <= 1e-5 * scale
    # the whole run: the same logs and weights, written once
    assert len(one["metrics"]) == len(many["metrics"]) == 2
    assert one["metrics"][0]["reward"] == many["metrics"][0]["reward"]
    for name, value in one["weights"].items():
        # Adam's first steps (4e-4) are signs: where a gradient is nearly 0, rounding may turn one
        assert float((many["weights"][name] - value).abs().mean()) < 8e-6
    assert sorted(p.name for p in (tmp_path / "many" / "logs").iterdir()) == [
        "metrics.csv",
        "summary.json",
        "timing.csv",
    ]
    assert not (tmp_path / "many" / "state").exists()


def test_images_that_do_not_divide_are_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"images_per_prompt: 6; allowed: a multiple of the 4 processes"):
        Workers(make_config().train)  # 2 slots of 3 images


@pytest.mark.parametrize("name", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"])
def test_sharded_weights_are_refused_instead_of_ignored(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "true")
    with pytest.raises(ConfigError, match=f"{name}: true; allowed: data parallelism alone"):
        Workers(make_config().train)


def test_a_missing_gpu_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(ConfigError, match=r"train\.device: cuda; allowed: cpu"):
        Workers(make_config(train={"device": "cuda"}).train)
