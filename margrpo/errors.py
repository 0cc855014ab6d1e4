"""Errors that are meant for a person: the command line prints them as one line and exits with code 2."""

from __future__ import annotations


class MargrpoError(Exception):
    """A failure whose message says what was given, what is allowed and the next step."""


class ConfigError(MargrpoError):
    """A parameter, prompt or file that the user can correct."""

    @classmethod
    def of(cls, key: str, given: object, allowed: str) -> ConfigError:
        """Return the error for one key in the form `<key>: <given>; <allowed>`."""
        return cls(f"{key}: {given}; {allowed}")


class TrainingError(MargrpoError):
    """Training cannot go on (non-finite loss, no learning signal); names the last good checkpoint."""


class RewardError(TrainingError):
    """A reward has stopped giving scores; training can go on from the last finished update."""
