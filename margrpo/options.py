"""The options that every command has, and the configuration behind them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from margrpo.config import Config

ParamsFile = Annotated[Path, typer.Option("--params", metavar="FILE", help="The params file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the params, dotted; repeatable."),
]
Profile = Annotated[
    str | None, typer.Option("--profile", metavar="NAME", help="Overlay from `profiles` in the params file.")
]
PARAMS = Path("params.yaml")


def load(params: Path, overrides: Sequence[str] | None, profile: str | None) -> Config:
    """Return the validated configuration behind the three options that every command has.

    Raises:
        ConfigError: anything wrong with the file, the profile or the overrides.
    """
    from margrpo.params import load_config

    return load_config(params, overrides or (), profile)
