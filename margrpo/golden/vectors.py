"""The outcome of comparing one tensor, and the reference vectors of a folder."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from margrpo.errors import MargrpoError


@dataclass
class Check:
    """One compared tensor.

    Attributes:
        name: of the reference tensor. error: largest absolute difference, divided by the largest reference
            magnitude if `relative`. tolerance: what `error` may reach.
        skipped: why the tensor (or part of it) was not compared, else None.
    """

    name: str
    error: float
    tolerance: float
    relative: bool
    skipped: str | None = None


def passed(check: Check) -> bool:
    """Return whether a tensor is inside its tolerance, or was skipped."""
    return check.skipped is not None or check.error <= check.tolerance


class Vectors:
    """Reference tensors by name, and the checks made with them.

    Attributes:
        checks: in the order they were made.
    """

    def __init__(self, file: Path) -> None:
        try:
            self._tensors = load_file(file)
        except (OSError, SafetensorError) as error:
            reason = " ".join(str(error).split())
            raise MargrpoError(f"{file}: not readable reference vectors ({reason})") from None
        self.file = file
        self.checks: list[Check] = []
        self._used: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> Tensor:
        """Return an input; MargrpoError if the folder lacks it."""
        if name not in self._tensors:
            raise MargrpoError(f"{self.file}: no tensor {name}; allowed: a complete golden folder")
        self._used.add(name)
        return self._tensors[name]

    def matching(self, pattern: str) -> list[re.Match[str]]:
        """Return the matches of names that fit a regular expression as a whole, in the order of the file."""
        return [match for name in self._tensors if (match := re.fullmatch(pattern, name))]

    def check(self, name: str, value: Tensor, tolerance: float, relative: bool = True) -> None:
        """Compare a computed tensor with the reference of that name, if the folder has it."""
        if name in self._tensors:
            error = difference(value.detach(), self[name], relative)
            self.checks.append(Check(name, error, tolerance, relative))

    def check_rows(self, name: str, value: Tensor, rows: Tensor, tolerance: float, reason: str) -> None:
        """Compare the rows (bool [N]) of a tensor [N, ..]; the others are listed as skipped."""
        if name in self._tensors:
            error = difference(value.detach()[rows], self[name][rows], relative=True)
            self.checks.append(Check(name, error, tolerance, relative=True))
            if not bool(rows.all()):
                self.skip(f"{name} ({int((~rows).sum())} of {len(rows)} rows)", reason)

    def skip(self, name: str, reason: str) -> None:
        """Record that a tensor is not compared."""
        self._used.add(name)
        self.checks.append(Check(name, math.nan, math.nan, relative=True, skipped=reason))

    def finish(self) -> list[Check]:
        """Return all checks; tensors that nothing read are listed as skipped."""
        for name in self._tensors:
            if name not in self._used:
                self.skip(name, "not known to this version")
        return self.checks


def difference(value: Tensor, expected: Tensor, relative: bool) -> float:
    """Return max |value - expected| (over max |expected|); infinite for other shapes or non-finite values."""
    if value.shape != expected.shape:
        return math.inf
    if expected.numel() == 0:
        return 0.0
    error = float((value.double() - expected.double()).abs().max())
    size = float(expected.double().abs().max())
    if math.isnan(error):
        return math.inf
    return error / size if relative and size > 0 else error


def guidance_scale(name: str, length: int, unknown_after: int) -> Tensor | None:
    """Return the float32 scale that a rollout's name asks for, None if it names none.

    "cfg3_linear": 1 + (3 - 1) (L - m) / L with m tokens unknown after the AR step; "cfg3..": 3 (MAR, section 4).
    """
    found = re.search(r"cfg(\d+(?:\.\d+)?)", name)
    if found is None:
        return None
    scale = torch.tensor(float(found[1]))
    if "linear" not in name:
        return scale
    return 1 + (scale - 1) * (length - torch.tensor(float(unknown_after))) / length


def temperature(name: str) -> float:
    """Return the temperature in a name like "cfg3_T0.9" (default 1)."""
    found = re.search(r"_T(\d+(?:\.\d+)?)$", name)
    return float(found[1]) if found else 1.0
