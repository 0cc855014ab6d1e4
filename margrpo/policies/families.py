"""Which family a released checkpoint belongs to, and its reader."""

from __future__ import annotations

import importlib
from pathlib import Path

from margrpo.errors import MargrpoError
from margrpo.policies.base import Policy

# Imported on demand: the real policies need diffusers and transformers, which are slow to import.
_READERS = {
    "mar": "margrpo.policies.mar.read_mar",
    "harmon": "margrpo.policies.harmon.read_harmon",
    "nova": "margrpo.policies.nova.read_nova",
}
_MARKS = (("harmon", "mar.mask_token"), ("mar", "mask_token"))
"""A parameter that tells a family by its name."""


def family_of(folder: Path) -> str:
    """Return the family of a released checkpoint's folder, from its files.

    Raises:
        MargrpoError: no folder, no weights, or those of no known family.
    """
    from margrpo.policies.mar import weight_file
    from margrpo.policies.released import open_weights

    if not folder.is_dir():
        raise MargrpoError(f"{folder}: no such folder; allowed: a folder with a released checkpoint")
    if (folder / "transformer" / "config.json").is_file():
        return "nova"
    names = open_weights(weight_file(folder)).shapes
    for family, mark in _MARKS:
        if mark in names:
            return family
    raise MargrpoError(f"{folder}: weights of no known family; allowed: MAR, Harmon, NOVA")


def read_released(folder: Path) -> Policy:
    """Return the policy of a released checkpoint's folder; MargrpoError in one line if it cannot be read."""
    module, name = _READERS[family_of(folder)].rsplit(".", 1)
    policy: Policy = getattr(importlib.import_module(module), name)(folder)
    return policy
