"""Whether a reward can run here, looking at packages and files alone: nothing is loaded or downloaded."""

from __future__ import annotations

from pathlib import Path

from margrpo.config import RewardOptions
from margrpo.rewards.base import Info, entry, missing

_TENSORS = ("model.safetensors", "pytorch_model.bin")


def state(name: str, options: RewardOptions) -> str:
    """Return one line: served elsewhere, ready, or what is missing and how to get it."""
    info = entry(name).info
    problem = missing(name, options)
    if problem is not None:
        return f"not ready: {problem}"
    if options.url is not None:
        return f"served at {options.url}"
    if not info.files:
        return (
            "ready: needs no weights of its own"
            if info.extra is None
            else f"ready: {info.extra[1]} brings its models"
        )
    if options.path is not None:
        return f"ready: weights in {options.path}"
    if not info.repository:
        return f"not ready: set reward.options.{name}.path to a folder with the files"
    found = _cached(info)
    if found is not None:
        return f"ready: weights in {found}"
    return f"not here: downloads {info.repository} at the first use; or set reward.options.{name}.path"


def _cached(info: Info) -> Path | None:
    """Return the snapshot of the hub's cache that has the reward's files, if there is one."""
    from huggingface_hub import try_to_load_from_cache

    def find(file: str) -> Path | None:
        path = try_to_load_from_cache(info.repository, file)
        return Path(path) if isinstance(path, str) else None

    found = [find(file) for file in info.files]
    if info.files == ("config.json",):
        found.append(next((path for path in map(find, _TENSORS) if path is not None), None))
    paths = [path for path in found if path is not None]
    return paths[0].parent if len(paths) == len(found) else None
