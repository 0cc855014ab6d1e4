"""Checkpoint files: one safetensors file each, JSON in its header; written atomically, never unpickled."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from margrpo.errors import MargrpoError
from margrpo.policies.base import Policy

SHIPPED = Path(__file__).parent / "data" / "tiny.safetensors"
"""The base policy that comes with the package; `tiny.json` beside it says how it was made."""

_KEY = "margrpo"  # the only key of the header: several would be written in a random order
_FORMAT = 1
# Imported on demand: the real policies need diffusers and transformers, which are slow to import.
_KINDS = {
    "tiny": "margrpo.policies.tiny.TinyPolicy",
    "mar": "margrpo.policies.mar.MarPolicy",
    "harmon": "margrpo.policies.harmon.HarmonPolicy",
    "nova": "margrpo.policies.nova.NovaPolicy",
}


def save_policy(
    policy: Policy, path: Path, provenance: Mapping[str, Any], weights: Mapping[str, Tensor] | None = None
) -> str:
    """Write a policy and return the sha256 of the file; equal contents give equal bytes.

    `provenance`: JSON data about the origin of the weights, kept in the header. `weights`: a state dict to write
    instead of the policy's own.

    Raises MargrpoError if the file cannot be written or the kind of policy has no checkpoint format.
    """
    if policy.kind not in _KINDS:
        kind = type(policy).__name__
        raise MargrpoError(f"policy {kind} has no checkpoint format; allowed: {', '.join(_KINDS)}")
    header = {"kind": policy.kind, "description": policy.describe(), "provenance": dict(provenance)}
    return _write(path, "policy", policy.state_dict() if weights is None else weights, header)


def load_policy(path: Path) -> Policy:
    """Return the policy of a file written by `save_policy`, or of a folder with a released checkpoint.

    Raises MargrpoError for a missing, damaged or foreign file and for tensors that do not fit its header.
    """
    if path.is_dir():
        from margrpo.policies.families import read_released

        return read_released(path)
    tensors, header = _read(path, "policy")
    kind = header.get("kind")
    if kind not in _KINDS:
        allowed = f"{', '.join(_KINDS)} (did a newer version write it?)"
        raise MargrpoError(f"{path}: policy kind {kind!r}; allowed: {allowed}")
    try:
        policy = _policy_class(kind).from_description(header["description"])
    except (MargrpoError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = str(error).splitlines()[0]
        raise MargrpoError(f"{path}: not usable with this version of margrpo: {reason}") from error
    expected = policy.state_dict()
    _check_names(path, set(tensors), set(expected))
    for name, tensor in tensors.items():
        wanted = expected[name]
        if tensor.shape != wanted.shape or tensor.dtype != wanted.dtype:
            raise MargrpoError(
                f"{path}: {name} is {tensor.dtype} {list(tensor.shape)}; "
                f"allowed: {wanted.dtype} {list(wanted.shape)}, as its header describes the policy"
            )
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise MargrpoError(f"{path}: {name} holds NaN or infinity; use an earlier checkpoint")
    policy.load_state_dict(tensors, strict=True, assign=True)  # a policy may have been described on meta
    policy.locate(lambda: path.parent)
    return policy


def sketch_policy(path: Path) -> Policy:
    """Return the policy that a file's header or a folder's config files describe, without its weights."""
    if path.is_dir():
        from margrpo.policies.families import sketch_released

        return sketch_released(path)
    header = read_header(path)
    if header.get("kind") not in _KINDS:
        raise MargrpoError(f"{path}: policy kind {header.get('kind')!r}; allowed: {', '.join(_KINDS)}")
    return _policy_class(header["kind"]).from_description(header["description"])


def _policy_class(kind: str) -> type[Policy]:
    module, name = _KINDS[kind].rsplit(".", 1)
    policy: type[Policy] = getattr(importlib.import_module(module), name)
    return policy


def save_state(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> str:
    """Write named tensors and JSON data (the trainer's resume state); return the sha256 of the file."""
    return _write(path, "state", tensors, dict(meta))


def load_state(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and JSON data of a file written by `save_state`; MargrpoError for any other file."""
    return _read(path, "state")


def read_header(path: Path) -> dict[str, Any]:
    """Return the JSON data of a checkpoint: kind, description and provenance, or the meta of a state."""
    return _header(path, None)


def sha256(path: Path) -> str:
    """Return the hash of a file in hex, of a folder as `tree_sha256` does; MargrpoError if it cannot be read."""
    if path.is_dir():
        names = [file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()]
        return tree_sha256({name: sha256(path / name) for name in names})
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _unreadable(path, error) from error


def tree_sha256(hashes: Mapping[str, str]) -> str:
    """Return the hash of the list of hashes by file name: `sha256sum NAME.. | sha256sum`, names sorted."""
    listed = "".join(f"{hashes[name]}  {name}\n" for name in sorted(hashes))
    return hashlib.sha256(listed.encode()).hexdigest()


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that a reader, also after a crash, sees the old or the new content and nothing between.

    Makes the folder if it is missing. Raises MargrpoError if the file system refuses.
    """
    temporary = path.parent / f".{path.name}.{threading.get_native_id()}.tmp"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # makes the rename itself durable
        finally:
            os.close(folder)
    except OSError as error:
        advice = "free space or choose another path"
        raise MargrpoError(f"{path}: cannot be written ({error.strerror}); {advice}") from error


def _write(path: Path, content: str, tensors: Mapping[str, Tensor], meta: dict[str, Any]) -> str:
    header = {"format": _FORMAT, "content": content, "meta": meta}
    text = json.dumps(header, sort_keys=True, allow_nan=False)
    data = save(_own_storage(tensors), metadata={_KEY: text})
    write_atomic(path, data)
    return hashlib.sha256(data).hexdigest()


def _own_storage(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return CPU tensors that own their whole memory, as the format demands (views and ties are copied)."""
    taken: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        value = tensor.detach().to("cpu").contiguous()
        storage = value.untyped_storage()
        if storage.nbytes() != value.numel() * value.element_size() or storage.data_ptr() in taken:
            value = value.clone()
        taken.add(value.untyped_storage().data_ptr())
        result[name] = value
    return result


def _read(path: Path, content: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    meta = _header(path, content)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            # copies: the mapped file may be replaced while the tensors live
            return {name: file.get_tensor(name).clone() for name in file.keys()}, meta  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error


def _header(path: Path, content: str | None) -> dict[str, Any]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            text = (file.metadata() or {}).get(_KEY, "")
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error
    try:
        header = json.loads(text)
        found, version, meta = header["content"], header["format"], dict(header["meta"])
    except (TypeError, ValueError, KeyError) as error:
        raise MargrpoError(f"{path}: not written by margrpo; allowed: a policy or a state") from error
    if version != _FORMAT:
        raise MargrpoError(f"{path}: format {version}; allowed: {_FORMAT} (use the version that wrote it)")
    if content is not None and found != content:
        raise MargrpoError(f"{path}: holds a {found}; allowed here: a {content}")
    return meta


def _check_names(path: Path, given: set[str], expected: set[str]) -> None:
    problems = {"lacks": sorted(expected - given), "has unknown": sorted(given - expected)}
    listed = [f"{label} {names[0]} ({len(names)} in all)" for label, names in problems.items() if names]
    if listed:
        allowed = f"exactly the {len(expected)} tensors of the policy"
        raise MargrpoError(f"{path}: {', '.join(listed)}; allowed: {allowed}")


def _unreadable(path: Path, error: Exception) -> MargrpoError:
    if isinstance(error, FileNotFoundError):
        return MargrpoError(f"{path}: no such file; allowed: a checkpoint that margrpo wrote")
    reason = " ".join(str(error).split())
    return MargrpoError(f"{path}: not a readable safetensors file ({reason}); if truncated, write it again")
