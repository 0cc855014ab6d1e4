"""Golden folders that come with a manifest (NOVA): `golden.safetensors` and `manifest.json`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from margrpo.errors import MargrpoError
from margrpo.golden.vectors import Check
from margrpo.policies.released import read_json


class Golden:
    """The tensors of a golden folder, and the checks made with them.

    Args:
        folder: holds golden.safetensors and manifest.json.

    Raises:
        MargrpoError: a file is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: dict[str, Any] = read_json(folder / "manifest.json")
        self.info: dict[str, Any] = self.manifest.get("info", {})
        path = folder / "golden.safetensors"
        try:
            self.tensors: dict[str, Tensor] = load_file(path)
        except (OSError, SafetensorError) as error:
            raise MargrpoError(f"{path}: not readable ({error}); copy the folder again") from error
        self.checks: list[Check] = []
        self._seen: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def has(self, *names: str) -> bool:
        """Return whether all of these tensors are there."""
        return all(name in self.tensors for name in names)

    def number(self, name: str, pattern: str, default: float) -> float:
        """Return the number that `pattern` finds in how a tensor was made."""
        match = re.search(pattern, self.manifest["tensors"].get(name, {}).get("how", ""))
        return float(match[1]) if match else default

    def close(self, name: str, value: Tensor, atol: float = 2e-5, rtol: float = 1e-4) -> None:
        """Check |value - golden| <= atol + rtol |golden|; the error shown is scaled to compare with atol."""
        if name in self.tensors:
            self.compare(name, value, self.tensors[name], atol, rtol)

    def compare(self, name: str, value: Tensor, golden: Tensor, atol: float, rtol: float) -> None:
        """Check numbers that are no tensor of the file."""
        self._seen.add(name)
        value, golden = value.detach().double().cpu(), golden.double()
        if value.shape != golden.shape:
            self.checks.append(Check(name, float("inf"), atol, False))
            return
        relative = atol == 0.0
        scale = golden.abs() if relative else 1 + golden.abs() * (rtol / atol)
        self._add(name, (value - golden).abs() / scale, rtol if relative else atol, relative)

    def of_maximum(self, name: str, value: Tensor, tolerance: float, golden: Tensor | None = None) -> None:
        """Check |value - golden| <= tolerance * max |golden|; `golden` replaces the file's tensor."""
        if name not in self.tensors:
            return
        self._seen.add(name)
        golden = (self.tensors[name] if golden is None else golden).double()
        value = value.detach().double().cpu()
        if value.shape != golden.shape:
            self.checks.append(Check(name, float("inf"), tolerance, True))
            return
        self._add(name, (value - golden).abs() / golden.abs().max(), tolerance, True)

    def equal(self, name: str, value: Tensor) -> None:
        """Check that values (usually integers) are the same."""
        if name in self.tensors:
            self.compare(name, value, self.tensors[name], 1e-12, 0.0)

    def gradients(self, name: str, parameters: Mapping[str, nn.Parameter]) -> None:
        """Check a loss's stored gradients, the norms of all, and that parameters without a norm have none."""
        gradients = {
            key: torch.zeros_like(value) if value.grad is None else value.grad
            for key, value in parameters.items()
        }
        for key, gradient in gradients.items():
            self.close(f"{name}.grad.{key}", gradient, atol=5e-7)
        norms = self.info.get(f"grad_norm.{name}")
        if norms is None:
            return
        ours = [gradients[key].norm() if key in gradients else torch.tensor(torch.nan) for key in norms]
        golden = torch.tensor(list(norms.values()))
        self.compare(f"info.grad_norm.{name}", torch.stack(ours), golden, 5e-7, 1e-4)
        others = [gradient.abs().max() for key, gradient in gradients.items() if key not in norms]
        if others:
            largest = torch.stack(others).max()
            self.compare(f"info.grad_norm.{name} (others: none)", largest, torch.zeros(()), 1e-30, 0.0)

    def skip(self, name: str, reason: str) -> None:
        """Record a part that is not compared, and why."""
        self.checks.append(Check(name, 0.0, 0.0, False, reason))

    def finish(self) -> list[Check]:
        """Return all checks; outputs that nothing compared are listed as skipped."""
        for name, entry in sorted(self.manifest.get("tensors", {}).items()):
            if entry.get("kind") == "output" and name not in self._seen:
                self.skip(name, "not known to this version of margrpo")
        return self.checks

    def _add(self, name: str, errors: Tensor, tolerance: float, relative: bool) -> None:
        # a NaN anywhere must fail, also where max would drop it
        error = float(torch.nan_to_num(errors, nan=float("inf")).max()) if errors.numel() else 0.0
        self.checks.append(Check(name, error, tolerance, relative))
