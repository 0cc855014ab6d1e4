"""Finding and reading the originals' weight files: no pickled code, every tensor accounted for."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from margrpo.checkpoints import sha256
from margrpo.errors import MargrpoError

State = dict[str, Tensor]

_BESIDE = ("preprocessor_config.json", "tokenizer.json", "vocab.json", "merges.txt", "vocab.txt")
"""Files of a transformers folder that decide on a score besides its tensors."""

_RECORD: ContextVar[list[Path] | None] = ContextVar("record", default=None)

DERIVED = ("attn_mask", "position_ids")
"""Endings of buffers that some files carry: computed, not learned."""


@contextmanager
def recorded_files() -> Iterator[list[Path]]:
    """Give a list that gets the weight, configuration and tokenizer files which rewards built inside read."""
    files: list[Path] = []
    token = _RECORD.set(files)
    try:
        yield files
    finally:
        _RECORD.reset(token)


def note(*paths: Path) -> None:
    """Say that files are being read, for whoever records it; those that are not there don't count."""
    files = _RECORD.get()
    if files is not None:
        files += [path for path in paths if path.is_file() and path not in files]


def recorded_sha256(files: Iterable[Path]) -> str:
    """Return one hash for files wherever they lie: `sha256sum` of each with its bare name, sorted, hashed."""
    lines = sorted(f"{sha256(file)}  {file.name}\n" for file in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def folder(name: str, path: str | None, repository: str, files: Iterable[str]) -> Path:
    """Return the folder with a reward's files: the given one, or a snapshot of a hub repository.

    Raises MargrpoError if the folder is missing or the hub cannot give the files.
    """
    if path is not None:
        given = Path(path).expanduser()
        if not given.is_dir():
            raise MargrpoError(
                f"reward.options.{name}.path: {given} is no folder; allowed: one with its weights"
            )
        return given
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(repository, allow_patterns=list(files)))
    except (OSError, ValueError, HfHubHTTPError) as error:
        reason = " ".join(str(error).split())[:120]
        raise MargrpoError(
            f"reward {name}: {repository} cannot be had from the hub ({reason}); "
            f"set reward.options.{name}.path to a folder with its files"
        ) from None


def read_state(path: Path) -> State:
    """Return the tensors of a .pt, .pth, .bin or .safetensors file; `state_dict` inside is unwrapped.

    Raises MargrpoError for a missing or damaged file, pickled code, or anything that is not named tensors.
    """
    note(path)
    try:
        if path.suffix == ".safetensors":
            state: Any = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise MargrpoError(f"{path}: no such file; allowed: the original's weight file") from None
    except (OSError, RuntimeError, EOFError, ValueError, SafetensorError, pickle.UnpicklingError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
        raise MargrpoError(f"{path}: not a readable file of tensors ({reason})") from None
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict) or not state or not all(isinstance(v, Tensor) for v in state.values()):
        raise MargrpoError(f"{path}: holds no named tensors; allowed: a state dict")
    return dict(state)


def load_strict(model: nn.Module, state: Mapping[str, Tensor], path: Path) -> None:
    """Put tensors into a model; every one must be there, none may be left over, all shapes must agree.

    Raises MargrpoError with the first name of each kind of difference.
    """
    wanted = model.state_dict()
    lacking = [key for key in wanted if key not in state]
    unknown = [key for key in state if key not in wanted]
    other = [key for key in wanted if key in state and wanted[key].shape != state[key].shape]
    problems = []
    for label, keys in (("lacks", lacking), ("has unknown", unknown), ("has another shape of", other)):
        if keys:
            problems.append(f"{label} {keys[0]} ({len(keys)} in all)")
    if problems:
        raise MargrpoError(
            f"{path}: {'; '.join(problems)}; allowed: the {len(wanted)} tensors of the original"
        )
    model.load_state_dict(dict(state), strict=True)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file; raises MargrpoError if there is none."""
    note(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MargrpoError(f"{path}: no such file; allowed: the original's configuration") from None
    except (OSError, ValueError) as error:
        raise MargrpoError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(content, dict):
        raise MargrpoError(f"{path}: not a JSON object")
    return content


def hf_model(folder: Path, config: str, model: str, ties: Mapping[str, str] | None = None) -> Any:
    """Return a model of a transformers folder: float32, evaluation mode, no gradients, every tensor loaded.

    Args:
        config, model: names of the classes in transformers. ties: tensors that files may leave out -> the
            ones that they equal.

    Raises:
        MargrpoError: a file is missing, or its tensors are not those of the configuration.
    """
    note(*(folder / name for name in _BESIDE))
    built = build(config, model, read_json(folder / "config.json"), folder / "config.json")
    path = folder / "model.safetensors"
    path = path if path.is_file() else folder / "pytorch_model.bin"
    state = {key: value for key, value in read_state(path).items() if not key.endswith(DERIVED)}
    for tied, source in (ties or {}).items():
        if source in state:
            state.setdefault(tied, state[source])
    load_strict(built, state, path)
    return built.float().eval().requires_grad_(False)


def build(config: str, model: str, record: Mapping[str, Any], path: Path) -> Any:
    """Return an unloaded model of transformers for a configuration; `path` is named if that is none."""
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    try:
        return getattr(transformers, model)(getattr(transformers, config).from_dict(dict(record)))
    except (KeyError, TypeError, ValueError, StrictDataclassError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise MargrpoError(f"{path}: no {config} ({reason})") from None
