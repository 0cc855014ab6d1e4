"""The maps show what the estimator computes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from margrpo.errors import MargrpoError
from margrpo.maps import load_maps, mapped_variant, save_maps, token_maps
from margrpo.objective import consistency_mask
from margrpo.rollout import Recording, generate
from margrpo.trajectories import draw_fresh
from tests.support import make_policy, objective

OBJECTIVE = objective(
    trajectory_source="resampled",
    trajectories=3,
    uncertain_fraction=0.3,
    resample_condition="current",
    include_rollout=True,
    consistency=0.0,
)
PROMPTS, SEEDS = ["a red circle", "two blue squares"], [11, 12]


def test_maps_are_what_the_objective_uses() -> None:
    policy = make_policy()
    maps = token_maps(policy, PROMPTS, SEEDS, 4, OBJECTIVE)
    schedule = policy.ar_schedule(4)
    assert maps.steps.tolist() == list(range(len(schedule)))
    for image in range(2):
        assert torch.bincount(maps.committed[image]).tolist() == list(schedule)
    recording = Recording(range(len(schedule)), (), unknown=True, consistency=True)
    rollout = generate(policy, PROMPTS, SEEDS, 4, recording=recording)
    assert torch.equal(maps.images, policy.decode(rollout.tokens))
    for step in rollout.steps:
        mask = consistency_mask(step, rollout.tokens, 0.0)
        expected = torch.zeros_like(maps.chosen).scatter(1, step.index, mask)
        assert torch.equal(maps.kept[step.k], expected)
        open_now = maps.committed >= step.k
        assert torch.equal(maps.uncertainty[step.k].isnan(), ~open_now)
        assert torch.equal(maps.approach[step.k].isnan(), ~open_now if step.k else torch.ones_like(open_now))
    fresh = draw_fresh(policy, rollout, OBJECTIVE, ())
    assert fresh is not None
    assert torch.equal(maps.chosen, fresh.uncertain)  # round(.3 * 16) tokens an image
    assert maps.chosen.sum(1).tolist() == [5, 5]


def test_many_steps_are_thinned_out_and_the_ends_kept() -> None:
    policy = make_policy()
    steps = token_maps(policy, PROMPTS[:1], SEEDS[:1], 12, OBJECTIVE).steps.tolist()
    assert len(steps) == 6
    assert steps[0] == 0
    assert steps[-1] == len(policy.ar_schedule(12)) - 1


def test_maps_survive_a_file(tmp_path: Path) -> None:
    maps = token_maps(make_policy(), PROMPTS, SEEDS, 3, OBJECTIVE)
    save_maps(tmp_path / "maps.safetensors", maps, {"prompts": PROMPTS})
    again, facts = load_maps(tmp_path / "maps.safetensors")
    assert again is not None
    assert facts == {"prompts": PROMPTS}
    for field in dataclasses.fields(maps):
        ours, theirs = getattr(maps, field.name), getattr(again, field.name)
        if field.name == "images":
            assert float((ours - theirs).abs().max()) <= 0.5 / 255 + 1e-6  # 8 bits
        else:
            assert torch.equal(ours.nan_to_num(-1), theirs.nan_to_num(-1))
    save_maps(tmp_path / "none.safetensors", None, {})
    assert load_maps(tmp_path / "none.safetensors") == (None, {})
    (tmp_path / "broken.safetensors").write_bytes(b"no file of ours")
    with pytest.raises(MargrpoError):
        load_maps(tmp_path / "broken.safetensors")


def test_mapped_variant_chooses_and_filters() -> None:
    assert mapped_variant({"a": objective(), "b": objective(consistency=0.0), "c": OBJECTIVE}) == "c"
    assert mapped_variant({"a": objective()}) is None
