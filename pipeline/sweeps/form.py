"""The form of a sweep: what the Prefect UI asks for, and `margrpo sweep` on the command line."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from margrpo.errors import ConfigError, MargrpoError
from margrpo.params import explain, read_yaml
from pipeline import paths

PLAIN = "none"
"""The choice in the form that stands for params.yaml without a profile."""


def _choices(section: str, *more: str) -> list[str]:
    """Return the keys of a section of the project's params.yaml, for the enums of the form."""
    try:
        found = read_yaml(paths.home() / paths.PARAMS).get(section) or {}
    except MargrpoError:
        return []
    return [*more, *found] if isinstance(found, dict) else []


def _offer_presets(schema: dict[str, Any]) -> None:
    names = _choices("variants")
    if names:
        schema["items"] = {"type": "string", "enum": names}


def offer_profiles(schema: dict[str, Any]) -> None:
    """Give the schema of a field the profiles of params.yaml as its choices."""
    schema["enum"] = _choices("profiles", PLAIN) or [PLAIN]


class Sweep(BaseModel):
    """The cells of a sweep are presets x seeds x grid; each becomes a DVC experiment and an MLflow run."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    name: str = Field(
        "sweep",
        title="Name",
        pattern=r"^[a-z0-9][a-z0-9_-]*$",
        max_length=40,
        description=(
            "Small letters, digits, - and _; starts the names of the experiments. "
            "The same sweep again makes only the cells that are missing."
        ),
    )
    profile: str = Field(
        PLAIN,
        title="Policy and sizes",
        json_schema_extra=offer_profiles,
        description="A profile of params.yaml: which policy, prompts and sizes; none = params.yaml as it is.",
    )
    presets: Annotated[list[str], Field(min_length=1, max_length=64)] = Field(
        title="Presets",
        json_schema_extra=_offer_presets,
        description="Variants of params.yaml to compare.",
    )
    seeds: Annotated[
        list[Annotated[int, Field(ge=0, le=2**31 - 1)]], Field(min_length=1, max_length=1000)
    ] = Field([0], title="Seeds", description="Training seeds; every preset runs with each of them.")
    updates: Annotated[int, Field(ge=1, le=1_000_000)] | None = Field(
        None,
        title="Updates",
        description="Training updates of a cell; None = as in the params. A later milestone is dropped.",
    )
    grid: dict[str, Annotated[list[Any], Field(min_length=1, max_length=100)]] = Field(
        {},
        title="Grid",
        description=(
            "Values to try of any key of params.yaml; a switch of the objective goes without its section: "
            '{"trajectories": [1, 3, 5], "train.learning_rate": [0.0001, 0.0002]}.'
        ),
    )
    skip_void: bool = Field(
        False,
        title="Skip void combinations",
        description="Leave out cells whose switches would change nothing, instead of refusing the sweep.",
    )
    changes: list[str] = Field(
        [],
        title="Other changes",
        max_length=100,
        description="KEY=VALUE lines for all cells, as --set of the command line: train.learning_rate=0.0001.",
    )
    max_parallel: int = Field(
        2, title="Cells side by side", ge=1, le=64, description="At most one a core, or a GPU, at a time."
    )

    @field_validator("presets", "seeds")
    @classmethod
    def values_differ(cls, values: list[Any]) -> list[Any]:
        """Refuse a preset or a seed that is given twice."""
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            raise ValueError(f"{twice}\0{twice} twice\0each value once")
        return values


def read_form(values: dict[str, Any]) -> Sweep:
    """Return the sweep of a filled form.

    Raises:
        ConfigError: `<key>: <given>; <allowed>`.
    """
    try:
        return Sweep.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, Sweep)) from None
