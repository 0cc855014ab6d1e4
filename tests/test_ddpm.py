from __future__ import annotations

import math

import pytest
import torch
from diffusers import DDPMScheduler
from torch.distributions import Normal, kl_divergence

from margrpo.ddpm import DDPM, Tables, Variance, cosine_alphas_cumprod, respace
from margrpo.diffusion import Gaussian
from margrpo.errors import ConfigError

ALPHAS = cosine_alphas_cumprod()


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_spacings_of_the_source() -> None:
    assert respace("25")[:5] == [0, 42, 83, 125, 166]
    assert respace("25")[-2:] == [957, 999]
    assert respace("100")[:5] == [0, 10, 20, 30, 40]
    assert respace("100")[-3:] == [979, 989, 999]
    # two sections of 500: eight points 0..499 at strides of 499 / 7, one point at 500
    assert respace("8,1") == [0, 71, 143, 214, 285, 356, 428, 499, 500]
    assert respace("ddim50") == list(range(0, 1000, 20))
    assert respace("1000") == list(range(1000))


@pytest.mark.parametrize("spacing", ["", "0", "1001", "a", "10,", "-5", "ddim", "ddim700", "501,1", "٣"])
def test_impossible_spacings_are_refused_in_one_line(spacing: str) -> None:
    with pytest.raises(ConfigError, match="num_sampling_steps") as error:
        respace(spacing)
    assert "\n" not in str(error.value)


def test_training_table_is_the_cosine_one_of_diffusers() -> None:
    scheduler = DDPMScheduler(beta_schedule="squaredcos_cap_v2")
    torch.testing.assert_close(ALPHAS.float(), scheduler.alphas_cumprod, rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize(
    ("variance", "outputs"), [("learned_range", 16), ("fixed_small", 8), ("fixed_large", 8)]
)
@pytest.mark.parametrize("spacing", ["10", "25", "100"])
def test_a_step_is_the_step_of_diffusers(variance: Variance, outputs: int, spacing: str) -> None:
    timesteps = respace(spacing)
    scheduler = DDPMScheduler(
        beta_schedule="squaredcos_cap_v2",
        variance_type=variance,
        clip_sample=False,
        timestep_spacing="linspace",
    )
    scheduler.set_timesteps(timesteps=timesteps[::-1])
    ddpm = DDPM(ALPHAS, timesteps, variance)
    assert ddpm.times.tolist() == [float(t) for t in timesteps[::-1]]
    for step in (0, 1, ddpm.steps // 2, ddpm.steps - 2, ddpm.steps - 1):
        x, output = draw(5, 8, seed=step), draw(5, outputs, seed=step + 1000)
        noise = draw(5, 8, seed=7)
        theirs = scheduler.step(
            output, timesteps[-1 - step], x, generator=torch.Generator().manual_seed(7)
        ).prev_sample
        ours = ddpm.kernel(step, x, output).sample(noise)
        # their cumulative alphas are float32: up to 8e-5 at the second-to-last step
        assert float((ours - theirs).abs().max() / theirs.abs().max()) < 2e-4


def test_log_prob_kl_and_expectation_are_those_of_torch_distributions() -> None:
    ddpm = DDPM(ALPHAS, respace("25"), temperature=0.9)
    x = draw(6, 4)
    step = torch.tensor([0, 3, 10, 20, 22, 23])
    one, other = ddpm.kernel(step, x, draw(6, 8, seed=1)), ddpm.kernel(step, x, draw(6, 8, seed=2))
    value = one.sample(draw(6, 4, seed=3))
    p, q = Normal(one.mean, one.std), Normal(other.mean, other.std)
    torch.testing.assert_close(one.log_prob(value), p.log_prob(value))
    torch.testing.assert_close(one.kl(other), kl_divergence(p, q), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        other.expected_log_prob(one), -p.entropy() - kl_divergence(p, q), rtol=1e-4, atol=1e-4
    )


def test_the_last_step_is_deterministic_and_not_scored() -> None:
    ddpm = DDPM(ALPHAS, respace("10"))
    assert ddpm.scored == list(range(9))
    x, output = draw(3, 4), draw(3, 8, seed=1)
    last = ddpm.kernel(9, x, output)
    assert last.std.eq(0).all()
    assert torch.equal(last.sample(draw(3, 4, seed=2)), last.mean)
    torch.testing.assert_close(last.mean, ddpm.predict(9, x, output))  # k = 0 ends at the predicted token
    torch.testing.assert_close(last.mean, ddpm.ode(9, x, output))


def test_learned_range_interpolates_between_beta_and_the_posterior_without_clamping() -> None:
    timesteps = respace("10")
    tables = Tables.of(ALPHAS, timesteps)
    ddpm = DDPM(ALPHAS, timesteps)
    k = 4
    for v in (-1.0, 0.0, 1.0, 3.0):
        output = torch.cat([torch.zeros(1, 2), torch.full((1, 2), v)], dim=1)
        share = (v + 1) / 2
        wanted = share * math.log(tables.betas[k]) + (1 - share) * math.log(tables.variance[k])
        assert float(ddpm.log_variance(9 - k, output)[0, 0]) == pytest.approx(wanted, rel=1e-6)


def test_temperature_scales_the_spread_alone() -> None:
    x, output = draw(3, 4), draw(3, 8, seed=1)
    plain = DDPM(ALPHAS, respace("10")).kernel(3, x, output)
    cool = DDPM(ALPHAS, respace("10"), temperature=0.5).kernel(3, x, output)
    assert torch.equal(cool.mean, plain.mean)
    torch.testing.assert_close(cool.std, 0.5 * plain.std)


def test_guidance_moves_epsilon_and_leaves_the_variance() -> None:
    ddpm = DDPM(ALPHAS, respace("10"))
    guided = ddpm.guide(torch.tensor([[2.0, 9.0]]), torch.tensor([[1.0, -9.0]]), 3.0)
    assert guided.tolist() == [[4.0, 9.0]]
    fixed = DDPM(ALPHAS, respace("10"), "fixed_small").guide(
        torch.tensor([[2.0, 9.0]]), torch.zeros(1, 2), 3.0
    )
    assert fixed.tolist() == [[6.0, 27.0]]


def test_the_bridge_is_the_posterior_by_bayes() -> None:
    """q(x_{k-1} | x_k, x0) from the product of the two normals N(x_k | x_{k-1}) and N(x_{k-1} | x0)."""
    timesteps = respace("25")
    tables = Tables.of(ALPHAS, timesteps)
    ddpm = DDPM(ALPHAS, timesteps)
    x0, noise = draw(1, 5), draw(1, 5, seed=1)
    for k in (1, 2, 12, 24):
        step = 24 - k
        x = ddpm.diffuse(step, x0, noise)
        beta, prior = float(tables.betas[k]), 1 - float(tables.previous[k])
        precision = (1 - beta) / beta + 1 / prior
        mean = (math.sqrt(1 - beta) * x / beta + math.sqrt(1 - prior) * x0 / prior) / precision
        bridge = ddpm.bridge(step, x, x0, noise)
        torch.testing.assert_close(bridge.mean, mean, rtol=1e-4, atol=1e-5)
        assert float(bridge.std) == pytest.approx(precision**-0.5, rel=1e-4)


def test_the_kernel_at_the_true_noise_is_the_bridge() -> None:
    ddpm = DDPM(ALPHAS, respace("25"), "fixed_small")
    step = torch.arange(24)
    x0, noise = draw(24, 5), draw(24, 5, seed=1)
    x = ddpm.diffuse(step, x0, noise)
    kernel, bridge = ddpm.kernel(step, x, noise), ddpm.bridge(step, x, x0, noise)
    torch.testing.assert_close(kernel.mean, bridge.mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(kernel.std, bridge.std)
    torch.testing.assert_close(kernel.kl(bridge), torch.zeros(24, 5), rtol=0, atol=1e-3)


def test_bridging_a_diffused_token_gives_the_marginal_of_the_next_step() -> None:
    """Mean and variance of q(x_{k-1} | x0), by the law of total variance."""
    timesteps = respace("10")
    tables = Tables.of(ALPHAS, timesteps)
    one = torch.ones(1, 1)
    ddpm = DDPM(ALPHAS, timesteps)
    for k in range(1, 10):
        step = 9 - k
        at_zero = ddpm.bridge(step, ddpm.diffuse(step, one, 0 * one), one, 0 * one)
        at_one = ddpm.bridge(step, ddpm.diffuse(step, one, one), one, one)
        assert float(at_zero.mean) == pytest.approx(math.sqrt(tables.previous[k]), rel=1e-4)
        variance = float((at_one.mean - at_zero.mean) ** 2 + at_zero.std**2)
        assert variance == pytest.approx(1 - float(tables.previous[k]), rel=1e-4)


def test_the_ode_with_the_true_noise_returns_to_the_token() -> None:
    ddpm = DDPM(ALPHAS, respace("25"))
    x0, noise = draw(2, 3), draw(2, 3, seed=1)
    x = ddpm.diffuse(0, x0, noise)
    output = torch.cat([noise, torch.zeros_like(noise)], dim=1)
    for step in range(25):
        x = ddpm.ode(step, x, output)
    torch.testing.assert_close(x, x0, rtol=1e-2, atol=1e-2)  # x0 is 2e-4 of the first state in float32


def test_timesteps_outside_of_the_table_are_refused() -> None:
    for timesteps in ([5], [3, 3, 5], [5, 3], [-1, 4]):
        with pytest.raises(ValueError, match="timesteps"):
            Tables.of(ALPHAS, timesteps)


def test_rows_of_different_steps_are_scored_as_single_ones() -> None:
    ddpm = DDPM(ALPHAS, respace("10"))
    x, output = draw(3, 4), draw(3, 8, seed=1)
    together = ddpm.kernel(torch.tensor([0, 4, 8]), x, output)
    for row, step in enumerate((0, 4, 8)):
        alone: Gaussian = ddpm.kernel(step, x[row : row + 1], output[row : row + 1])
        assert torch.equal(together.mean[row], alone.mean[0])
        assert torch.equal(together.std[row], alone.std[0])
