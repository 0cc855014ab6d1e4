from __future__ import annotations

from pathlib import Path

import pytest

from margrpo.cli import app, run
from margrpo.config import RewardOptions
from margrpo.rewards import entry, names
from margrpo.rewards.selftest import selftest
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
    (folder / tiny.HPS_FILE).unlink()
    assert run(app, [*arguments, *weights, *options]) == 1
    assert "hpsv2.1: not usable: reward.options.hpsv2.1.path" in capsys.readouterr().out


def test_list_names_every_reward(capsys):
    assert run(app, ["rewards", "list"]) == 0
    out = capsys.readouterr().out
    for name in names():
        assert f"{name}: " in out


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
