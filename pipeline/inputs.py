"""Files from outside of the workspace: where they lie for a stage, and that they are those that params name.

DVC compares params, not these files: the params name their content by a hash, which a stage demands and checks.
A path is relative to the project's folder (a link will do), so that the params are the same for every user.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from margrpo.config import Config, RewardOptions
from margrpo.errors import ConfigError
from margrpo.sources import Benchmark
from pipeline import paths

Given = TypeVar("Given", RewardOptions, Benchmark)


def at_home(path: str) -> str:
    """Return a path of the params as it is meant: relative ones are in the project's folder."""
    return str(paths.home() / Path(path).expanduser())


def for_training(config: Config) -> Config:
    """Return the params with the places of the reward's weight files; ConfigError if their hash is missing or other."""
    from margrpo.hub import check_weights  # with torch, seconds to import

    reward = config.reward.model_copy(update={"options": _located(config.reward.options)})
    check_weights("reward.options", reward.options, required=True)
    return config.model_copy(update={"reward": reward})


def for_evaluation(config: Config) -> Config:
    """Return the params with the places of all files that an evaluation reads; ConfigError as `for_training`."""
    from margrpo.hub import check_weights

    config = for_training(config)
    benchmarks = {name: _benchmark(name, given) for name, given in config.evaluation.benchmarks.items()}
    update = {"options": _located(config.evaluation.options), "benchmarks": benchmarks}
    evaluation = config.evaluation.model_copy(update=update)
    check_weights("evaluation.options", evaluation.options, required=True)
    return config.model_copy(update={"evaluation": evaluation})


def without_paths(options: Mapping[str, RewardOptions]) -> dict[str, Any]:
    """Return what a result depends on: the content of weight files, not their place."""
    return {name: given.model_dump(exclude={"path"}) for name, given in options.items()}


def _located(options: Mapping[str, RewardOptions]) -> dict[str, RewardOptions]:
    return {name: _at_home(given) for name, given in options.items()}


def _benchmark(name: str, given: Benchmark) -> Benchmark:
    located = _at_home(given)
    if located.path is not None and located.sha256 is None:
        from margrpo.benchmarks.prompt_sets import digest
        from margrpo.benchmarks.suite import prepare

        allowed = f"allowed with a path: the hash of its prompts, {digest(prepare(name, located).prompts)}"
        raise ConfigError.of(f"evaluation.benchmarks.{name}.sha256", None, allowed)
    return located


def _at_home(given: Given) -> Given:
    return given if given.path is None else given.model_copy(update={"path": at_home(given.path)})
