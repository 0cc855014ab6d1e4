"""Prompt files: one JSON object per line with text, category, spec (what a reward's rule needs) and seen.

A user's own folder may hold plain text instead, a prompt per line, and leave out all but the text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from margrpo.errors import ConfigError
from margrpo.sources import Prompts

SPLITS = ("train", "validation", "test")
OWN: Mapping[str, Any] = {"category": "prompts", "spec": {}, "seen": False}
"""What a prompt of a user's own file has if the file doesn't say."""


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


def read_prompts(path: Path, defaults: Mapping[str, Any] | None = None) -> list[Prompt]:
    """Return the prompts of a file; `defaults` are for what its lines leave out (OWN, for instance).

    Raises:
        ConfigError: the file is missing, empty or has a line that is not a prompt.
    """
    if not path.is_file():
        raise ConfigError.of("prompts", path, "allowed: an existing prompt file (run `dvc repro prompts`)")
    return _parse(path, defaults or {})


def load_splits(source: Prompts) -> dict[str, list[Prompt]]:
    """Return the prompts of all splits, as the section `prompts` of the params says.

    In a folder a prompt without `seen` counts as seen if it is one of the training prompts.

    Raises:
        ConfigError: a split is missing, empty or has a line that is not a prompt; a test prompt validates.
    """
    if source.path is None:
        from margrpo.benchmarks.scenes import load_split

        return {
            split: [Prompt(p.text, p.category, p.spec, p.seen) for p in load_split(split)] for split in SPLITS
        }
    files = split_files(Path(source.path).expanduser())
    found = {split: _parse(file, {**OWN, "seen": None}) for split, file in files.items()}
    shown = {prompt.text for prompt in found["train"]}
    both = {p.text for p in found["validation"]} & {p.text for p in found["test"]}
    if both:
        raise ConfigError.of("prompts.path", min(both), "allowed: prompts of either validation or test")
    return {
        split: [replace(p, seen=p.text in shown if p.seen is None else bool(p.seen)) for p in prompts]
        for split, prompts in found.items()
    }


def split_files(folder: Path) -> dict[str, Path]:
    """Return the file of each split in a folder; ConfigError unless there is exactly one of each."""
    files = {}
    for split in SPLITS:
        given = [file for kind in ("txt", "jsonl") if (file := folder / f"{split}.{kind}").is_file()]
        if len(given) != 1:
            found = " and ".join(file.name for file in given) or f"no {split}"
            allowed = f"allowed: a folder with one of {split}.txt and {split}.jsonl"
            raise ConfigError.of("prompts.path", f"{folder} with {found}", allowed)
        files[split] = given[0]
    return files


def _parse(path: Path, defaults: Mapping[str, Any]) -> list[Prompt]:
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if path.suffix == ".txt" and not line.strip():
            continue
        try:
            given = {"text": line.strip()} if path.suffix == ".txt" else json.loads(line)
            record = {**defaults, **given}
            if not isinstance(record["text"], str) or not record["text"].strip():
                raise ValueError("text is empty or no text")
            prompts.append(Prompt(record["text"], record["category"], record["spec"], record["seen"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError.of(
                "prompts", f"{path} line {number}", f"allowed: a JSON prompt ({error!r})"
            ) from None
    if not prompts:
        raise ConfigError.of("prompts", path, "allowed: a file with at least one prompt")
    return prompts
