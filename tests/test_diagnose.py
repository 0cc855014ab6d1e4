from __future__ import annotations

from pathlib import Path

import pytest

from margrpo.checkpoints import save_policy
from margrpo.diagnose import REFERENCE, diagnose
from margrpo.rewards import base as rewards
from tests.support import make_config, make_policy, scene_prompts


def test_table_of_gradient_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        rewards._REGISTRY,
        "brightness",
        rewards.Entry(
            rewards.Info("brightness", "test", "none"),
            lambda options: lambda images, prompts, specs: images.mean((1, 2, 3)),
        ),
    )
    base = tmp_path / "base.safetensors"
    save_policy(make_policy(scale=0.1), base, {})
    config = make_config(reward={"weights": {"brightness": 1.0}}, train={"images_per_prompt": 8})
    prompts = {"train": scene_prompts("train", 8), "validation": scene_prompts("validation", 4)}
    variants = [REFERENCE, "frozen_head", "bridged"]
    table = diagnose(config, variants, 0, base, prompts, updates=24).set_index("variant")
    assert list(table.index) == variants
    # the reference's own projection on its mean from other updates is 1 up to noise
    assert 0.5 < table.projection[REFERENCE] < 1.5
    assert (table.trace > 0).all()
    norms = table.mean_norm**2 / (table.trace / 24)
    assert norms.tolist() == pytest.approx(table.signal_to_noise.tolist(), rel=1e-6)
