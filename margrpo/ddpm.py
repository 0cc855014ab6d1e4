"""DDPM denoising transitions: respaced float64 tables, learned or fixed variance, true-posterior bridges.

Sources: Ho et al. 2020; Nichol and Dhariwal 2021 (cosine table, learned range, respacing); LTH14/mar
`diffusion/`. The head receives ORIGINAL timesteps (0..999); k counts the respaced ones, k = T - 1 the noisiest,
so that denoising step s of T has k = T - 1 - s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from margrpo.diffusion import Gaussian, Transition, at_step
from margrpo.errors import ConfigError

TRAIN_STEPS = 1000
Variance = Literal["learned_range", "fixed_small", "fixed_large"]


def cosine_alphas_cumprod(steps: int = TRAIN_STEPS) -> Tensor:
    """Return the cumulative alphas [steps], float64, of the cosine schedule with betas capped at 0.999."""

    def alpha_bar(u: float) -> float:
        return math.cos((u + 0.008) / 1.008 * math.pi / 2) ** 2

    betas = [min(1 - alpha_bar((i + 1) / steps) / alpha_bar(i / steps), 0.999) for i in range(steps)]
    return (1 - torch.tensor(betas, dtype=torch.float64)).cumprod(0)


def respace(spacing: str, steps: int = TRAIN_STEPS) -> list[int]:
    """Return the ascending original timesteps of a spacing.

    `"a,b,.."` cuts the steps into equal sections and spreads a, b, .. points over them, ends included;
    `"ddimN"` takes N points at an integer stride from 0.

    Raises:
        ConfigError: the text is neither, or asks for more points than there are.
    """
    allowed = f'allowed: counts of equal sections of {steps} like "100" or "8,1", or "ddim50"'
    if spacing.startswith("ddim"):
        wanted = spacing.removeprefix("ddim")
        for every in range(1, steps):
            if wanted == str(len(range(0, steps, every))):
                return list(range(0, steps, every))
        raise ConfigError.of("num_sampling_steps", spacing, allowed)
    counts = spacing.split(",")
    if not all(count.isascii() and count.isdigit() for count in counts) or len(counts) > steps:
        raise ConfigError.of("num_sampling_steps", spacing, allowed)
    size, extra = divmod(steps, len(counts))
    chosen: set[int] = set()
    start = 0
    for section, text in enumerate(counts):
        count, length = int(text), size + (section < extra)
        if not 1 <= count <= length:
            raise ConfigError.of("num_sampling_steps", spacing, allowed)
        stride = 1.0 if count == 1 else (length - 1) / (count - 1)
        position = 0.0
        for _ in range(count):  # the source adds strides up: the same rounding errors give the same points
            chosen.add(start + round(position))
            position += stride
        start += length
    return sorted(chosen)


@dataclass(frozen=True)
class Tables:
    """Float64 tables [T] of a respaced process, ascending in k (0 = the step that ends at the token).

    `previous` are the cumulative alphas of k - 1 (1 at k = 0); `log_variance` is that of the true posterior,
    whose entry 0 (-infinity) is replaced by entry 1, as in the source.
    """

    betas: Tensor
    alphas_cumprod: Tensor
    previous: Tensor
    variance: Tensor
    log_variance: Tensor
    x0_factor: Tensor
    x_factor: Tensor

    @classmethod
    def of(cls, alphas_cumprod: Tensor, timesteps: Sequence[int]) -> Tables:
        """Return the tables for ascending original timesteps.

        Raises:
            ValueError: fewer than 2 timesteps, not ascending, or outside of the table.
        """
        if len(timesteps) < 2 or sorted(set(timesteps)) != list(timesteps) or timesteps[0] < 0:
            raise ValueError(f"timesteps: {list(timesteps)}; allowed: at least 2, ascending, from 0 on")
        kept = alphas_cumprod.double()[list(timesteps)]
        betas = 1 - kept / torch.cat([kept.new_ones(1), kept[:-1]])
        # rebuilt from the new betas, as the source does: equal but for rounding
        kept = (1 - betas).cumprod(0)
        previous = torch.cat([kept.new_ones(1), kept[:-1]])
        variance = betas * (1 - previous) / (1 - kept)
        return cls(
            betas=betas,
            alphas_cumprod=kept,
            previous=previous,
            variance=variance,
            log_variance=torch.cat([variance[1:2], variance[1:]]).log(),
            x0_factor=betas * previous.sqrt() / (1 - kept),
            x_factor=(1 - previous) * (1 - betas).sqrt() / (1 - kept),
        )


class DDPM(Transition):
    """Ancestral sampling of a noise-predicting head: p(x_{k-1} | x_k) = N(mean(x_k, epsilon), variance).

    x0 = x / sqrt(abar) - sqrt(1 / abar - 1) epsilon, never clipped; mean = c1 x0 + c2 x (posterior mean).
    With a learned range the output is [epsilon | v] and log variance = f log beta + (1 - f) log posterior
    variance, f = (v + 1) / 2, not clamped. The last step (k = 0) is deterministic: no log-prob, not scored.

    Args:
        alphas_cumprod: the training process's cumulative alphas. timesteps: ascending original timesteps.
        variance: "learned_range", "fixed_small" (posterior) or "fixed_large" (beta); fixed: output epsilon.
        temperature: factor on the std.
    """

    def __init__(
        self,
        alphas_cumprod: Tensor,
        timesteps: Sequence[int],
        variance: Variance = "learned_range",
        temperature: float = 1.0,
    ) -> None:
        tables = Tables.of(alphas_cumprod, timesteps)
        self.tables, self.variance, self.temperature = tables, variance, temperature
        self.steps = len(timesteps)
        self.times = torch.tensor(timesteps[::-1], dtype=torch.float32)
        inverse, noise_share = (1 / tables.alphas_cumprod).sqrt(), (1 / tables.alphas_cumprod - 1).sqrt()
        signal = tables.previous.sqrt()
        self._x0_x, self._x0_noise = _steps(inverse), _steps(noise_share)
        # Combined in float64: x0 reaches 1e4 x in the first steps and would lose digits in between.
        self._mean_x = _steps(tables.x0_factor * inverse + tables.x_factor)
        self._mean_noise = _steps(-tables.x0_factor * noise_share)
        self._ode_x = _steps(signal * inverse)
        self._ode_noise = _steps((1 - tables.previous).sqrt() - signal * noise_share)
        self._bridge_x0, self._bridge_x = _steps(tables.x0_factor), _steps(tables.x_factor)
        self._bridge_std = _steps(tables.variance.sqrt())
        self._signal = _steps(tables.alphas_cumprod.sqrt())
        self._noise = _steps((1 - tables.alphas_cumprod).sqrt())
        self._low, self._high = _steps(tables.log_variance), _steps(tables.betas.log())
        self._stochastic = torch.ones(self.steps)
        self._stochastic[-1] = 0

    @property
    def scored(self) -> list[int]:
        """All steps but the deterministic last one."""
        return list(range(self.steps - 1))

    def kernel(self, step: Tensor | int, x: Tensor, output: Tensor) -> Gaussian:
        """See `Transition.kernel`."""
        mean = at_step(self._mean_x, step, x) * x + at_step(self._mean_noise, step, x) * self._epsilon(output)
        std = (0.5 * self.log_variance(step, output)).exp() * self.temperature
        return Gaussian(mean, at_step(self._stochastic, step, x) * std)

    def log_variance(self, step: Tensor | int, output: Tensor) -> Tensor:
        """Return the log variance at temperature 1, [.., C] (learned) or [.., 1]; also where it is not used."""
        low, high = at_step(self._low, step, output), at_step(self._high, step, output)
        if self.variance == "learned_range":
            share = (output.chunk(2, dim=-1)[1] + 1) / 2
            return share * high + (1 - share) * low
        return low if self.variance == "fixed_small" else high

    def predict(self, step: Tensor | int, x: Tensor, output: Tensor) -> Tensor:
        """Return the predicted token x0 [.., C]."""
        return at_step(self._x0_x, step, x) * x - at_step(self._x0_noise, step, x) * self._epsilon(output)

    def ode(self, step: int, x: Tensor, output: Tensor) -> Tensor:
        """See `Transition.ode`: the DDIM step with eta = 0."""
        return at_step(self._ode_x, step, x) * x + at_step(self._ode_noise, step, x) * self._epsilon(output)

    def diffuse(self, step: Tensor | int, x0: Tensor, noise: Tensor) -> Tensor:
        """See `Transition.diffuse`."""
        return at_step(self._signal, step, x0) * x0 + at_step(self._noise, step, x0) * noise

    def bridge(self, step: Tensor | int, x: Tensor, x0: Tensor, noise: Tensor) -> Gaussian:
        """See `Transition.bridge`: the posterior q(x_{k-1} | x_k, x0), whatever the temperature."""
        mean = at_step(self._bridge_x0, step, x) * x0 + at_step(self._bridge_x, step, x) * x
        return Gaussian(mean, at_step(self._bridge_std, step, x))

    def guide(self, conditional: Tensor, null: Tensor, scale: float) -> Tensor:
        """See `Transition.guide`: epsilon alone is guided, the variance stays the conditional one."""
        start = self._epsilon(null)
        epsilon = start + scale * (self._epsilon(conditional) - start)
        if self.variance != "learned_range":
            return epsilon
        return torch.cat([epsilon, conditional.chunk(2, dim=-1)[1]], dim=-1)

    def _epsilon(self, output: Tensor) -> Tensor:
        return output.chunk(2, dim=-1)[0] if self.variance == "learned_range" else output


def _steps(table: Tensor) -> Tensor:
    """Return a float64 table ascending in k as float32 in the order of the denoising steps."""
    return table.flip(0).float()
