"""The reports: `build` reads the runs of a study under reports/; `build_sweep` is given the cells of a sweep."""

from __future__ import annotations

from pipeline.report.build import build
from pipeline.report.sweep import SweptCell, build_sweep

__all__ = ["SweptCell", "build", "build_sweep"]
