"""The client of a reward that another process or machine scores (`margrpo serve-reward`).

A server that is away, busy or too slow is asked again, with growing pauses, until `wait_s` has passed; then the
run stops. An outage therefore never becomes a score, and doesn't change the result.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import httpx
import tenacity
import torch
from pydantic import ValidationError
from torch import Tensor

from margrpo import __version__
from margrpo.config import RewardOptions
from margrpo.errors import ConfigError, RewardError
from margrpo.rewards import wire
from margrpo.rewards.base import Specs

TIMEOUT_S = 120.0
WAIT_S = 600.0
CONNECT_S = 10.0
_PASSING = (408, 429, 500, 502, 503, 504)
_LONGEST_PAUSE_S = 30.0

_log = logging.getLogger("margrpo.rewards")
_backoff = tenacity.wait_exponential(multiplier=0.5, max=_LONGEST_PAUSE_S) + tenacity.wait_random(0, 0.5)


class _AwayError(Exception):
    """No answer this time; `pause_s`: what the server asks to wait."""

    def __init__(self, reason: str, pause_s: float = 0.0) -> None:
        super().__init__(reason)
        self.pause_s = pause_s


class _RefusedError(Exception):
    """An answer that another try would not change."""


class RemoteReward:
    """A reward behind `options.url`.

    Raises:
        ConfigError: what answers there is no server of this reward, or has other weights than `sha256`.
        RewardError: nobody answers for `wait_s`, the server refuses a request, or is suddenly another one.
    """

    def __init__(self, name: str, options: RewardOptions) -> None:
        assert options.url is not None  # the caller decides by it
        self.name, self.options, self.url = name, options, options.url.rstrip("/")
        limits = httpx.Timeout(options.timeout_s or TIMEOUT_S, connect=CONNECT_S)
        self._client = httpx.Client(timeout=limits, trust_env=False)  # straight to the url, through no proxy
        self._identity = self._introduce()

    def __call__(self, images: Tensor, prompts: Sequence[str], specs: Specs) -> Tensor:
        """Return one score per image, NaN where the server has none."""
        try:
            body = self._ask("POST", "/score", wire.encode(images, prompts, specs))
            answer = wire.Answer.model_validate_json(body)
        except (_RefusedError, ValidationError) as error:
            raise RewardError(f"reward {self.name}: {self.url} {_line(error)}") from None
        if (answer.name, answer.weights) != (self._identity.name, self._identity.weights):
            raise RewardError(
                f"reward {self.name}: {self.url} scores with {answer.name}, weights {answer.weights}, since the "
                f"run began with {self._identity.name}, weights {self._identity.weights}; serve those again"
            )
        for reason in answer.reasons:
            _log.warning("margrpo: reward %s: %s: %s", self.name, self.url, reason)
        return torch.tensor([float("nan") if score is None else score for score in answer.scores])

    def _introduce(self) -> wire.Identity:
        """Return who answers; raises ConfigError unless it is a server of this reward."""
        key = f"reward.options.{self.name}"
        allowed = f"allowed: the address of `margrpo serve-reward {self.name}`"
        try:
            identity = wire.Identity.model_validate_json(self._ask("GET", "/health"))
        except (_RefusedError, ValidationError) as error:
            raise ConfigError.of(
                f"{key}.url", f"{self.url} is no reward server ({_line(error)})", allowed
            ) from None
        if identity.name != self.name:
            raise ConfigError.of(f"{key}.url", f"{self.url} serves {identity.name}", allowed)
        if self.options.sha256 not in (None, identity.weights):
            raise ConfigError.of(
                f"{key}.sha256", self.options.sha256, f"allowed: {identity.weights}, served there"
            )
        _log.info("margrpo: reward %s: %s, weights %s", self.name, self.url, identity.weights)
        if identity.version != __version__:
            versions = f"margrpo {identity.version} there, {__version__} here"
            _log.warning("margrpo: reward %s: %s: %s", self.name, self.url, versions)
        return identity

    def _ask(self, method: str, path: str, content: bytes | None = None) -> bytes:
        """Return the body of an answer, after as many tries as fit into `wait_s`."""
        wait_s = WAIT_S if self.options.wait_s is None else self.options.wait_s
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(_AwayError),
            wait=_pause,
            stop=tenacity.stop_after_delay(wait_s),
            before_sleep=self._report,
            reraise=True,
        )
        try:
            return retrying(self._try, method, path, content)
        except _AwayError as error:
            raise RewardError(
                f"reward {self.name}: no answer from {self.url} within {wait_s:g} s ({error}; "
                f"start `margrpo serve-reward {self.name}` there)"
            ) from None

    def _try(self, method: str, path: str, content: bytes | None) -> bytes:
        headers = {} if content is None else {"content-type": "application/json"}
        try:
            response = self._client.request(method, self.url + path, content=content, headers=headers)
        except httpx.TimeoutException as error:
            raise _AwayError(f"time-out, {type(error).__name__}") from None
        except httpx.HTTPError as error:
            raise _AwayError(_line(error)) from None
        if response.status_code in _PASSING:
            raise _AwayError(_error_of(response), _seconds(response.headers.get("retry-after")))
        if response.status_code != httpx.codes.OK:
            raise _RefusedError(f"answers {_error_of(response)}")
        return response.content

    def _report(self, state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        pause = state.next_action.sleep if state.next_action else 0.0
        text = "margrpo: reward %s: no answer from %s (%s); trying again in %.1f s"
        _log.warning(text, self.name, self.url, error, pause)


def _pause(state: tenacity.RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome else None
    asked = error.pause_s if isinstance(error, _AwayError) else 0.0
    return max(asked, _backoff(state))


def _seconds(text: str | None) -> float:
    """Return the pause that a Retry-After header of whole seconds asks for; 0 for a date or nonsense."""
    return min(float(text), _LONGEST_PAUSE_S) if text is not None and text.isdigit() else 0.0


def _error_of(response: httpx.Response) -> str:
    try:
        detail = str(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        detail = response.reason_phrase
    return f"{response.status_code}: {' '.join(detail.split())[:200]}"


def _line(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:200]
