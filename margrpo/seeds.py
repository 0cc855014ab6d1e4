"""Seeds as a function of names: every random draw of the project starts here."""

from __future__ import annotations

import hashlib
import json
import operator

import torch


def derive(*parts: str | int) -> int:
    """Return a seed in [0, 2**63) from the sha256 of the parts; "1" and 1 differ, as do "ab" and "a", "b".

    Raises TypeError for a part that is neither text nor an integer.
    """
    encoded = json.dumps([part if isinstance(part, str) else operator.index(part) for part in parts])
    return int.from_bytes(hashlib.sha256(encoded.encode()).digest()[:8], "big") >> 1


def generator(*parts: str | int) -> torch.Generator:
    """Return a CPU generator seeded by `derive(*parts)` (torch's Mersenne Twister uses its low 32 bits)."""
    return torch.Generator().manual_seed(derive(*parts))
