"""Prompt files: one JSON object per line with text, category, spec (what a reward's rule needs) and seen."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from margrpo.errors import ConfigError

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Prompt:
    """A prompt, its category, the metadata its rule scores by, and whether training has its composition."""

    text: str
    category: str
    spec: Mapping[str, Any]
    seen: bool


class _PromptLike(Protocol):
    @property
    def text(self) -> str: ...
    @property
    def category(self) -> str: ...
    @property
    def spec(self) -> Mapping[str, Any]: ...
    @property
    def seen(self) -> bool: ...


def dump_prompts(prompts: Sequence[_PromptLike]) -> str:
    """Return the content of a prompt file."""
    records = ({"text": p.text, "category": p.category, "spec": p.spec, "seen": p.seen} for p in prompts)
    return "".join(json.dumps(record, sort_keys=True) + "\n" for record in records)


def read_prompts(path: Path) -> list[Prompt]:
    """Return the prompts of a file.

    Raises:
        ConfigError: the file is missing, empty or has a line that is not a prompt.
    """
    if not path.is_file():
        raise ConfigError.of("prompts", path, "allowed: an existing prompt file (run `dvc repro prompts`)")
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            record = json.loads(line)
            prompts.append(Prompt(record["text"], record["category"], record["spec"], bool(record["seen"])))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError.of(
                "prompts", f"{path} line {number}", f"allowed: a JSON prompt ({error!r})"
            ) from None
    if not prompts:
        raise ConfigError.of("prompts", path, "allowed: a file with at least one prompt")
    return prompts
