"""The cells of a sweep, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from margrpo.errors import ConfigError
from pipeline.sweeps.form import Sweep, read_form
from pipeline.sweeps.plan import Plan, hydra, make_plan

ROOT = Path(__file__).parent.parent.parent


def plan(code: str = "code", **values: Any) -> Plan:
    return make_plan(read_form(values), ROOT / "params.yaml", code)


def test_cells_are_presets_by_grid_by_seeds() -> None:
    found = plan(presets=["mte", "mte_topk"], seeds=[0, 7], grid={"trajectories": [3, 5]}, updates=40)
    assert [cell.label for cell in found.cells] == [
        "mte-0-trajectories=3",
        "mte-7-trajectories=3",
        "mte-0-trajectories=5",
        "mte-7-trajectories=5",
        "mte_topk-0-trajectories=3",
        "mte_topk-7-trajectories=3",
        "mte_topk-0-trajectories=5",
        "mte_topk-7-trajectories=5",
    ]
    last = found.cells[-1]
    assert last.run == "mte_topk-7"
    assert last.name.startswith("sweep-mte_topk-7-trajectories=5-")
    assert last.changes == {"variants.mte_topk.trajectories": 5}
    assert last.config.objective_of("mte_topk").trajectories == 5
    assert last.config.train.updates == 40
    assert list(last.config.study.runs) == ["mte_topk-7"]
    assert len({cell.name for cell in found.cells}) == 8
    assert found.notes == ()


def test_grid_takes_switches_and_dotted_keys() -> None:
    found = plan(presets=["mar_grpo"], grid={"consistency": [None, 0, 0.01], "train.learning_rate": [1e-4]})
    assert [cell.label for cell in found.cells] == [
        "mar_grpo-0-consistency=null-learning_rate=0.0001",
        "mar_grpo-0-consistency=0-learning_rate=0.0001",
        "mar_grpo-0-consistency=0.01-learning_rate=0.0001",
    ]
    taus = [cell.config.objective_of("mar_grpo").consistency for cell in found.cells]
    assert taus == [None, 0.0, 0.01]
    assert found.cells[0].changes == {"variants.mar_grpo.consistency": None, "train.learning_rate": 0.0001}


def test_names_depend_on_what_decides_the_result() -> None:
    def name(**values: Any) -> str:
        return plan(**{"presets": ["mte"], **values}).cells[0].name

    assert name() == name(seeds=[0, 1]) == name(presets=["mte", "grpo"]) == name(max_parallel=5)
    others = [name(), name(updates=45), name(changes=["reward.weights.scenes=2.0"]), name(code="other")]
    assert len(set(others)) == 4


def test_updates_before_the_milestone_drop_it_and_say_so() -> None:
    found = plan(presets=["mte"], updates=6)
    assert found.cells[0].config.train.milestone is None
    assert found.notes == ("train.milestone 38 lies after 6 updates: dropped",)


def test_profile_and_changes_apply_to_all_cells() -> None:
    found = plan(presets=["mte", "grpo"], profile="smoke", changes=["train.updates=5"])
    assert {cell.config.train.updates for cell in found.cells} == {5}
    assert {cell.config.evaluation.prompts for cell in found.cells} == {16}


def test_profiles_stay_in_the_params_of_a_cell_only_if_they_fit() -> None:
    assert "smoke" in plan(presets=["mte"]).cells[0].params["profiles"]
    runs = "study.runs={frozen_head-0: {variant: frozen_head, seed: 0}}"
    alone = ["variants={frozen_head: {}}", runs, "report.comparisons=[]"]  # the profiles name other variants
    odd = plan(presets=["frozen_head"], changes=alone)
    assert "profiles" not in odd.cells[0].params


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"presets": []}, r"presets: \[\]; allowed: a list"),
        ({"presets": ["mtee"]}, "presets: mtee; allowed: grpo, frozen_head, "),
        ({"presets": ["mte", "mte"]}, r"presets\.mte: mte twice; allowed: each value once"),
        ({"presets": ["mte"], "seeds": [-1]}, r"seeds\.0: -1; allowed: "),
        ({"presets": ["mte"], "max_parallel": 0}, "max_parallel: 0; allowed: integer >= 1 <= 64"),
        ({"presets": ["mte"], "name": "A b"}, "name: A b; allowed: .*[Ss]mall letters"),
        ({"presets": ["mte"], "updates": 0}, r"updates: 0; allowed: integer >= 1"),
        ({"presets": ["mte"], "profile": "smok"}, "profile: smok; allowed: smoke, "),
        ({"presets": ["mte"], "colour": 1}, "colour: unknown key; allowed: name, "),
        ({"presets": ["mte"], "grid": {"trajectoris": [1]}}, "unknown key; did you mean trajectories"),
        ({"presets": ["mte"], "grid": {"train": [1]}}, r"grid\.train: unknown key"),
        ({"presets": ["mte"], "grid": {"train.updtes": [1]}}, r"train\.updtes: unknown key; did you mean updates"),
        ({"presets": ["mte"], "grid": {"trajectories": [3, 3]}}, "mte-0-trajectories=3 twice; allowed: each"),
        ({"presets": ["mte"], "grid": {"trajectories": []}}, r"grid\.trajectories: \[\]"),
        ({"presets": ["mte"], "grid": {"reward.weights": [{"scenes": 2.0}]}}, "allowed: .* no mappings"),
        ({"presets": ["mte"], "grid": {"train.learning_rate": [2]}}, r"train\.learning_rate: 2; allowed: number"),
        ({"presets": ["mte"], "changes": ["train.updates"]}, "--set: train.updates; allowed: key=value"),
        ({"presets": ["grpo"], "grid": {"trajectories": [3]}}, r"variants\.grpo\.trajectories: 3; allowed: 1 with"),
        ({"presets": ["mte"], "seeds": [*range(1000)], "grid": {"beta": [i / 100 for i in range(11)]}}, "11000 cells"),
    ],
)  # fmt: skip
def test_wrong_values_are_refused_in_one_line(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        plan(**values)
    assert "\n" not in str(caught.value)


def test_void_combinations_are_left_out_on_request() -> None:
    grid = {"trajectories": [1, 3], "uncertain_fraction": [0.3, 1.0]}
    with pytest.raises(ConfigError, match=r"uncertain_fraction: 0\.3; allowed: 1\.0 with trajectories 1"):
        plan(presets=["mte"], grid=grid)
    found = plan(presets=["mte"], grid=grid, skip_void=True)
    assert [cell.label for cell in found.cells] == [
        "mte-0-trajectories=1-uncertain_fraction=1.0",
        "mte-0-trajectories=3-uncertain_fraction=0.3",
        "mte-0-trajectories=3-uncertain_fraction=1.0",
    ]
    assert found.notes[0].startswith("left out mte-0-trajectories=1-uncertain_fraction=0.3: variants.mte.")
    with pytest.raises(ConfigError, match="no cell is left"):
        plan(presets=["grpo"], grid={"trajectories": [3]}, skip_void=True)


def test_settings_survive_the_grammar_of_dvc(tmp_path: Path) -> None:
    from dvc.utils.hydra import apply_overrides
    from ruamel.yaml import YAML

    file = tmp_path / "params.yaml"
    file.write_text("train: {updates: 50, lora: null}\nvariants: {mte: {trajectories: 3}}\n")
    values = {
        "train.updates": 6,
        "train.learning_rate": 1e-05,
        "variants.mte.trajectories": 5,
        "variants.mte.consistency": None,
        "variants.mte.include_rollout": False,
        "evaluation.samplers": ["ode", "sde"],
        "prompts.path": "it's, a [path] with: {signs} = \\ and $",
    }
    apply_overrides(file, [hydra(key, value) for key, value in values.items()])
    found = YAML(typ="safe").load(file.read_text())
    for key, value in values.items():
        place = found
        for part in key.split("."):
            place = place[part]
        assert place == value
    assert found["train"]["lora"] is None


def test_form_offers_the_variants_and_profiles_of_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARGRPO_HOME", str(ROOT))
    fields = Sweep.model_json_schema()["properties"]
    assert {"grpo", "mar_grpo_bridged"} <= set(fields["presets"]["items"]["enum"])
    assert fields["profile"]["enum"][:2] == ["none", "smoke"]
    assert all(field["title"] and field["description"] for field in fields.values())
    assert fields["max_parallel"]["minimum"] == 1
    assert fields["max_parallel"]["maximum"] == 64
