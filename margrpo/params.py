"""Read params.yaml: overlay a profile and `--set` values, validate, and put errors in one line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from margrpo.config import Config, Objective
from margrpo.errors import ConfigError

_WHOLE = ("runs", "weights")  # mappings of which a profile gives the whole
_VARIABLE = re.compile(r"\$\{?[A-Za-z_]")


def load_config(
    path: str | Path = "params.yaml", overrides: Sequence[str] = (), profile: str | None = None
) -> Config:
    """Return the validated configuration of a params file.

    Args:
        path: the YAML file.
        overrides: `key=value` strings with dotted keys, applied last; values are YAML.
        profile: a key of `profiles` whose overlay is applied before the overrides.

    Raises:
        ConfigError: `<key>: <given>; <allowed>` for anything wrong.
    """
    params = load_params(path, overrides, profile)
    changed = profile is not None or bool(overrides)
    if changed and not any(item.startswith("profiles") for item in overrides):
        params.pop(
            "profiles", None
        )  # overlays on the file as it is: they need not fit what was changed on top
    return build_config(params)


def load_params(
    path: str | Path, overrides: Sequence[str] = (), profile: str | None = None
) -> dict[str, Any]:
    """Return the raw mapping of a params file with profile and overrides applied (see `load_config`)."""
    params = read_yaml(Path(path))
    if profile is not None:
        profiles = params.get("profiles") or {}
        if profile not in profiles:
            raise ConfigError.of("profile", profile, f"allowed: {', '.join(profiles) or 'none defined'}")
        params = overlay(params, profiles[profile])
    for item in overrides:
        key, separator, text = item.partition("=")
        if not separator or not key:
            raise ConfigError.of("--set", item, "allowed: key=value with a dotted key")
        params = _assign(params, key.split("."), parse_value(text, key), key)
    return params


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML 1.2 file; duplicate keys are errors."""
    if not path.is_file():
        raise ConfigError.of("params", path, "allowed: an existing params file (is this the project folder?)")
    try:
        data = parse_value(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError.of("params", path, f"allowed: a readable UTF-8 file ({error})") from error
    if not isinstance(data, dict):
        raise ConfigError.of("params", path, "allowed: a mapping of sections")
    return data


def build_config(params: Mapping[str, Any]) -> Config:
    """Validate a raw mapping; every variant and every profile is checked too."""
    _refuse_variables(params, "")
    try:
        config = Config.model_validate(dict(params))
    except ValidationError as error:
        raise ConfigError(explain(error, Config)) from None
    for variant in config.variants:
        build_objective(config, variant)
    for name, changes in config.profiles.items():
        if "profiles" in changes:
            raise ConfigError.of(f"profiles.{name}", "profiles", "allowed: any other section")
        merged = overlay({key: value for key, value in params.items() if key != "profiles"}, changes)
        try:
            Config.model_validate(merged)
        except ValidationError as error:
            raise ConfigError(f"profiles.{name}.{explain(error, Config)}") from None
    return config


def build_objective(config: Config, variant: str) -> Objective:
    """Return the objective of a variant (see `Config.objective_of`).

    Raises:
        ConfigError: the variant is unknown or its switches make a void combination.
    """
    if variant not in config.variants:
        raise ConfigError.of("variant", variant, f"allowed: {', '.join(config.variants)}")
    merged = overlay(config.objective.model_dump(), config.variants[variant])
    try:
        objective = Objective.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(f"variants.{variant}.{explain(error, Objective)}") from None
    if objective.guidance.logprob == "guided" and config.sampler.guidance_schedule != "constant":
        allowed = (
            "allowed: conditional with sampler.guidance_schedule linear (tokens of many AR steps are scored)"
        )
        raise ConfigError.of(f"variants.{variant}.guidance.logprob", "guided", allowed)
    return objective


def overlay(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `changes` on top: mappings merge; runs, reward weights and everything else replace.

    Options of rewards that new weights leave out go with them.
    """
    result = dict(base)
    for key, value in changes.items():
        merges = isinstance(value, Mapping) and isinstance(result.get(key), Mapping) and key not in _WHOLE
        result[key] = overlay(result[key], value) if merges else value
    weights, options = changes.get("weights"), result.get("options")
    if isinstance(weights, Mapping) and isinstance(options, Mapping):
        kept = {*weights, *changes.get("options", {})}
        result["options"] = {name: value for name, value in options.items() if name in kept}
    return result


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """Return the first problem of a validation as `<key>: <given>; <allowed>`."""
    first = error.errors(include_url=False)[0]
    location = [str(part) for part in first["loc"] if part != "[key]"]
    if first["type"] == "value_error" and "\0" in first["msg"]:
        key, given, allowed = first["msg"].removeprefix("Value error, ").split("\0")
        return f"{'.'.join([*location, key])}: {given}; allowed: {allowed}"
    owner = _owner(model, location)
    if first["type"] == "extra_forbidden":
        names = list(owner.model_fields) if owner else []
        close = difflib.get_close_matches(location[-1], names, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        return f"{'.'.join(location)}: unknown key; {hint}allowed: {', '.join(names)}"
    if first["type"] == "missing":
        return f"{'.'.join(location)}: missing; allowed: {_describe(owner, location[-1])}"
    name = next((part for part in reversed(location) if owner and part in owner.model_fields), location[-1])
    given = str(first["input"]).replace("\n", " ")
    allowed = _describe(owner, name) or first["msg"]
    return f"{'.'.join(_without_tags(location))}: {given[:80]}; allowed: {allowed}"


def _without_tags(location: Sequence[str]) -> list[str]:
    # Pydantic appends the branch of a union ("int", "literal[...]") to the location.
    return [part for part in location if not re.fullmatch(r"(int|float|str|bool|literal\[.*\])", part)]


def _owner(model: type[BaseModel], location: Sequence[str]) -> type[BaseModel] | None:
    owner = model
    for part in location[:-1]:
        if part not in owner.model_fields:
            continue
        nested = _section(owner.model_fields[part].annotation)
        if nested is not None:
            owner = nested
    return owner


def _section(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for arg in get_args(annotation) if (found := _section(arg)) is not None), None)


def _describe(owner: type[BaseModel] | None, name: str) -> str:
    if owner is None or name not in owner.model_fields:
        return ""
    schema = owner.model_json_schema()["properties"][name]
    text = " | ".join(_describe_schema(part) for part in schema.get("anyOf", [schema]))
    about = owner.model_fields[name].description
    return f"{text} ({about})" if about else text


def _describe_schema(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return " | ".join(str(value) for value in schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    if schema.get("type") == "array" and schema.get("items", {}).keys() & {"enum", "const"}:
        return f"a list of {_describe_schema(schema['items'])}"
    kind = {"null": "null", "object": "a mapping", "array": "a list"}.get(
        schema.get("type", ""), schema.get("type", "")
    )
    low = [f">= {schema['minimum']}"] if "minimum" in schema else []
    low += [f"> {schema['exclusiveMinimum']}"] if "exclusiveMinimum" in schema else []
    high = [f"<= {schema['maximum']}"] if "maximum" in schema else []
    high += [f"< {schema['exclusiveMaximum']}"] if "exclusiveMaximum" in schema else []
    return " ".join([kind or "a section", *low, *high])


def _refuse_variables(value: Any, key: str) -> None:
    if isinstance(value, Mapping):
        for name, child in value.items():
            _refuse_variables(child, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for index, child in enumerate(value):
            _refuse_variables(child, f"{key}.{index}")
    elif isinstance(value, str) and _VARIABLE.search(value):
        raise ConfigError.of(key, value, "allowed: a literal value (variables are not expanded here)")


def parse_value(text: str, key: str) -> Any:
    """Return the value of a YAML text; `key` is what an error names.

    Raises:
        ConfigError: not YAML.
    """
    try:
        return YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark is not None else ""
        raise ConfigError.of(key, f"not YAML{where}", f"allowed: valid YAML ({problem})") from None


def _assign(params: dict[str, Any], path: Sequence[str], value: Any, key: str) -> dict[str, Any]:
    head, *rest = path
    if not rest:
        return {**params, head: value}
    child = params.get(head, {})
    if not isinstance(child, dict):
        raise ConfigError.of(key, value, f"allowed: keys of a mapping ({head} is not one)")
    return {**params, head: _assign(child, rest, value, key)}
