"""Rewards behind one protocol and registry (`base`); one file per reward; the weighted `mixture`."""

# the default reward; the others are imported when they are asked for
from margrpo.rewards import scenes as _scenes  # noqa: F401
from margrpo.rewards.base import Info, Reward, check, entry, missing, names, register
from margrpo.rewards.mixture import RewardBatch, columns, metrics, prepare, score, spreads

__all__ = [
    "Info",
    "Reward",
    "RewardBatch",
    "check",
    "columns",
    "entry",
    "metrics",
    "missing",
    "names",
    "prepare",
    "register",
    "score",
    "spreads",
]
