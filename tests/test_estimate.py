from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from margrpo.base import sketch_base
from margrpo.checkpoints import load_policy, save_policy
from margrpo.cli import app, run
from margrpo.config import Config
from margrpo.estimate import count_work, estimate
from margrpo.golden.companions import complete_folder
from margrpo.params import load_config
from margrpo.policies.base import Policy
from margrpo.updater import Updater
from tests.policies.real import GOLDEN, trainable_folder
from tests.support import VARIANTS, make_config, make_policy, scene_prompts

PARAMS = Path(__file__).parents[1] / "params.yaml"
PAPER = {"nova_sd512": (2e-6, 5.0), "nova_sdxl1024": (2e-6, 5.0), "harmon_1_5b": (1e-6, 3.0)}


@pytest.mark.parametrize("profile", PAPER)
def test_profiles_have_the_numbers_of_the_paper(profile: str) -> None:
    config = load_config(PARAMS, profile=profile)
    rate, guidance = PAPER[profile]
    assert config.train.learning_rate == rate
    assert config.objective.guidance.rollout == config.evaluation.guidance == guidance
    assert (config.sampler.ar_steps, config.sampler.denoising_steps) == (64, 25)
    assert (config.train.ar_steps, config.train.denoising_steps) == (12, 10)
    assert (config.train.updates, config.objective.beta) == (1200, 0.01)
    assert config.train.images_per_prompt >= 4
    assert list(config.reward.weights) == ["hpsv2"]  # without the embedded one
    assert config.checkpoint.source == "hub"
    for variant in config.variants:
        config.objective_of(variant)
    assert config.objective_of("mar_grpo_released").trajectories == (5 if profile == "harmon_1_5b" else 3)


def counted(config: Config, variant: str, base: Path) -> tuple[int, int, int, int]:
    """Return backbone passes and head rows of a real update, without and with gradient."""
    prompts = scene_prompts("train", 4)
    updater = Updater(config, variant, 0, base, prompts, prompts)
    found = {"backbone": [0, 0], "head": [0, 0]}

    def watch(policy: Policy) -> None:
        for name in found:
            original = getattr(policy, name)

            def call(first: Any, *rest: Any, name: str = name, original: Any = original) -> Any:
                found[name][torch.is_grad_enabled()] += len(first)
                return original(first, *rest)

            setattr(policy, name, call)

    watch(updater.policy)
    assert updater.reference is not None
    watch(updater.reference)
    updater.accumulate(updater.collect(1)[1])
    return (*found["backbone"], *found["head"])  # type: ignore[return-value]


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("variant", VARIANTS)
def test_counted_work_is_what_an_update_does(variant: str, guidance: float, tmp_path: Path) -> None:
    base = tmp_path / "base.safetensors"
    save_policy(make_policy(), base, {})
    config = make_config(
        sampler={"ar_steps": 4, "denoising_steps": 5},
        train={"ar_steps": 4, "denoising_steps": 3},  # all AR steps: nothing depends on the draw
        objective={"guidance": {"rollout": guidance}},
        reward={"weights": {"jpeg_size": 1.0}},
    )
    policy = load_policy(base)
    policy.configure(config.sampler)
    work = count_work(config, config.objective_of(variant), policy)
    expected = counted(config, variant, base)
    # which tokens are uncertain, early or late ones, is not known before: the share of them is an expectation
    rel = 0.15 if config.objective_of(variant).uncertain_fraction < 1 else 1e-9
    assert (work.backbone, work.backbone_scored) == expected[:2]
    assert work.head == pytest.approx(expected[2], rel=rel)
    assert work.head_scored == pytest.approx(expected[3], rel=rel)


@pytest.mark.parametrize("family", ["mar", "harmon", "nova"])
def test_a_sketch_has_the_parameters_of_the_policy_without_its_weights(family: str, tmp_path: Path) -> None:
    if family == "nova":
        folder = complete_folder(GOLDEN / "nova" / "abs", tmp_path / "nova")
    else:
        folder = trainable_folder(family, tmp_path / family)
    real = load_policy(folder)
    sizes = {name: value.shape for name, value in real.named_parameters()}
    for file in folder.rglob("*.safetensors"):
        file.unlink()
    sketch = sketch_base(make_config(checkpoint={"source": "path", "path": str(folder)}))
    assert {name: value.shape for name, value in sketch.named_parameters()} == sizes
    assert all(value.is_meta for value in sketch.backbone_parameters())


def test_memory_of_a_known_size(tmp_path: Path) -> None:
    # MAR base: 768 wide, 12 + 12 blocks. By hand: a block has 12 w^2 + 13 w parameters
    (tmp_path / "config.json").write_text(json.dumps({"type": "mar_base"}))
    config = make_config(
        checkpoint={"source": "path", "path": str(tmp_path)},
        sampler={"ar_steps": 64, "denoising_steps": 25},
        train={"ar_steps": 12, "denoising_steps": 10},
    )
    policy = sketch_base(config)
    found = estimate(config, "frozen_head", policy, 1, 1.0)
    blocks = 24 * (12 * 768**2 + 13 * 768)
    tables = 2 * 320 * 768 + 256 * 768 + 1000 * 768
    others = (16 * 768 + 768) + (768 * 768 + 768) + 3 * 2 * 768 + 2 * 768
    assert found.parameters["backbone"] == blocks + tables + others
    assert found.learning == found.parameters["backbone"]
    assert found.memory["AdamW moments"] == 8 * found.learning
    assert found.memory["reference"] == found.memory["weights"] == 4 * sum(found.parameters.values())
    trains = {"rank": 8, "alpha": 8, "targets": ["qkv"]}
    lora = config.model_copy(
        update={"train": config.train.model_copy(update={"gradient_checkpointing": True})}
    )
    assert estimate(lora, "frozen_head", policy, 1, 1.0).memory["activations"] < found.memory["activations"]
    adapters = make_config(
        checkpoint={"source": "path", "path": str(tmp_path)},
        sampler={"ar_steps": 64, "denoising_steps": 25},
        train={"ar_steps": 12, "denoising_steps": 10, "lora": trains},
    )
    small = estimate(adapters, "frozen_head", policy, 1, 1.0)
    assert small.learning == 24 * 8 * (768 + 3 * 768)
    assert small.memory["reference"] == 0
    assert found.seconds == pytest.approx(found.tflop)


def test_activations_are_near_what_autograd_keeps(tmp_path: Path) -> None:
    base = tmp_path / "base.safetensors"
    save_policy(make_policy(), base, {})
    config = make_config(reward={"weights": {"jpeg_size": 1.0}}, objective={"beta": 0.0})
    prompts = scene_prompts("train", 4)
    updater = Updater(config, "frozen_head", 0, base, prompts, prompts)
    _, pieces = updater.collect(1)
    most = 0
    for piece in pieces:
        kept: dict[int, int] = {}

        def keep(value: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            storage = value.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return value

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
            updater.accumulate([piece])
        most = max(most, sum(kept.values()))
    expected = estimate(config, "frozen_head", updater.policy, 1, None).memory["activations"]
    assert 0.5 < expected / most < 2


def test_the_command_reads_no_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"type": "mar_huge"}))
    given = ["checkpoint.source=path", f"checkpoint.path={tmp_path}", "sampler.ar_steps=64"]
    settings = [part for item in given for part in ("--set", item)]
    assert run(app, ["estimate", "grpo", "--params", str(PARAMS), "--tflops", "1", *settings]) == 0
    printed = capsys.readouterr().out
    assert "memory per process" in printed
    assert "TFLOP per update" in printed
    (tmp_path / "config.json").write_text(json.dumps({"type": "mar_hug"}))
    assert run(app, ["estimate", "grpo", "--params", str(PARAMS), *settings]) == 2
    assert "type 'mar_hug'; allowed: mar_base, mar_large, mar_huge" in capsys.readouterr().err
