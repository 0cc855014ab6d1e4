"""Guidance schedules and the options of NOVA's pipeline, through the params."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from margrpo.config import Sampler
from margrpo.errors import ConfigError
from margrpo.evaluation import draw
from margrpo.golden.vectors import guidance_scale
from margrpo.rollout import generate
from tests.policies.nova_support import load
from tests.policies.real import prompts_of, read, trainable_folder
from tests.support import VARIANTS, make_config, make_policy

TUNED = {"guidance": 3.0, "samplers": ["ode"]}


def test_the_linear_scale_is_that_of_the_source() -> None:
    policy = make_policy()  # 16 tokens
    assert policy.guidance_at(3.0, 8) == 3.0
    policy.configure(Sampler(guidance_schedule="linear"))
    assert policy.guidance_at(3.0, 8) == 2.0
    assert policy.guidance_at(3.0, 0) == 1 + 2 * 15 / 16
    for unknown in (12, 5, 1):
        wanted = guidance_scale("cfg3_linear", 16, unknown)
        assert wanted is not None
        assert policy.guidance_at(3.0, unknown) == pytest.approx(float(wanted), rel=1e-6)


@pytest.mark.parametrize("family", ["mar", "harmon"])
def test_every_ar_step_has_its_own_scale(family: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = read(family, trainable_folder(family, tmp_path)).eval()
    policy.configure(Sampler(ar_steps=4, denoising_steps=5, guidance_schedule="linear"))
    used: list[float] = []
    guide = policy.transition.guide
    monkeypatch.setattr(
        policy.transition, "guide", lambda a, b, scale: used.append(scale) or guide(a, b, scale)
    )
    generate(policy, prompts_of(family), [1, 2], 4, guidance=3.0)
    counts, total = policy.ar_schedule(4), policy.tokens
    known = [sum(counts[: k + 1]) for k in range(len(counts))]
    expected = [1 + 2 * min(done, total - 1) / total for done in known]
    assert used == pytest.approx([scale for scale in expected for _ in range(5)])


def test_off_options_draw_what_the_plain_sampler_draws() -> None:
    policy = load("abs")
    texts, seeds = ["a red cube", "two dogs"], [5, 6]
    sizes = {"sampler": {"ar_steps": 4, "denoising_steps": 5}}
    plain = draw(policy, make_config(**sizes, evaluation=TUNED), texts, seeds, False)
    # a time below which guidance ends that is never reached: NOVA's own loop, nothing switched on
    idle = draw(
        policy, make_config(**sizes, evaluation={**TUNED, "guidance_trunc": 1e-9}), texts, seeds, False
    )
    assert torch.allclose(plain, idle, atol=1e-4)
    for option in ({"guidance_renorm": 0.5}, {"guidance_trunc": 700.0}):
        other = draw(policy, make_config(**sizes, evaluation={**TUNED, **option}), texts, seeds, False)
        assert float((other - plain).abs().max()) > 1e-2
        assert other.shape == plain.shape


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"evaluation": {"guidance_renorm": 0.5}}, "evaluation.guidance: 1.0; allowed: above 1"),
        ({"evaluation": {"guidance_trunc": 5.0, "guidance": 2.0}}, "evaluation.samplers: "),
        (
            {"evaluation": {**TUNED, "guidance_trunc": 5.0}, "sampler": {"guidance_schedule": "linear"}},
            "sampler.guidance_schedule: linear; allowed: constant",
        ),
        (
            {
                "sampler": {"guidance_schedule": "linear"},
                "variants": {**VARIANTS, "x": {"guidance": {"rollout": 3.0, "logprob": "guided"}}},
            },
            "variants.x.guidance.logprob: guided; allowed: conditional",
        ),
    ],
)
def test_what_cannot_be_scored_or_drawn_is_a_config_error(sections: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_config(**sections)
    assert named in str(error.value)


def test_novas_options_are_refused_for_others() -> None:
    config = make_config(evaluation={**TUNED, "guidance_renorm": 0.5})
    policy = make_policy()
    policy.configure(config.sampler)
    with pytest.raises(ConfigError, match=r"guidance_renorm: 0\.5.* allowed with a tiny policy: 1\.0"):
        draw(policy, config, ["a red circle"], [1], False)
