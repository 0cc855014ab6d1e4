"""The rules of the claims and the writing of numbers, each on values a person can check."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from margrpo.metrics.statistics import Interval, t_interval
from margrpo.params import build_config, load_params
from pipeline.report.claims import Claim, decide, judge, reward_jitter
from pipeline.report.data import Evaluated, StudyData, TrainedRun
from pipeline.report.numbers import p_statement, plain, signed, significant, spread, spread_significant

PARAMS = Path(__file__).parents[2] / "params.yaml"


def make_run(variant: str, seed: int, rewards: list[float], **logs: Any) -> TrainedRun:
    updates = len(rewards)
    metrics = pd.DataFrame(
        {"update": range(1, updates + 1), "reward": rewards, "kl": 0.0, "grad_norm": 1.0} | logs
    )
    timing = pd.DataFrame({"update": range(1, updates + 1), "core_s": range(1, updates + 1)})
    evaluation = {"last": {"sde": {"reward": 0.3 + 0.01 * seed}}, "best": {"sde": {"reward": 0.5}}}
    return TrainedRun(
        f"{variant}-{seed}", evaluation, pd.DataFrame(), Path(), variant, seed, metrics, timing, {}
    )


def make_study(runs: list[TrainedRun]) -> StudyData:
    params = load_params(PARAMS)
    params["study"]["runs"] = {run.name: {"variant": run.variant, "seed": run.seed} for run in runs}
    return StudyData(build_config(params), Evaluated("base", {}, pd.DataFrame(), Path()), tuple(runs))


def claim_about(study: StudyData, words: str) -> Claim:
    return next(claim for claim in judge(study, [], []) if words in claim.text)


@pytest.mark.parametrize(
    ("effect", "p_value", "verdict"),
    [
        (0.1, 0.04, "supported"),
        (-0.1, 0.04, "contradicted"),
        (0.1, 0.05, "open"),
        (0.1, 0.2, "open"),
        (0.1, math.nan, "open"),
        (0.0, 0.01, "open"),
    ],
)
def test_decide(effect: float, p_value: float, verdict: str) -> None:
    assert decide(effect, p_value, 0.95) == verdict


def test_jitter_ignores_a_steady_rise() -> None:
    assert reward_jitter(make_run("grpo", 0, [0.1, 0.2, 0.3, 0.4])) == pytest.approx(0.0, abs=1e-12)
    # Changes +.1, -.1, +.1: mean 1/30, sum of squares .03 - 3 / 900, over 2.
    expected = math.sqrt((0.03 - 3 * (0.1 / 3) ** 2) / 2)
    assert reward_jitter(make_run("grpo", 0, [0.1, 0.2, 0.1, 0.2])) == pytest.approx(expected)
    assert math.isnan(reward_jitter(make_run("grpo", 0, [0.1, 0.2])))


def test_gradient_norm_claim_is_about_grpo_against_frozen_head() -> None:
    def runs(variant: str, norms: list[float]) -> list[TrainedRun]:
        return [make_run(variant, seed, [0.4] * 3, grad_norm=norm) for seed, norm in enumerate(norms)]

    lower = claim_about(
        make_study(runs("grpo", [0.9, 1.0, 1.1]) + runs("frozen_head", [0.1, 0.1, 0.11])), "gradient"
    )
    assert lower.verdict == "supported"
    higher = claim_about(
        make_study(runs("grpo", [0.1, 0.1, 0.11]) + runs("frozen_head", [0.9, 1.0, 1.1])), "gradient"
    )
    assert higher.verdict == "contradicted"
    alone = claim_about(make_study(runs("grpo", [0.9, 1.0, 1.1])), "gradient")
    assert (alone.verdict, alone.evidence) == ("open", "not in this study")


def test_late_claims_wait_for_late_training() -> None:
    short = [make_run("grpo", seed, [0.4] * 499) for seed in range(3)]
    assert claim_about(make_study(short), "collapses late").verdict == "open"
    # Best .5 against last .30, .31, .32: differences .2, .19, .18, all above 0 and tight.
    enough = [make_run("grpo", seed, [0.4] * 500) for seed in range(3)]
    collapse = claim_about(make_study(enough), "collapses late")
    assert collapse.verdict == "supported"
    assert collapse.evidence.startswith("+0.190")


def test_late_progress_compares_the_last_two_quarters() -> None:
    def runs(gain: float) -> list[TrainedRun]:
        validation = [0.4] * 375 + [0.4 + gain] * 125
        return [
            make_run(
                "mar_grpo",
                seed,
                [0.4] * 500,
                **{"validation/reward": [v + 0.001 * seed * (i >= 375) for i, v in enumerate(validation)]},
            )
            for seed in range(3)
        ]

    assert claim_about(make_study(runs(0.05)), "still improves").verdict == "supported"
    assert claim_about(make_study(runs(-0.05)), "still improves").verdict == "contradicted"


def test_numbers() -> None:
    assert plain(0.12345) == "0.123"
    assert plain(math.nan) == "n/a"
    assert [significant(value) for value in (0.769, 0.02263, 12.34, 0.0, 123456.0)] == [
        "0.769", "0.0226", "12.3", "0", "123456",
    ]  # fmt: skip
    interval = t_interval([0.45, 0.46, 0.47])
    # Half width t(2) * .01 / sqrt 3 = 4.3027 * .0057735 = .02484.
    assert spread(interval) == "0.460 ± 0.025"
    assert signed(interval) == "+0.460 [+0.435, +0.485]"
    assert signed(Interval(-0.02, -0.03, -0.01, 3, 0.95, "t")) == "−0.020 [−0.030, −0.010]"
    one = t_interval([0.5])
    assert spread(one) == "0.500"
    assert signed(one) == "+0.500 (one run)"
    assert spread_significant(Interval(0.02263, 0.02163, 0.02363, 3, 0.95, "t")) == "0.023 ± 0.001"
    assert p_statement(0.0456) == "p\u00a0=\u00a00.046"
    assert p_statement(0.0001) == "p\u00a0<\u00a00.001"
