"""The cells of a sweep: pure, and everything that can be refused is refused here, before anything starts."""

from __future__ import annotations

import difflib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from margrpo.config import Config
from margrpo.errors import ConfigError
from margrpo.params import build_config, load_params, overlay
from margrpo.switches import Objective
from pipeline import jobs
from pipeline.sweeps.form import PLAIN, Sweep

MOST_CELLS = 10_000
_LONGEST = 120  # characters of a cell's name before its hash


@dataclass(frozen=True)
class Cell:
    """One training run of a sweep.

    Attributes:
        label: what tells it from the other cells of the sweep, for people.
        name: of its DVC experiment: sweep, label and a hash of its params and code.
        preset, seed: variant and training seed; the run in params.yaml is `<preset>-<seed>`.
        point: the cell's values of the grid, key as in the form -> value.
        changes: dotted key of params.yaml -> value, applied with `dvc exp run -S`.
        params: the whole of params.yaml before these changes.
        config: params with the changes, validated.
    """

    label: str
    name: str
    preset: str
    seed: int
    point: dict[str, Any]
    changes: dict[str, Any]
    params: dict[str, Any]
    config: Config

    @property
    def run(self) -> str:
        """Return the name of the run in params.yaml and of its folders."""
        return f"{self.preset}-{self.seed}"

    @property
    def device(self) -> str:
        """Return where the cell trains: cpu or cuda."""
        return self.config.train.device


@dataclass(frozen=True)
class Plan:
    """What a sweep will do.

    Attributes:
        cells: in the order of the form.
        notes: what was left out, and why.
    """

    sweep: Sweep
    cells: tuple[Cell, ...]
    notes: tuple[str, ...]


def make_plan(sweep: Sweep, params: Path, code: str) -> Plan:
    """Return the cells of a sweep over a params file.

    Args:
        params: the params file of the project.
        code: what the cells' names depend on besides params: the state of the code.

    Raises:
        ConfigError: in the words of the command line, for the first thing that is wrong.
    """
    profile = None if sweep.profile == PLAIN else sweep.profile
    base = load_params(params, sweep.changes, profile)
    profiles = base.pop("profiles", {})
    build_config(base)
    notes: list[str] = []
    base, note = _fit_updates(base, sweep.updates)
    notes += [note] if note else []
    known = base["variants"]
    for preset in sweep.presets:
        if preset not in known:
            raise ConfigError.of("presets", preset, f"allowed: {', '.join(known)}")
    for key, values in sweep.grid.items():
        if any(isinstance(value, Mapping) for value in values):
            raise ConfigError.of(
                f"grid.{key}", values, "allowed: numbers, texts, lists, true, false, null; no mappings"
            )
    size = len(sweep.presets) * len(sweep.seeds)
    for values in sweep.grid.values():
        size *= len(values)
    if size > MOST_CELLS:
        raise ConfigError.of("grid", f"{size} cells", f"allowed: at most {MOST_CELLS}")
    cells: list[Cell] = []
    for preset, point, seed in itertools.product(sweep.presets, _points(sweep.grid), sweep.seeds):
        try:
            cells.append(_cell(sweep, base, profiles, code, preset, seed, point))
        except ConfigError as error:
            if not sweep.skip_void:
                raise
            notes.append(f"left out {_label(preset, seed, point)}: {error}")
    if not cells:
        raise ConfigError.of("grid", "no cell is left", f"the first was refused: {notes[-1]}")
    names = [cell.label for cell in cells]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError.of("grid", f"{twice} twice", "allowed: each value once")
    return Plan(sweep, tuple(cells), tuple(dict.fromkeys(notes)))


def _fit_updates(base: dict[str, Any], updates: int | None) -> tuple[dict[str, Any], str]:
    """Return the params with this many updates and without a milestone after them, and what to say of it."""
    if updates is None:
        return base, ""
    milestone = (base.get("train") or {}).get("milestone")
    late = milestone is not None and milestone > updates
    changes = {"updates": updates, **({"milestone": None} if late else {})}
    note = f"train.milestone {milestone} lies after {updates} updates: dropped" if late else ""
    return overlay(base, {"train": changes}), note


def _points(grid: Mapping[str, list[Any]]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


def _cell(
    sweep: Sweep,
    base: dict[str, Any],
    profiles: dict[str, Any],
    code: str,
    preset: str,
    seed: int,
    point: dict[str, Any],
) -> Cell:
    run = f"{preset}-{seed}"
    # The noise and the maps of the base policy belong to a study, not to each cell.
    own = {
        "study": {"runs": {run: {"variant": preset, "seed": seed}}},
        "diagnose": {"gradients": None, "images": 0},
    }
    params = overlay(base, own)
    changes = {_locate(key, preset): value for key, value in point.items()}
    changed = params
    for key, value in changes.items():
        changed = overlay(changed, _nest(key.split("."), value))
    config = build_config(changed)
    objective = config.objective_of(preset).model_dump()
    label = _label(preset, seed, point)
    sections = {key: value for key, value in config.model_dump().items() if key not in _APART}
    digest = jobs.digest([sections, objective, seed, code])[:8]
    name = f"{sweep.name}-{label}"[:_LONGEST].rstrip(".-") + f"-{digest}"
    kept = {**params, "profiles": profiles} if _fit(changed, profiles) else params
    return Cell(label, name, preset, seed, point, changes, kept, config)


# Sections of params.yaml that no cell's result depends on; of variants it is the cell's own.
_APART = ("study", "variants", "report", "tracking", "profiles", "diagnose")


def _fit(params: dict[str, Any], profiles: dict[str, Any]) -> bool:
    """Return whether the profiles may stay in the cell's params: they are checked when a stage reads them."""
    try:
        build_config({**params, "profiles": profiles})
    except ConfigError:
        return False
    return bool(profiles)


def _locate(key: str, preset: str) -> str:
    """Return the dotted key of params.yaml that a key of the grid means for a preset."""
    head = key.partition(".")[0]
    if head in Objective.model_fields:
        return f"variants.{preset}.{key}"
    sections = [name for name in Config.model_fields if name not in ("study", "profiles", "variants")]
    if head in sections and head != key:
        return key
    names = [*Objective.model_fields, *sections]
    close = difflib.get_close_matches(head, names, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise ConfigError.of(
        f"grid.{key}",
        "unknown key",
        f"{hint}allowed: a switch of the objective, or <section>.<key> of params.yaml",
    )


def _nest(path: list[str], value: Any) -> dict[str, Any]:
    head, *rest = path
    return {head: _nest(rest, value) if rest else value}


def _label(preset: str, seed: int, point: Mapping[str, Any]) -> str:
    parts = [
        f"{preset}-{seed}",
        *(f"{key.rpartition('.')[2]}={_short(value)}" for key, value in point.items()),
    ]
    return "-".join(parts)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return re.sub(r"\.{2,}|[^A-Za-z0-9_.+-]+", "_", text).strip("_")


def hydra(key: str, value: Any) -> str:
    """Return the `-S` argument that sets a key of params.yaml, also one that is not there yet."""
    return f"++{key}={_hydra_value(value)}"


def _hydra_value(value: Any) -> str:
    if isinstance(value, str):
        # Backslashes are literal but before a quote, of which the closing one is the last.
        quoted = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), value)
        return f"'{quoted}'"
    if isinstance(value, list):
        return f"[{','.join(map(_hydra_value, value))}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{_hydra_value(child)}" for name, child in value.items()) + "}"
    return json.dumps(value)
