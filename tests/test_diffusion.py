from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from margrpo.diffusion import FlowSDE, Gaussian

GRID = torch.linspace(1, 0, 9, dtype=torch.float64)


def test_kernel_by_hand() -> None:
    # sigma .5 -> .375: std = .7 sqrt(.5 / .5) = .7, dt = -.125
    flow = FlowSDE(GRID, eta=0.7)
    kernel = flow.kernel(4, torch.tensor([[2.0]]), torch.tensor([[-1.0]]))
    x_factor = 1 + 0.49 * -0.125 / (2 * 0.5)
    v_factor = (1 + 0.49 * 0.5 / (2 * 0.5)) * -0.125
    assert float(kernel.mean) == pytest.approx(2 * x_factor - v_factor, abs=1e-6)
    assert float(kernel.std) == pytest.approx(0.7 * math.sqrt(0.125), abs=1e-6)


def test_first_step_uses_the_second_sigma() -> None:
    # sigma 1 -> .875: std = .7 sqrt(1 / (1 - .875)); at sigma = 1 the velocity term is plain dt
    std = 0.7 * math.sqrt(8)
    kernel = FlowSDE(GRID, eta=0.7).kernel(0, torch.tensor([[1.5]]), torch.tensor([[2.0]]))
    assert float(kernel.mean) == pytest.approx(1.5 * (1 + std**2 * -0.125 / 2) + 2.0 * -0.125, abs=1e-6)
    assert float(kernel.std) == pytest.approx(std * math.sqrt(0.125), abs=1e-6)


def test_final_step() -> None:
    x, v = torch.tensor([[0.4]]), torch.tensor([[0.8]])
    deterministic = FlowSDE(GRID, eta=0.7)
    kernel = deterministic.kernel(7, x, v)
    assert float(kernel.mean) == pytest.approx(0.4 - 0.125 * 0.8)
    assert float(kernel.std) == 0.0
    assert deterministic.scored == list(range(7))
    stochastic = FlowSDE(GRID, eta=0.7, final_step="stochastic")
    assert stochastic.scored == list(range(8))
    assert float(stochastic.kernel(7, x, v).std) == pytest.approx(
        0.7 * math.sqrt(0.125 / 0.875) * math.sqrt(0.125)
    )


def test_step_tensor_equals_single_steps() -> None:
    flow = FlowSDE(GRID, eta=0.7)
    generator = torch.Generator().manual_seed(0)
    x, v = torch.randn(2, 8, 3, generator=generator)
    steps = torch.arange(8)
    kernel = flow.kernel(steps, x, v)
    for step in range(8):
        single = flow.kernel(step, x[step : step + 1], v[step : step + 1])
        assert torch.equal(kernel.mean[step : step + 1], single.mean)
        assert torch.equal(kernel.std[step], single.std)


def test_log_prob_and_kl_against_torch_distributions() -> None:
    generator = torch.Generator().manual_seed(1)
    mean, other, value = torch.randn(3, 50, 4, generator=generator, dtype=torch.float64)
    std, other_std = torch.rand(2, 50, 1, generator=generator, dtype=torch.float64) + 0.1
    policy, reference = Gaussian(mean, std), Gaussian(other, other_std)
    p, q = Normal(mean, std.expand_as(mean)), Normal(other, other_std.expand_as(mean))
    torch.testing.assert_close(policy.log_prob(value), p.log_prob(value))
    torch.testing.assert_close(policy.kl(reference), kl_divergence(p, q))
    # E_q[log p] = -KL(q || p) - H(q)
    torch.testing.assert_close(policy.expected_log_prob(reference), -kl_divergence(q, p) - q.entropy())
    reached = Gaussian(value, torch.zeros(50, 1, dtype=torch.float64))
    assert torch.equal(policy.expected_log_prob(reached), policy.log_prob(value))


def test_expected_log_prob_is_the_mean_over_the_target() -> None:
    policy = Gaussian(torch.tensor([[0.3]]), torch.tensor([[0.5]]))
    target = Gaussian(torch.tensor([[-0.2]]), torch.tensor([[0.4]]))
    draws = target.sample(torch.randn(400_000, 1, generator=torch.Generator().manual_seed(2)))
    scores = policy.log_prob(draws)
    error = float(scores.std()) / math.sqrt(len(scores))
    assert abs(float(scores.mean()) - float(policy.expected_log_prob(target))) < 3 * error


def test_diffuse_and_bridge() -> None:
    # sigma .75: x_t = .75 eps + .25 x0; the bridge is the kernel at velocity eps - x0
    flow = FlowSDE(GRID, eta=0.7)
    x0, eps = torch.tensor([[2.0]]), torch.tensor([[-1.0]])
    x = flow.diffuse(2, x0, eps)
    assert float(x) == pytest.approx(0.75 * -1 + 0.25 * 2)
    bridge, kernel = flow.bridge(2, x, x0, eps), flow.kernel(2, x, torch.tensor([[-3.0]]))
    assert torch.equal(bridge.mean, kernel.mean)
    assert torch.equal(bridge.std, kernel.std)


def test_true_velocity_leads_to_the_token() -> None:
    # along the ODE at v = eps - x0 every state is the diffused token and the end is x0
    flow = FlowSDE(GRID, eta=0.7)
    x0, eps = torch.tensor([[2.0]]), torch.tensor([[-1.0]])
    x = eps
    for step in range(8):
        torch.testing.assert_close(x, flow.diffuse(step, x0, eps))
        x = flow.ode(step, x, eps - x0)
    torch.testing.assert_close(x, x0)


def test_sde_keeps_the_marginals_of_the_flow() -> None:
    # data N(0, 1): the exact velocity is E[eps - x0 | x] = (2 sigma - 1) x / (sigma^2 + (1 - sigma)^2); with many
    # small steps the SDE must end in unit variance (independent check of both factors and the noise scale)
    sigmas = torch.cat([torch.linspace(0.999, 0.001, 2000, dtype=torch.float64), torch.zeros(1)])
    flow = FlowSDE(sigmas, eta=0.7)
    variance = torch.tensor([[0.999**2 + 0.001**2]])
    for step in range(flow.steps):
        sigma = float(sigmas[step])
        slope = (2 * sigma - 1) / (sigma**2 + (1 - sigma) ** 2)
        one = torch.ones(1, 1)
        kernel = flow.kernel(step, one, slope * one)  # linear: mean = factor * x
        variance = kernel.mean**2 * variance + kernel.std**2
    assert float(variance) == pytest.approx(1.0, abs=5e-3)


def test_guide() -> None:
    flow = FlowSDE(GRID, eta=0.7)
    guided = flow.guide(torch.tensor([2.0]), torch.tensor([0.5]), 3.0)
    assert float(guided) == 0.5 + 3 * 1.5


@pytest.mark.parametrize("sigmas", [[1.0, 0.5], [1.0, 0.5, 0.1], [1.2, 0.5, 0.0], [0.5, 0.5, 0.0]])
def test_bad_schedules_are_refused(sigmas: list[float]) -> None:
    with pytest.raises(ValueError, match="descending"):
        FlowSDE(torch.tensor(sigmas), eta=0.7)
