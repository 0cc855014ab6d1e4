"""The base policy that a study starts from: shipped, pretrained here, a file, or a released checkpoint."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from margrpo import checkpoints, hub
from margrpo.config import Config
from margrpo.errors import ConfigError
from margrpo.policies.base import Policy


def write_base(config: Config, out: Path, progress: bool = True) -> str:
    """Write the base policy of `checkpoint.source` to `out` and return its sha256.

    The header of a released checkpoint's file says where it is from: repository, commit, hashes of its files.

    Raises:
        ConfigError: the file or folder is missing, or a hash differs.
    """
    given = config.checkpoint
    if given.source == "pretrain":
        from margrpo.pretrain import pretrain

        provenance = {"source": "pretrain", "settings": config.pretrain.model_dump()}
        return checkpoints.save_policy(pretrain(config.pretrain, progress=progress), out, provenance)
    found = find_base(config)
    if found.is_file():
        checkpoints.load_policy(found)
        checkpoints.write_atomic(out, found.read_bytes())
        return checkpoints.sha256(out)
    origin: dict[str, Any] = {"source": given.source, "files": hub.file_hashes(found, given)}
    if given.source == "hub":
        origin |= {"id": given.id, "revision": given.revision, "commit": hub.commit_of(found)}
    return checkpoints.save_policy(checkpoints.load_policy(found), out, origin)


def find_base(config: Config) -> Path:
    """Return the file or folder of source `shipped`, `path` or `hub`, its hashes checked.

    Raises:
        ConfigError: it is missing or has another hash, or the source makes its file first (`pretrain`).
    """
    given = config.checkpoint
    if given.source == "pretrain":
        allowed = (
            "allowed: shipped | path | hub here; `margrpo pretrain --out FILE` makes a file for source path"
        )
        raise ConfigError.of("checkpoint.source", given.source, allowed)
    if given.source == "hub":
        found = hub.fetch(given)
        warn_unpinned(config, hub.commit_of(found))
    else:
        found = checkpoints.SHIPPED if given.path is None else Path(given.path).expanduser()
    if found.is_dir():
        hub.file_hashes(found, given)
        return found
    if not found.is_file():
        raise ConfigError.of("checkpoint.path", found, "allowed: an existing checkpoint file or folder")
    digest = checkpoints.sha256(found)
    if given.sha256 not in (None, digest):
        raise ConfigError.of("checkpoint.sha256", given.sha256, f"allowed: the hash of {found}, {digest}")
    return found


def warn_unpinned(config: Config, commit: str | None) -> None:
    """Say on stderr that a tag or branch of the hub can move, and which commit it is now."""
    revision = config.checkpoint.revision
    if revision is not None and not re.fullmatch("[0-9a-f]{40}", revision):
        print(
            f"margrpo: warning: checkpoint.revision {revision} can move and DVC would not notice; pin the commit"
            f"{f' {commit}' if commit else ''}",
            file=sys.stderr,
            flush=True,
        )


def released_folder(config: Config) -> Path | None:
    """Return the folder of the released checkpoint that the params name, None if they name none."""
    given = config.checkpoint
    if given.source == "hub":
        return hub.fetch(given)
    folder = None if given.path is None else Path(given.path).expanduser()
    return folder if folder is not None and folder.is_dir() else None


def sketch_base(config: Config) -> Policy:
    """Return the base policy without weights, from config files or a header alone; see `find_base`."""
    given = config.checkpoint
    if given.source == "pretrain":
        from margrpo.policies.tiny import TinyPolicy

        return TinyPolicy(config.pretrain.architecture)
    if given.source == "hub":
        return checkpoints.sketch_policy(hub.fetch(given, ["*.json"]))
    found = checkpoints.SHIPPED if given.path is None else Path(given.path).expanduser()
    if not found.exists():
        raise ConfigError.of("checkpoint.path", found, "allowed: an existing checkpoint file or folder")
    return checkpoints.sketch_policy(found)


def base_sha256(config: Config, found: Path) -> str:
    """Return the `checkpoint.sha256` that a file or folder at `checkpoint.path` has."""
    if found.is_file():
        return checkpoints.sha256(found)
    unchecked = config.checkpoint.model_copy(update={"sha256": None})
    return checkpoints.tree_sha256(hub.file_hashes(found, unchecked))
