"""Released checkpoints in folders: from the Hugging Face hub, only the files that are needed, with their hashes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

from margrpo import checkpoints
from margrpo.config import RewardOptions
from margrpo.errors import ConfigError, MargrpoError
from margrpo.sources import Checkpoint

NEEDED = (
    "config.json",
    "class_names.json",
    "tokenizer.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "*.pth",
    "*.ckpt",
    "*/config.json",
    "scheduler/scheduler_config.json",
    "tokenizer/tokenizer.json",
)
"""Names of the files that NOVA, Harmon and MAR read; `*` also stands for folders. No code is among them."""


def fetch(given: Checkpoint, only: Sequence[str] | None = None) -> Path:
    """Return the local snapshot of a repository on the hub; what is there already is not fetched again.

    `only`: patterns of names instead of `checkpoint.files` or `NEEDED`.

    Raises:
        MargrpoError: as `snapshot`.
    """
    assert given.id is not None
    assert given.revision is not None
    return snapshot("checkpoint.id", given.id, given.revision, list(only or given.files or NEEDED))


def snapshot(key: str, repository: str, revision: str, names: Sequence[str], kind: str = "model") -> Path:
    """Return the local copy of some files of a repository on the hub; what is there is not fetched again.

    Interrupted downloads go on where they stopped; with HF_HUB_OFFLINE=1 only the local cache is used.

    Args:
        key: the param that names the repository. names: patterns of the files' names. kind: model | dataset.

    Raises:
        MargrpoError: the repository or revision does not exist, is private, or cannot be reached.
    """
    from huggingface_hub import snapshot_download  # a second to import

    try:
        folder = snapshot_download(repository, revision=revision, repo_type=kind, allow_patterns=list(names))
    except Exception as error:  # the client lets errors of several libraries through
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise MargrpoError(
            f"{key}: {repository} at revision {revision} cannot be fetched ({reason}); allowed: a "
            "repository on the hub that you can read, or one in the local cache with HF_HUB_OFFLINE=1"
        ) from None
    return Path(folder)


def commit_of(folder: Path) -> str | None:
    """Return the commit that a snapshot of the hub's cache is of, None for another folder."""
    known = folder.parent.name == "snapshots" and re.fullmatch("[0-9a-f]{40}", folder.name)
    return folder.name if known else None


def file_hashes(folder: Path, given: Checkpoint) -> dict[str, str]:
    """Return the hashes of the files in use, by name, checked against `checkpoint.files` and `.sha256`.

    Raises:
        ConfigError: a listed file is missing or has another hash; no file that any model needs is there.
    """
    names = list(given.files) if given.files is not None else needed(folder)
    if not names:
        allowed = "allowed: the folder of a released NOVA, Harmon or MAR checkpoint"
        raise ConfigError.of("checkpoint.path", folder, allowed)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ConfigError.of("checkpoint.files", missing[0], f"allowed: files in {folder}")
    found = {name: checkpoints.sha256(folder / name) for name in sorted(names)}
    for name, digest in (given.files or {}).items():
        if digest not in (None, found[name]):
            raise ConfigError.of(f"checkpoint.files.{name}", digest, f"allowed: its hash {found[name]}")
    check_tree("checkpoint.sha256", given.sha256, folder, found)
    return found


def check_tree(key: str, expected: str | None, folder: Path, hashes: Mapping[str, str]) -> None:
    """Compare the hash of a folder's files with the expected one (None: any); ConfigError if it differs."""
    digest = checkpoints.tree_sha256(hashes)
    if expected not in (None, digest):
        raise ConfigError.of(key, expected, f"allowed: the hash of the files in {folder}, {digest}")


def check_weights(section: str, options: Mapping[str, RewardOptions], required: bool = False) -> None:
    """Compare the weight files of rewards with `files_sha256` in their options; hidden files do not count.

    Args:
        section: the param that holds the options. required: a path without its hash is an error that names it.

    Raises:
        ConfigError: other files than expected, no such folder, a hash without a path.
    """
    for name, given in options.items():
        key = f"{section}.{name}.files_sha256"
        if given.path is None:
            if given.files_sha256 is not None:
                raise ConfigError.of(key, given.files_sha256, "allowed: null without a path")
            continue
        if given.files_sha256 is None and not required:
            continue
        folder = Path(given.path).expanduser()
        if not folder.is_dir():
            raise ConfigError.of(f"{section}.{name}.path", folder, "allowed: a folder with weight files")
        names = [file.relative_to(folder) for file in folder.rglob("*") if file.is_file()]
        visible = [name for name in names if not any(part.startswith(".") for part in name.parts)]
        hashes = {name.as_posix(): checkpoints.sha256(folder / name) for name in visible}
        if given.files_sha256 is None:
            digest = checkpoints.tree_sha256(hashes)
            raise ConfigError.of(key, None, f"allowed with a path: the folder's hash, {digest}")
        check_tree(key, given.files_sha256, folder, hashes)


def needed(folder: Path) -> list[str]:
    """Return the names of a folder's files that a policy may read, sorted."""
    names = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
    return sorted(name for name in names if any(fnmatch(name, pattern) for pattern in NEEDED))
