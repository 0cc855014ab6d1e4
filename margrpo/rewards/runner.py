"""Running one reward in batches so that a failure costs the images it concerns and nothing else."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from margrpo.config import RewardOptions
from margrpo.errors import MargrpoError, RewardError
from margrpo.rewards.base import Entry, Reward, Specs

PATIENCE = 3
"""Calls in a row without a single score before a reward counts as dead."""

_log = logging.getLogger("margrpo.rewards")


class Runner:
    """A reward with its options; built at the first call, and anew after it hung.

    Raises (when called):
        MargrpoError: the reward cannot be set up.
        RewardError: it failed and `on_failure` is "fail", or it gave no score at all for `PATIENCE` calls
            in a row.
    """

    def __init__(self, entry: Entry, options: RewardOptions) -> None:
        self.entry, self.options = entry, options
        self.reward: Reward | None = None
        self.dead_calls = 0

    def prepare(self) -> None:
        """Build the reward, or reach the server that has it, unless that is done."""
        if self.reward is not None:
            return
        try:
            self.reward = self._remote() if self.options.url is not None else self.entry.build(self.options)
        except MargrpoError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise RewardError(f"reward {self.entry.info.name}: cannot be set up ({reason})") from error

    def __call__(self, images: Tensor, prompts: Sequence[str], specs: Specs) -> Tensor:
        """Return float32 [B] on the CPU; NaN for images that could not be scored."""
        scores, reasons = self.score(images, prompts, specs)
        self._report(scores, reasons)
        return scores

    @torch.no_grad()
    def score(self, images: Tensor, prompts: Sequence[str], specs: Specs) -> tuple[Tensor, list[str]]:
        """Return the scores as a call does, and why some are missing; missing ones have no consequence."""
        size = self.options.batch_size or self.entry.info.batch_size or len(images)
        if self.options.device is not None:
            images = images.to(self.options.device)
        parts = []
        reasons: list[str] = []
        for start in range(0, len(images), size):
            part = slice(start, start + size)
            parts.append(self._batch(images[part], prompts[part], specs[part], reasons))
        return torch.cat(parts), reasons

    def _remote(self) -> Reward:
        from margrpo.rewards.remote import RemoteReward  # an HTTP client that most runs do without

        return RemoteReward(self.entry.info.name, self.options)

    def _batch(self, images: Tensor, prompts: Sequence[str], specs: Specs, reasons: list[str]) -> Tensor:
        """Score a batch; if it raises, score its images one by one to find the one that does it."""
        try:
            return self._score(images, prompts, specs)
        except MargrpoError:
            raise  # the reward cannot be set up or reached: not a matter of single images
        except TimeoutError as error:
            reasons.append(str(error))
            self.reward = None  # its thread may still hold it
            return torch.full((len(images),), torch.nan)
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error}".splitlines()[0])
        if len(images) == 1:
            return torch.full((1,), torch.nan)
        single = [slice(i, i + 1) for i in range(len(images))]
        return torch.cat([self._batch(images[i], prompts[i], specs[i], reasons) for i in single])

    def _score(self, images: Tensor, prompts: Sequence[str], specs: Specs) -> Tensor:
        self.prepare()
        reward = self.reward
        assert reward is not None

        def run() -> Tensor:
            with torch.no_grad():  # grad mode belongs to the thread
                return reward(images, prompts, specs)

        # a remote reward keeps the limit itself, for every try
        limit = None if self.options.url is not None else self.options.timeout_s
        scores = run() if limit is None else call_within(limit, run)
        if scores.shape != (len(images),):
            raise ValueError(f"scores of shape {list(scores.shape)} for {len(images)} images")
        scores = scores.float().cpu()
        return torch.where(scores.isfinite(), scores, torch.nan)

    def _report(self, scores: Tensor, reasons: list[str]) -> None:
        failed = int(scores.isnan().sum())
        if failed == 0:
            self.dead_calls = 0
            return
        reason = reasons[0] if reasons else "not a number"
        message = f"reward {self.entry.info.name}: no score for {failed} of {len(scores)} images ({reason})"
        if self.options.on_failure == "fail":
            raise RewardError(message)
        _log.warning("margrpo: %s", message)
        self.dead_calls = self.dead_calls + 1 if failed == len(scores) else 0
        if self.dead_calls >= PATIENCE:
            raise RewardError(f"{message}, {PATIENCE} times in a row")


def call_within(limit_s: float, function: Callable[[], Tensor]) -> Tensor:
    """Return what a function returns, or raise TimeoutError after `limit_s` seconds.

    Python cannot end a thread: one that hangs is left behind and doesn't keep the process from ending.
    """
    result: list[Tensor] = []
    failure: list[BaseException] = []

    def target() -> None:
        try:
            result.append(function())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=target, name="margrpo-reward", daemon=True)
    thread.start()
    thread.join(limit_s)
    if failure:
        raise failure[0]
    if not result:
        raise TimeoutError(f"no answer within {limit_s:g} s")
    return result[0]
