"""A training run of the embedded world on two rewards, also when one of them misbehaves."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from margrpo.checkpoints import save_policy
from margrpo.errors import TrainingError
from margrpo.rewards import base, columns
from margrpo.trainer import train
from margrpo.updater import Updater
from tests.oracles import tiny
from tests.rewards.serving import Server
from tests.support import make_config, make_policy, scene_prompts

PROMPTS = {"train": scene_prompts("train", 6), "validation": scene_prompts("validation", 2)}


def run(
    tmp_path: Path, reward: dict[str, Any], resume: Path | None = None, **sections: Any
) -> list[dict[str, str]]:
    policy = tmp_path / "policy.safetensors"
    save_policy(make_policy(), policy, {})
    config = make_config(reward=reward, **sections)
    train(
        config, "frozen_head", 0, policy, PROMPTS, tmp_path / "out", tmp_path / "logs", resume, progress=False
    )
    with open(tmp_path / "logs" / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def misbehave(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Register a reward that does something wrong in some calls; returns the list of its calls."""

    def register(wrong: dict[int, Any]) -> list[int]:
        calls: list[int] = []

        def reward(images: Tensor, prompts: Sequence[str], specs: base.Specs) -> Tensor:
            if len(images) > 1:  # images one by one are the search for the culprit
                calls.append(len(images))
            fault = wrong.get(len(calls))
            if isinstance(fault, Exception):
                raise fault
            scores = images.mean((1, 2, 3))
            return scores if fault is None else fault(scores)

        info = base.Info("odd", "test", "none")
        monkeypatch.setitem(base._REGISTRY, "odd", base.Entry(info, lambda options: reward))
        return calls

    return register


def test_both_rewards_have_their_curves_and_the_sum_is_weighted(tmp_path):
    options = {"jpeg_size": {"shift": -1.0, "scale": 0.5}}
    rows = run(tmp_path, {"weights": {"scenes": 1.0, "jpeg_size": 0.25}, "options": options})
    assert len(rows) == 4
    assert set(columns(["scenes", "jpeg_size"])) <= set(rows[0])
    for row in rows:
        scene, size = float(row["rewards/scenes/mean"]), float(row["rewards/jpeg_size/mean"])
        assert 0 <= scene <= 1
        assert -3 < size < -0.5  # a 32 x 32 picture has about a kB
        assert float(row["reward"]) == pytest.approx(scene + 0.25 * (size + 1.0) / 0.5, abs=1e-5)
        assert float(row["rewards/jpeg_size/std"]) > 0
        assert row["rewards/jpeg_size/failed"] == "0.0"
        assert 0 <= float(row["rewards/scenes/frac_zero_std"]) <= 1


def test_a_real_scorer_trains_beside_the_embedded_rule(tmp_path):
    folder = tiny.hps(tmp_path / "weights")
    reward = {
        "weights": {"scenes": 1.0, "hpsv2.1": 2.0},
        "options": {"hpsv2.1": {"path": str(folder), "batch_size": 4, "normalize": "standard"}},
    }
    for row in run(tmp_path, reward):
        # over the batch the normalised part has mean 0: the sum has the mean of the other part
        assert float(row["reward"]) == pytest.approx(float(row["rewards/scenes/mean"]), abs=1e-5)
        assert -1 < float(row["rewards/hpsv2.1/mean"]) < 1
        assert float(row["rewards/hpsv2.1/std"]) > 0
        assert row["rewards/hpsv2.1/failed"] == "0.0"


def test_a_run_survives_an_exception_and_missing_scores(tmp_path, misbehave):
    def hole(scores: Tensor) -> Tensor:
        return torch.where(torch.arange(len(scores)) == 1, torch.nan, scores)

    # calls: updates 1 and 2, the validation, updates 3 and 4, the validation
    calls = misbehave({2: RuntimeError("out of memory"), 4: hole})
    rows = run(tmp_path, {"weights": {"odd": 1.0, "scenes": 1.0}})
    assert len(calls) == 6
    assert [row["rewards/odd/failed"] for row in rows] == ["0.0", "6.0", "1.0", "0.0"]
    assert [row["reward"] == "" for row in rows] == [False, True, False, False]
    assert float(rows[1]["kl"]) >= 0
    assert all(float(row["loss"]) == float(row["loss"]) for row in rows)


def test_on_failure_fail_stops_and_names_the_last_good_state(tmp_path, misbehave):
    misbehave({2: ConnectionError("gone")})
    reward = {"weights": {"odd": 1.0}, "options": {"odd": {"on_failure": "fail"}}}
    state = tmp_path / "state.safetensors"
    message = r"no score for 6 of 6 images \(ConnectionError: gone\) at update 2; the last good state is .*\(update 1\)"
    with pytest.raises(TrainingError, match=message):
        run(tmp_path, reward, state)
    assert state.is_file()
    misbehave({})
    resumed = run(tmp_path, reward, state)
    whole = tmp_path / "whole"
    whole.mkdir()
    assert resumed == run(whole, reward)


@pytest.mark.parametrize(("call", "place", "kept"), [(5, "update 4", 3), (6, "the validation", 4)])
def test_a_reward_that_dies_stops_with_the_state_of_the_last_finished_update(
    call, place, kept, tmp_path, misbehave
):
    # calls: updates 1 and 2, the validation, updates 3 and 4, the validation; no resume state is due before the end
    misbehave({call: RuntimeError("gone")})
    reward = {"weights": {"odd": 1.0}, "options": {"odd": {"on_failure": "fail"}}}
    state, sparse = tmp_path / "state.safetensors", {"checkpoint_every": 10}
    with pytest.raises(
        TrainingError, match=rf"gone\) at {place}; the last good state is .*\(update {kept}\)"
    ):
        run(tmp_path, reward, state, train=sparse)
    calls = misbehave({})
    resumed = run(tmp_path, reward, state, train=sparse)
    assert len(calls) == 7 - call  # what was finished is not done again
    whole = tmp_path / "whole"
    whole.mkdir()
    assert resumed == run(whole, reward, train=sparse)
    ours, theirs = ((folder / "out" / "last.safetensors").read_bytes() for folder in (tmp_path, whole))
    assert ours == theirs


def test_a_server_that_is_killed_costs_time_and_nothing_else(tmp_path, monkeypatch):
    weights = {"scenes": 1.0, "jpeg_size": 0.25}
    local = tmp_path / "local"
    local.mkdir()
    expected = run(local, {"weights": weights})  # jpeg_size rounds to 8 bit in this process too
    servers = [Server("jpeg_size")]
    url = servers[0].wait()
    state, sparse = tmp_path / "state.safetensors", {"checkpoint_every": 10}

    def remote(wait_s: float) -> list[dict[str, str]]:
        options = {"jpeg_size": {"url": url, "wait_s": wait_s}}
        return run(tmp_path, {"weights": weights, "options": options}, state, train=sparse)

    def restart() -> None:
        servers[-1].kill()
        servers.append(Server("jpeg_size", port=int(url.rsplit(":", 1)[1])))

    validate, update = Updater.validate, Updater.update
    with monkeypatch.context() as patch:
        patch.setattr(Updater, "validate", lambda self: (servers[-1].kill(), validate(self))[1])
        message = rf"jpeg_size: no answer from {url} within 0.2 s .* at the validation; .*\(update 2\)"
        with pytest.raises(TrainingError, match=message):
            remote(wait_s=0.2)
    restart()
    updates = []

    def interrupted(self: Updater, number: int, validated: bool) -> dict[str, float]:
        updates.append(number)
        if number == 4:
            restart()  # without waiting until it is up
        return update(self, number, validated)

    monkeypatch.setattr(Updater, "update", interrupted)
    try:
        assert remote(wait_s=600.0) == expected
    finally:
        servers[-1].kill()
    assert updates == [3, 4]
    ours, theirs = ((folder / "out" / "last.safetensors").read_bytes() for folder in (tmp_path, local))
    assert ours == theirs
