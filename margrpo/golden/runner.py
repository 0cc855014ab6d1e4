"""`margrpo verify --golden DIR`: replay a folder of reference vectors of any family and report."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path

from margrpo.golden.vectors import Check, passed
from margrpo.policies.families import family_of


def replay(folder: Path) -> list[Check]:
    """Return the checks of every tensor in a golden folder; MargrpoError if it cannot be replayed."""
    checks: list[Check] = importlib.import_module(f"margrpo.golden.{family_of(folder)}").replay(folder)
    return checks


def verify(folder: Path, as_json: bool = False) -> int:
    """Print name, largest error and tolerance of every tensor; return 0 if all are inside, else 1."""
    checks = replay(folder)
    failed = [check for check in checks if not passed(check)]
    compared = [check for check in checks if check.skipped is None]
    print(_json(folder, checks, failed) if as_json else _table(checks, failed))
    return 0 if compared and not failed else 1


def _table(checks: list[Check], failed: list[Check]) -> str:
    width = max(len(check.name) for check in checks)
    lines = [f"{'tensor':{width}}  max error   tolerance"]
    for check in checks:
        if check.skipped is not None:
            lines.append(f"{check.name:{width}}  skipped: {check.skipped}")
            continue
        kind = "relative" if check.relative else "absolute"
        mark = "" if passed(check) else "  OUTSIDE"
        lines.append(f"{check.name:{width}}  {check.error:9.2e}  {check.tolerance:9.0e} {kind}{mark}")
    skipped = sum(check.skipped is not None for check in checks)
    lines.append(
        f"{len(checks) - skipped} tensors compared, {len(failed)} outside their tolerance, {skipped} skipped"
    )
    return "\n".join(lines)


def _json(folder: Path, checks: list[Check], failed: list[Check]) -> str:
    rows = [
        {
            "name": check.name,
            "error": _finite(check.error),
            "tolerance": _finite(check.tolerance),
            "relative": check.relative,
            "skipped": check.skipped,
            "passed": passed(check),
        }
        for check in checks
    ]
    return json.dumps({"folder": str(folder), "passed": not failed, "checks": rows}, indent=1)


def _finite(value: float) -> float | str | None:
    """Return a number as JSON can hold it: null where there is none, "inf" for a shape or NaN mismatch."""
    if math.isnan(value):
        return None
    return value if math.isfinite(value) else "inf"
