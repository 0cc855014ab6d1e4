from __future__ import annotations

from pathlib import Path

import pytest
import torch

from margrpo.cli import app, run
from margrpo.config import RewardOptions
from margrpo.rewards import base, entry, names
from margrpo.rewards.selftest import selftest
from margrpo.rewards.status import state
from tests.oracles import tiny

PARAMS = Path(__file__).parents[2] / "params.yaml"


def test_the_embedded_reward_knows_its_own_pictures():
    result = selftest("scenes", RewardOptions())
    assert result.own == (1.0, 1.0)
    assert max(result.exchanged) < 0.5
    assert result.usable


def test_a_scorer_with_weights_is_tried(tmp_path):
    result = selftest("hpsv2.1", RewardOptions(path=str(tiny.hps(tmp_path))))
    assert result.usable
    assert result.own != result.exchanged


def test_check_says_what_works_and_what_is_missing(tmp_path, capsys):
    folder = tiny.hps(tmp_path / "weights")
    arguments = ["rewards", "check", "--params", str(PARAMS)]
    assert run(app, arguments) == 0
    assert capsys.readouterr().out.startswith("scenes: works; pictures with their prompts 1.0000, 1.0000")
    weights = ["--set", 'reward.weights={"hpsv2.1": 1.0}']
    options = ["--set", f'reward.options={{"hpsv2.1": {{path: {folder}}}}}']
    assert run(app, [*arguments, *weights, *options]) == 0
    out = capsys.readouterr().out
    assert "hpsv2.1: works" in out
    assert f"{folder / tiny.HPS_FILE} sha256 " in out
    assert f"{folder / 'bpe_simple_vocab_16e6.txt.gz'} sha256 " in out
    assert "  licence: Apache-2.0" in out
    (folder / tiny.HPS_FILE).unlink()
    assert run(app, [*arguments, *weights, *options]) == 1
    assert "hpsv2.1: not usable: reward.options.hpsv2.1.path" in capsys.readouterr().out


def test_list_names_every_reward(capsys):
    assert run(app, ["rewards", "list", "--params", str(PARAMS)]) == 0
    out = capsys.readouterr().out
    for name in names():
        assert f"{name}: " in out


def test_the_state_says_what_is_found_and_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    assert state("jpeg_size", RewardOptions()) == "ready: needs no weights of its own"
    assert state("aesthetic", RewardOptions()).startswith("not ready: set reward.options.aesthetic.path to")
    assert state("hpsv2", RewardOptions(url="http://a")) == "served at http://a"
    given = RewardOptions(path=str(tmp_path))
    assert state("hpsv2", given).startswith(
        f"not ready: reward.options.hpsv2.path: {tmp_path} has no HPS_v2_"
    )
    tiny.clip_hf(tmp_path, seed=2)
    assert state("pickscore", given) == f"ready: weights in {tmp_path}"


def test_the_state_finds_weights_in_the_cache_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert state("pickscore", RewardOptions()).startswith("not here: downloads yuvalkirstain/PickScore_v1 at")
    cached = tmp_path / "models--yuvalkirstain--PickScore_v1"
    snapshot = cached / "snapshots" / "abc"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    tiny.clip_hf(snapshot, seed=2)
    assert state("pickscore", RewardOptions()) == f"ready: weights in {snapshot}"
    (snapshot / "model.safetensors").unlink()
    assert state("pickscore", RewardOptions()).startswith("not here")


def test_check_tries_the_rewards_that_are_named(capsys):
    assert run(app, ["rewards", "check", "jpeg_size", "aesthetic", "--params", str(PARAMS)]) == 1
    size, _, beauty, licence = capsys.readouterr().out.splitlines()
    assert size.startswith("jpeg_size: works;")
    assert size.endswith("the prompt does not matter")
    assert beauty.startswith("aesthetic: not usable: reward.options.aesthetic.path: null")
    assert licence == "  licence: Apache-2.0 (predictor), MIT (CLIP)"


def test_check_reads_a_known_sign(capsys):
    pytest.importorskip("rapidocr")
    assert state("ocr", RewardOptions()) == "ready: rapidocr brings its models"
    assert run(app, ["rewards", "check", "ocr", "--params", str(PARAMS)]) == 0
    # only the sign has text, and it is read without a mistake
    expected = (
        "ocr: works; pictures with their prompts nan, 1.0000; exchanged 0.0000, nan; nothing to compare"
    )
    assert capsys.readouterr().out.splitlines()[0] == expected


def test_scores_out_of_range_and_scores_that_change_are_not_usable(monkeypatch):
    calls = []

    def build(options: RewardOptions) -> base.Reward:
        return lambda images, prompts, specs: calls.append(1) or values(len(calls)) * torch.ones(len(images))

    monkeypatch.setitem(base._REGISTRY, "odd", base.Entry(base.Info("odd", "test", "none", 0.0, 1.0), build))
    values = lambda call: 2.0  # noqa: E731
    assert selftest("odd", RewardOptions()).problem == "scores outside of the declared range"
    values = lambda call: 1.0 / call  # noqa: E731
    assert selftest("odd", RewardOptions()).problem == "a second call gave other scores"


@pytest.mark.parametrize(("extra", "code"), [([], 0), (["--json"], 0)])
def test_verify_replays_the_recorded_cases(extra, code, capsys):
    cases = Path(__file__).parents[1] / "golden" / "evaluation" / "cases.json"
    assert run(app, ["verify", "--cases", str(cases), *extra]) == code
    out = capsys.readouterr().out
    assert ('"passed": 207' if extra else "207 passed, 0 failed") in out


def test_every_name_leads_to_a_module_that_registers_it():
    for name in names():
        assert entry(name).info.name == name


def test_verify_needs_one_of_its_two_inputs(capsys):
    assert run(app, ["verify"]) == 2
    assert "allowed: one of them" in capsys.readouterr().err
