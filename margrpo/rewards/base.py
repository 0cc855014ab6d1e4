"""The reward protocol and the registry: what rewards there are, what they need and how they are built."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from margrpo.config import RewardOptions
from margrpo.errors import ConfigError

Specs = Sequence[Mapping[str, Any]]


class Reward(Protocol):
    """Scores images [B, 3, H, W] in [0, 1] for their prompts and specs; returns float [B].

    An image that cannot be scored (its prompt has nothing to read, say) gets NaN, never a made-up number.
    """

    def __call__(self, images: Tensor, prompts: Sequence[str], specs: Specs) -> Tensor:
        """Return one score per image."""
        ...


@dataclass(frozen=True)
class Info:
    """What a person needs to know of a reward before using it.

    Args:
        low, high: range of the scores; infinite where unbounded. license: of the weights or the rule.
        files: names of the weight files in the folder `reward.options.<name>.path`. source: where they come
            from. repository: of the hub, where they are taken from without a path; "" = a path is needed.
        extra: optional dependency group of this package, with the module it must bring.
        batch_size: images scored together by default; None = all. step: distance of neighbouring scores
            where they are quantised, else 0.
    """

    name: str
    summary: str
    license: str
    low: float = -math.inf
    high: float = math.inf
    files: tuple[str, ...] = ()
    source: str = ""
    repository: str = ""
    extra: tuple[str, str] | None = None
    batch_size: int | None = None
    step: float = 0.0


Build = Callable[[RewardOptions], Reward]


@dataclass(frozen=True)
class Entry:
    """A registered reward: its description and the function that builds it (and loads its weights)."""

    info: Info
    build: Build


_REGISTRY: dict[str, Entry] = {}
_MODULES = {
    "aesthetic": "aesthetic",
    "clip_h14": "clipscore",
    "clip_l14": "clipscore",
    "clip_t2i": "clipscore",
    "clipscore": "clipscore",
    "geneval.mask2former": "mask2former",
    "geneval_partial.mask2former": "mask2former",
    "hpsv2": "hps",
    "hpsv2.1": "hps",
    "image_reward": "image_reward",
    "jpeg_size": "jpeg_size",
    "ocr": "ocr",
    "ocr_clean": "ocr",
    "pickscore": "pickscore",
    "t2i_3d_spatial.owlv2_dpt": "depth",
    "t2i_attribute.blip": "blip_vqa",
    "t2i_numeracy.owlv2": "owlv2",
    "t2i_spatial.owlv2": "owlv2",
}
"""Where the rewards of this package register themselves; a module is imported when one of its is asked for."""


def register(info: Info) -> Callable[[Build], Build]:
    """Make a reward available under `info.name` in `reward.weights`; it is built at its first use."""

    def add(build: Build) -> Build:
        if info.name in _REGISTRY:
            raise ValueError(f"reward {info.name} is registered already")
        _REGISTRY[info.name] = Entry(info, build)
        return build

    return add


def names() -> list[str]:
    """Return the names of this package's rewards and of those registered elsewhere."""
    return sorted({*_REGISTRY, *_MODULES})


def entry(name: str) -> Entry:
    """Return a reward; raises ConfigError with the names that are allowed."""
    if name not in _REGISTRY and name in _MODULES:
        importlib.import_module(f"margrpo.rewards.{_MODULES[name]}")
    if name not in _REGISTRY:
        raise ConfigError.of(f"reward.weights.{name}", "unknown reward", f"allowed: {', '.join(names())}")
    return _REGISTRY[name]


def check(weights: Mapping[str, float], options: Mapping[str, RewardOptions] | None = None) -> None:
    """Refuse a mixture that cannot run before anything expensive starts.

    Raises:
        ConfigError: an unknown reward, no weight other than 0, a missing optional package or weight file.
    """
    for name in weights:
        problem = missing(name, (options or {}).get(name, RewardOptions()))
        if problem:
            raise ConfigError(problem)
    if not any(weights.values()):
        raise ConfigError.of("reward.weights", dict(weights), "allowed: at least one weight that is not 0")


def missing(name: str, options: RewardOptions) -> str | None:
    """Return what a reward lacks to run with these options, as one line, or None."""
    info = entry(name).info
    if options.url is not None:
        return None  # what it needs is where it is served
    if info.extra is not None and importlib.util.find_spec(info.extra[1]) is None:
        return f"reward {name}: package {info.extra[1]} is missing; pip install 'margrpo[{info.extra[0]}]'"
    if options.path is None:
        return None
    folder = Path(options.path).expanduser()
    for file in info.files:
        if not (folder / file).is_file():
            return (
                f"reward.options.{name}.path: {folder} has no {file}; "
                f"allowed: a folder with {', '.join(info.files)} (from {info.source})"
            )
    return None
