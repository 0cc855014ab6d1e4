"""The base policy that a study starts from: shipped with the package, pretrained here, or a file."""

from __future__ import annotations

from pathlib import Path

from margrpo.config import Config
from margrpo.errors import ConfigError


def write_base(config: Config, out: Path, progress: bool = True) -> str:
    """Write the base policy of `checkpoint.source` to `out` and return its sha256.

    Raises:
        ConfigError: the file of source `path` is missing, or its hash is not `checkpoint.sha256`.
    """
    from margrpo import checkpoints

    if config.checkpoint.source == "pretrain":
        from margrpo.pretrain import pretrain

        provenance = {"source": "pretrain", "settings": config.pretrain.model_dump()}
        return checkpoints.save_policy(pretrain(config.pretrain, progress=progress), out, provenance)
    file = find_base(config)
    checkpoints.write_atomic(out, file.read_bytes())
    return checkpoints.sha256(out)


def find_base(config: Config) -> Path:
    """Return the checkpoint file of source `shipped` or `path`, checked against `checkpoint.sha256`.

    Raises:
        ConfigError: the file is missing or has another hash, or the source makes its file first (`pretrain`).
    """
    from margrpo import checkpoints

    given = config.checkpoint
    if given.source == "pretrain":
        allowed = "allowed: shipped | path here; `margrpo pretrain --out FILE` makes a file for source path"
        raise ConfigError.of("checkpoint.source", given.source, allowed)
    file = checkpoints.SHIPPED if given.path is None else Path(given.path).expanduser()
    if not file.is_file():
        raise ConfigError.of("checkpoint.path", file, "allowed: an existing checkpoint file")
    found = checkpoints.sha256(file)
    if given.sha256 not in (None, found):
        raise ConfigError.of("checkpoint.sha256", given.sha256, f"allowed: the hash of {file}, {found}")
    checkpoints.load_policy(file)
    return file
