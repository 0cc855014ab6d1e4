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


def sketch_released(folder: Path) -> Policy:
    """Return the policy that a released checkpoint's config files describe, on the meta device.

    Raises:
        MargrpoError: a folder without them (MAR and Harmon as .pth), or not of a known family.
    """
    from margrpo.policies.released import read_json

    if (folder / "transformer" / "config.json").is_file():
        from margrpo.policies.nova.policy import NovaPolicy

        files = ("transformer/config.json", "scheduler/scheduler_config.json")
        config, scheduler = (read_json(folder / name) for name in files)
        return NovaPolicy(config, scheduler, str(folder / files[0]))
    if not (folder / "config.json").is_file():
        raise MargrpoError(
            f"{folder}: no config.json to estimate from; allowed: one as `margrpo train` reads"
        )
    config = read_json(folder / "config.json")
    if "llm" in config:
        from margrpo.policies.harmon import sketch_harmon

        return sketch_harmon(config, folder / "config.json")
    from margrpo.policies.mar import MarPolicy, described_vae, mar_architecture

    architecture = mar_architecture(config.get("mar", config), f"{folder}/config.json: mar")
    return MarPolicy(architecture, described_vae({"vae": {}, **config}))


def read_released(folder: Path) -> Policy:
    """Return the policy of a released checkpoint's folder; MargrpoError in one line if it cannot be read."""
    module, name = _READERS[family_of(folder)].rsplit(".", 1)
    policy: Policy = getattr(importlib.import_module(module), name)(folder)
    return policy
