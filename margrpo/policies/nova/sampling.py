"""Guidance as NOVA's own pipeline applies it: scale ramp, renorm, truncation (inference only).

Training uses `Transition.guide`, which treats every token alone. Renorm couples all tokens of an image, and
in NOVA's pipeline even the noisy content of the positions that are not written at this AR step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from margrpo.policies.nova.policy import NovaPolicy


@dataclass(frozen=True)
class NovaGuidance:
    """NOVA's guidance options.

    Attributes:
        scale: CFG scale of the last AR step, at least 1 (1 = off). minimum: where its linear ramp starts;
            None = no ramp.
        renorm: below 1, the guided output is shrunk towards the conditional norm, at most by this factor.
        trunc: guidance ends within an AR step when the time falls below this value (0..1000).
    """

    scale: float = 1.0
    minimum: float | None = None
    renorm: float = 1.0
    trunc: float = 0.0

    def at(self, step: int, steps: int) -> float:
        """Return the scale of AR step `step` (from 0) of `steps`."""
        low = self.scale if self.minimum is None else self.minimum
        return low + (self.scale - low) * (step + 1) / steps


def guide(conditional: Tensor, null: Tensor, scale: float, renorm: float = 1.0) -> Tensor:
    """Return the guided outputs [B, L, C]; renorm < 1 scales images by |cond|/|guided| in [renorm, 1]."""
    guided = null + scale * (conditional - null)
    if renorm >= 1:
        return guided
    ratio = conditional.flatten(1).norm(dim=1) / guided.flatten(1).norm(dim=1)
    return guided * ratio.clamp(renorm, 1.0)[:, None, None]


def denoise_canvas(
    policy: NovaPolicy,
    z: Tensor,
    null_z: Tensor | None,
    x: Tensor,
    index: Tensor,
    scale: float,
    options: NovaGuidance,
) -> Tensor:
    """Return the canvas [B, L, C] after the noiseless steps of one AR step of NOVA's pipeline.

    Args:
        z, null_z: [B, L, D] (null_z None = no guidance). x: [B, L, C], standard normal.
        index: int64 [B, n], the tokens to write. The head runs on these; elsewhere its output is x, as in
            the source: only the renorm sees that.
        scale: this AR step's.
    """
    columns = index[..., None]

    def output(x: Tensor, time: Tensor, z: Tensor) -> Tensor:
        chosen = x.take_along_dim(columns, 1)
        condition = z.take_along_dim(columns, 1)
        times = time.expand(index.numel())
        written = policy.head(chosen.flatten(0, 1), times, condition.flatten(0, 1)).view_as(chosen)
        return x.scatter(1, columns.expand_as(written), written)

    for step, time in enumerate(policy.transition.times.to(x.device)):
        conditional = output(x, time, z)
        if null_z is None or float(time) < options.trunc:
            x = policy.transition.ode(step, x, conditional)
        else:
            null = output(x, time, null_z)
            x = policy.transition.ode(step, x, guide(conditional, null, scale, options.renorm))
    return x


@torch.no_grad()
def sample_latent_tokens(
    policy: NovaPolicy,
    text: Tensor,
    null_text: Tensor,
    order: Tensor,
    noise: Tensor,
    options: NovaGuidance,
) -> Tensor:
    """Return final tokens [B, L, C] of NOVA's own noiseless pipeline.

    Args:
        text, null_text: [B, L', text_dim], padded states. order: int64 [B, L], the commit order.
        noise: [K, B, L, C], a canvas for each AR step.
    """
    c = policy.transformer.condition(text)
    guided = options.scale > 1
    null_c = policy.transformer.condition(null_text) if guided else None
    counts = policy.ar_schedule(len(noise))
    tokens = torch.zeros_like(noise[0])
    known = torch.zeros_like(order, dtype=torch.bool)
    start = 0
    for step, count in enumerate(counts):
        index = order[:, start : start + count]
        z = policy.transformer.latents(tokens, known, c)
        null_z = None if null_c is None else policy.transformer.latents(tokens, known, null_c)
        scale = options.at(step, len(counts))
        canvas = denoise_canvas(policy, z, null_z, noise[step], index, scale, options)
        columns = index[..., None].expand(-1, -1, tokens.shape[-1])
        tokens = tokens.scatter(1, columns, canvas.take_along_dim(columns, 1))
        known = known.scatter(1, index, True)
        start += count
    return tokens
