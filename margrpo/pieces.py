"""What an update scores: AR steps of micro-batches with their transitions, and the reference's view of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from margrpo import objective as loss
from margrpo.config import Objective
from margrpo.diffusion import Gaussian
from margrpo.policies.base import Policy
from margrpo.prefills import Prefills
from margrpo.rollout import RecordedStep, Rollout
from margrpo.trajectories import Rows, build_rows, draw_fresh


@dataclass
class Piece:
    """One AR step of a micro-batch, ready to be scored in every inner epoch.

    Attributes:
        keep: bool [B, n], tokens in the policy term. advantage: [B].
        anchor: the reference's transitions at the rows of the KL term. old_log_prob: [M].
    """

    rollout: Rollout
    step: RecordedStep
    rows: Rows
    keep: Tensor
    advantage: Tensor
    anchor: Gaussian | None = None
    old_log_prob: Tensor | None = None


def cut(
    policy: Policy,
    rollouts: Sequence[Rollout],
    advantage: Tensor,
    objective: Objective,
    denoising_steps: tuple[int, ...],
) -> list[Piece]:
    """Return the AR steps of the rollouts of all micro-batches, with the transitions to score.

    Args:
        advantage: [B] over all rollouts. denoising_steps: those that were recorded.
    """
    pieces = []
    first = 0
    for part in rollouts:
        gain = advantage[first : first + len(part.seeds)]
        first += len(part.seeds)
        fresh = draw_fresh(policy, part, objective, denoising_steps)
        for step in part.steps:
            rows = build_rows(policy, part, step, objective, fresh)
            keep = loss.consistency_mask(step, part.tokens, objective.consistency)
            pieces.append(Piece(part, step, rows, keep, gain))
    return pieces


def add_anchors(reference: Policy, pieces: Sequence[Piece], objective: Objective) -> None:
    """Score the reference once, so that it may leave the device before the gradient is computed."""
    prefills = Prefills()
    for piece, completes in with_ends(pieces):
        piece.anchor = loss.anchor_of(reference, objective, piece.rollout, piece.step, piece.rows, prefills)
        if completes:
            prefills = Prefills()


def with_ends(pieces: Sequence[Piece]) -> Iterator[tuple[Piece, bool]]:
    """Yield the pieces and whether each is the last of its micro-batch."""
    for piece, following in zip(pieces, [*pieces[1:], None], strict=True):
        yield piece, following is None or following.rollout is not piece.rollout
