"""Gaussian denoising transitions: one code path for means, samples and log-probs in rollout and update."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


@dataclass(frozen=True)
class Gaussian:
    """Independent normals: mean [.., C], std [.., C] or [.., 1] (0 = deterministic, no log-prob)."""

    mean: Tensor
    std: Tensor

    def sample(self, noise: Tensor) -> Tensor:
        """Return mean + std * noise for standard normal noise [.., C]."""
        return self.mean + self.std * noise

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the elementwise log-density [.., C] of `value`."""
        return self._log_prob((value - self.mean).square())

    def expected_log_prob(self, target: Gaussian) -> Tensor:
        """Return E[log_prob(x)] for x ~ target, elementwise [.., C], in closed form (Rao-Blackwell).

        A target without spread gives log_prob(target.mean).
        """
        return self._log_prob(target.std.square() + (target.mean - self.mean).square())

    def _log_prob(self, squared_distance: Tensor) -> Tensor:
        return -0.5 * squared_distance / self.std.square() - self.std.log() - _HALF_LOG_TWO_PI

    def kl(self, other: Gaussian) -> Tensor:
        """Return KL(self || other) elementwise [.., C]."""
        spread = self.std.square() + (self.mean - other.mean).square()
        return (other.std / self.std).log() + 0.5 * spread / other.std.square() - 0.5


class Transition:
    """T denoising steps; step 0 starts from noise, step T - 1 ends at the token.

    Attributes:
        steps: T.
        times: [T], what the head receives as its time.
    """

    steps: int
    times: Tensor

    @property
    def scored(self) -> list[int]:
        """Steps whose transition has a density; deterministic steps carry no log-prob."""
        raise NotImplementedError

    def kernel(self, step: Tensor | int, x: Tensor, output: Tensor) -> Gaussian:
        """Return p(x_next | x) for states x [.., C] and outputs [.., C or 2C] at `step` ([..] or one)."""
        raise NotImplementedError

    def ode(self, step: int, x: Tensor, output: Tensor) -> Tensor:
        """Return the noiseless next state [.., C]."""
        raise NotImplementedError

    def diffuse(self, step: Tensor | int, x0: Tensor, noise: Tensor) -> Tensor:
        """Return the state [.., C] before `step` when the token x0 [.., C] is diffused with noise [.., C]."""
        raise NotImplementedError

    def bridge(self, step: Tensor | int, x: Tensor, x0: Tensor, noise: Tensor) -> Gaussian:
        """Return the true q(x_next | x, x0) for x = diffuse(step, x0, noise)."""
        raise NotImplementedError

    def guide(self, conditional: Tensor, null: Tensor, scale: float) -> Tensor:
        """Return the classifier-free guided head output [.., C or 2C]."""
        raise NotImplementedError


class FlowSDE(Transition):
    """Stochastic Euler steps of a rectified flow x_sigma = sigma * noise + (1 - sigma) * x0 (Flow-GRPO).

    From sigma to sigma' with dt = sigma' - sigma < 0 and std = eta sqrt(sigma / (1 - sigma)), the schedule's
    second sigma in the denominator where sigma = 1:
    mean = x (1 + std^2 dt / (2 sigma)) + v (1 + std^2 (1 - sigma) / (2 sigma)) dt, noise scale std sqrt(-dt).
    A deterministic final step is the Euler step x + v dt.

    Args:
        sigmas: [T + 1], float64, strictly descending from at most 1 to 0.
        eta: noise level, 0.7 in the released code.
        final_step: "deterministic" or "stochastic" (released flow code).
        time_scale: the head receives time_scale * sigma.

    Raises:
        ValueError: the sigmas do not descend from (0, 1] to 0.
    """

    def __init__(
        self, sigmas: Tensor, eta: float, final_step: str = "deterministic", time_scale: float = 1.0
    ) -> None:
        sigmas = sigmas.double()
        if (
            sigmas.dim() != 1
            or len(sigmas) < 3
            or sigmas[-1] != 0
            or sigmas[0] > 1
            or (sigmas.diff() >= 0).any()
        ):
            raise ValueError(
                f"sigmas: {sigmas.tolist()}; allowed: at least 3 values descending from <= 1 to 0"
            )
        sigma, dt = sigmas[:-1], sigmas.diff()
        std = eta * (sigma / (1 - torch.where(sigma == 1, sigmas[1], sigma))).sqrt()
        if final_step == "deterministic":
            std[-1] = 0
        self.steps = len(sigma)
        self.final_step = final_step
        self.times = (time_scale * sigma).float()
        self._sigma = sigma.float()
        self._dt = dt.float()
        self._x_factor = (1 + std.square() * dt / (2 * sigma)).float()
        self._v_factor = ((1 + std.square() * (1 - sigma) / (2 * sigma)) * dt).float()
        self._scale = (std * (-dt).sqrt()).float()

    @property
    def scored(self) -> list[int]:
        """All steps but a deterministic last one."""
        return list(range(self.steps - (self.final_step == "deterministic")))

    def kernel(self, step: Tensor | int, x: Tensor, output: Tensor) -> Gaussian:
        """See `Transition.kernel`; the output is the velocity."""
        mean = at_step(self._x_factor, step, x) * x + at_step(self._v_factor, step, x) * output
        return Gaussian(mean, at_step(self._scale, step, x))

    def ode(self, step: int, x: Tensor, output: Tensor) -> Tensor:
        """See `Transition.ode`: one Euler step."""
        return x + at_step(self._dt, step, x) * output

    def diffuse(self, step: Tensor | int, x0: Tensor, noise: Tensor) -> Tensor:
        """See `Transition.diffuse`."""
        sigma = at_step(self._sigma, step, x0)
        return sigma * noise + (1 - sigma) * x0

    def bridge(self, step: Tensor | int, x: Tensor, x0: Tensor, noise: Tensor) -> Gaussian:
        """See `Transition.bridge`: the kernel at the true conditional velocity noise - x0."""
        return self.kernel(step, x, noise - x0)

    def guide(self, conditional: Tensor, null: Tensor, scale: float) -> Tensor:
        """See `Transition.guide`: velocities are extrapolated from null to conditional."""
        return null + scale * (conditional - null)


def at_step(table: Tensor, step: Tensor | int, like: Tensor) -> Tensor:
    """Return table[step] on the device of `like`, with a channel dimension."""
    values = table.to(like.device)
    return values[step].unsqueeze(-1)
