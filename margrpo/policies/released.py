"""Released weight files: strict names and shapes before anything is allocated, nothing executed."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from margrpo.errors import MargrpoError

Reader = Callable[[], Tensor]


class Cause(NamedTuple):
    """What a mismatch probably comes from: part of a parameter's name -> config values.

    Attributes:
        part: text in the name. names: behind missing or unknown tensors. shape: behind another shape.
    """

    part: str
    names: str
    shape: str


class Weights:
    """Names and shapes of a state dict on disk; tensors are read only on request.

    Attributes:
        source: what messages call it.
        shapes: name -> shape.
    """

    def __init__(self, source: Path, shapes: Mapping[str, list[int]], readers: Mapping[str, Reader]) -> None:
        self.source = source
        self.shapes = dict(shapes)
        self._readers = dict(readers)

    def read(self, name: str) -> Tensor:
        """Return one tensor as float32 with memory of its own.

        Raises:
            MargrpoError: it is not numeric, or holds NaN or infinity.
        """
        try:
            tensor = self._readers[name]()
        except (OSError, SafetensorError, RuntimeError) as error:
            raise _unreadable(self.source, error) from None
        if not tensor.is_floating_point():
            raise MargrpoError(f"{self.source}: {name} is {tensor.dtype}; allowed: floating point weights")
        value = tensor.to(torch.float32, copy=True)
        if not bool(value.isfinite().all()):
            raise MargrpoError(f"{self.source}: {name} holds NaN or infinity; download the file again")
        return value

    def select(self, prefix: str) -> Weights:
        """Return the tensors whose names start with `prefix`, without it."""
        names = {name: name.removeprefix(prefix) for name in self.shapes if name.startswith(prefix)}
        return self._renamed(names)

    def rename(self, change: Callable[[str], str]) -> Weights:
        """Return the same tensors under changed names."""
        return self._renamed({name: change(name) for name in self.shapes})

    def without(self, names: Sequence[str]) -> Weights:
        """Return the tensors but those in `names`."""
        return self._renamed({name: name for name in self.shapes if name not in names})

    def _renamed(self, names: Mapping[str, str]) -> Weights:
        shapes = {new: self.shapes[old] for old, new in names.items()}
        return Weights(self.source, shapes, {new: self._readers[old] for old, new in names.items()})


def open_weights(path: Path) -> Weights:
    """Return the weights of a .safetensors file, its .index.json of shards, or a .pth / .ckpt state dict.

    Of a MAR-style training checkpoint `model_ema` is taken, else `model`. Pickles are read with
    `weights_only=True`: nothing in them is executed.

    Raises:
        MargrpoError: missing, truncated or foreign file, missing shard.
    """
    if not path.is_file():
        raise MargrpoError(f"{path}: no such file; allowed: a weight file of the released model")
    if path.name.endswith(".index.json"):
        return _open_shards(path)
    return _open_safetensors(path) if path.suffix == ".safetensors" else _open_pickle(path)


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object; MargrpoError if the file is missing or anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise MargrpoError(f"{path}: not a readable JSON file ({_one_line(error)})") from None
    if not isinstance(value, dict):
        raise MargrpoError(f"{path}: a JSON {type(value).__name__}; allowed: an object")
    return value


def load_strictly(module: nn.Module, weights: Weights, causes: Sequence[Cause] = ()) -> None:
    """Give a module built on the meta device its weights, after every name and shape was checked.

    Raises:
        MargrpoError: missing, unexpected or misshaped tensors: the first few and the probable config value.
    """
    expected = {name: list(value.shape) for name, value in module.state_dict().items()}
    check_shapes(weights, expected, causes)
    module.load_state_dict({name: weights.read(name) for name in expected}, strict=True, assign=True)


def check_shapes(weights: Weights, expected: Mapping[str, list[int]], causes: Sequence[Cause] = ()) -> None:
    """Compare names and shapes with what the config describes; see `load_strictly`."""
    given = weights.shapes
    missing = [name for name in expected if name not in given]
    unexpected = [name for name in given if name not in expected]
    wrong = [name for name in expected if name in given and given[name] != expected[name]]
    problems = [
        f"{label} {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
        for label, names in (("lacks", missing), ("has unknown", unexpected))
        if names
    ]
    if wrong:
        name = wrong[0]
        problems.append(
            f"{name} is {given[name]} instead of {expected[name]} ({len(wrong)} with another shape)"
        )
    if not problems:
        return
    first = (wrong + missing + unexpected)[0]
    cause = next((cause for cause in causes if cause.part in first), None)
    keys = "the architecture" if cause is None else (cause.shape if wrong else cause.names)
    raise MargrpoError(f"{weights.source}: {'; '.join(problems)}; check {keys} in config.json")


def _open_safetensors(path: Path) -> Weights:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            shapes = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from None

    def reader(name: str) -> Reader:
        def read() -> Tensor:
            with safe_open(path, framework="pt", device="cpu") as file:
                return file.get_tensor(name)

        return read

    return Weights(path, shapes, {name: reader(name) for name in shapes})


def _open_shards(path: Path) -> Weights:
    placed = read_json(path).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(name, str) for name in placed.values()):
        raise MargrpoError(f"{path}: no weight_map of tensor names to shard files")
    shards = {}
    for name in sorted(set(placed.values())):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise MargrpoError(f"{path}: shard {name!r}; allowed: .safetensors files beside the index")
        shards[name] = open_weights(path.parent / name)
    stray = [tensor for tensor, shard in placed.items() if tensor not in shards[shard].shapes]
    if stray:
        raise MargrpoError(f"{path}: {stray[0]} is not in {placed[stray[0]]}; download the shards again")
    return Weights(
        path,
        {tensor: shards[shard].shapes[tensor] for tensor, shard in placed.items()},
        {tensor: shards[shard]._readers[tensor] for tensor, shard in placed.items()},
    )


def _open_pickle(path: Path) -> Weights:
    try:
        # mapped: of a training checkpoint's two copies only the one in use is read
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError:
        # torch's own message is long and advises to load without protection
        reason = "holds more than tensors, or is no checkpoint at all; nothing in it was executed"
        raise MargrpoError(f"{path}: {reason}; get the file from its original source") from None
    except Exception as error:  # a damaged pickle raises whatever its reader trips over
        raise _unreadable(path, error) from None
    for key in ("model_ema", "model"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
    ):
        raise MargrpoError(
            f"{path}: not a state dict; allowed: tensors by name, or model / model_ema with them"
        )
    tensors: dict[str, Tensor] = content

    def reader(name: str) -> Reader:
        return lambda: tensors[name]

    return Weights(
        path,
        {name: list(value.shape) for name, value in tensors.items()},
        {name: reader(name) for name in tensors},
    )


def _unreadable(path: Path, error: Exception) -> MargrpoError:
    return MargrpoError(f"{path}: not a readable weight file ({_one_line(error)}); download it again")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
