"""Which variants differ in one switch only, and what their table says."""

from __future__ import annotations

from pathlib import Path

from margrpo.params import load_config
from pipeline.report.sweeps import (
    Point,
    differing_keys,
    draw_series,
    find_series,
    flatten,
    series_table,
    switches_table,
)

PARAMS = Path(__file__).parents[2] / "params.yaml"


def presets() -> list[Point]:
    config = load_config(PARAMS)
    return [Point(name, flatten(config.objective_of(name).model_dump()), {}) for name in config.variants]


def test_presets_that_differ_in_one_switch() -> None:
    found = [(one.key, [point.label for point in one.points]) for one in find_series(presets())]
    assert found == [
        ("trainable", ["grpo", "frozen_head"]),
        ("token_mask", ["frozen_head_committed", "frozen_head"]),
        ("trajectories", ["frozen_head", "mte"]),
        ("trajectories", ["frozen_head_committed", "mar_grpo_bridged"]),
        ("uncertain_fraction", ["mte_topk", "mte"]),
        ("consistency", ["frozen_head", "consistency"]),
        ("consistency", ["mte_topk", "mar_grpo"]),
    ]


def test_any_key_that_differs_is_a_switch() -> None:
    points = [
        Point(f"cell{index}", {"train.learning_rate": rate, "sampler.eta": 0.7}, {0: reward, 1: reward + gap})
        for index, (rate, reward, gap) in enumerate([(4e-4, 0.5, 0.02), (1e-4, 0.3, 0.0), (2e-4, 0.4, 0.02)])
    ]
    assert differing_keys(points) == ["train.learning_rate"]
    (series,) = find_series(points)
    assert [point.label for point in series.points] == ["cell1", "cell2", "cell0"]  # by value
    rows = series_table([series], 0.95, "reward").rows
    assert rows[0] == ("train.learning_rate", "0.0001", "cell1", "2", "0.300 ± 0.000", "reference")
    # Differences .10 and .12: mean .11, half width t(1) * .01414 / sqrt 2 = 12.706 * .01.
    assert rows[1][5] == "+0.110 [−0.017, +0.237]"
    table = switches_table(points)
    assert table.columns == ("variant", "train.learning rate")
    assert table.rows[1] == ("cell1", "0.0001")


def test_nothing_to_draw(tmp_path: Path) -> None:
    assert not draw_series(find_series(presets()), 0.95, "reward", tmp_path / "a.png")  # no rewards
    assert list(tmp_path.iterdir()) == []
