"""Which variants differ in one switch only, and what their table says."""

from __future__ import annotations

import json
from pathlib import Path

from margrpo.params import load_config
from pipeline.report import SweptCell, build_sweep
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


def test_report_of_a_sweep(tmp_path: Path) -> None:
    """Two presets at two learning rates, two seeds: the rate is a key, the presets are told apart by theirs."""
    cells = []
    for rate in (1e-4, 2e-4):
        config = load_config(PARAMS, [f"train.learning_rate={rate}"])
        for variant, start in (("frozen_head", 0.3), ("mte", 0.4)):
            for seed in (0, 1):
                cells.append(SweptCell(variant, seed, config, start + 100 * rate + 0.02 * seed))
    build_sweep("rates", cells, tmp_path, tmp_path / "out")
    markdown = (tmp_path / "out/report.md").read_text()
    # .4 + .02 and .44: mean .43, half width t(1) * .01414 / sqrt 2 = .127.
    assert "**Highest mean SDE reward: mte learning\\_rate=0.0002 with 0.430 ± 0.127.**" in markdown
    assert (
        "| train.learning\\_rate | 0.0002 | mte learning\\_rate=0.0002 | 2 | 0.430 ± 0.127 | +0.010"
        in markdown
    )
    assert "| S (trajectories) | 3 | mte learning\\_rate=0.0001 | 2 | 0.420 ± 0.127 | +0.100" in markdown
    html = (tmp_path / "out/report.html").read_text()
    assert "data:image/png;base64," in html
    assert (
        json.loads((tmp_path / "out/metrics.json").read_text())["reward"]["frozen_head learning_rate=0.0001"]
        == 0.32
    )
    build_sweep("none", [], tmp_path, tmp_path / "none")
    assert "No cell has finished." in (tmp_path / "none/report.md").read_text()
