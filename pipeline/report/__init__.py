"""The report of a study: `build` reads the runs under reports/ and writes the report beside them."""

from __future__ import annotations

from pipeline.report.build import build

__all__ = ["build"]
