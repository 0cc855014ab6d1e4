"""Rewards behind one protocol and registry (`base`); one file per reward."""

from margrpo.rewards import scenes as _scenes  # noqa: F401  (registers itself)
from margrpo.rewards.base import Reward, RewardBatch, check, names, register, score

__all__ = ["Reward", "RewardBatch", "check", "names", "register", "score"]
