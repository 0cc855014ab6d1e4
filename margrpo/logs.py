"""The two files a run logs to: metrics.csv (deterministic) and timing.csv (the clock)."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from margrpo.checkpoints import write_atomic


class RowFile:
    """A CSV file that grows by one flushed row at a time; floats keep all digits, NaN and None are empty.

    With path None the rows are kept in memory alone.
    """

    def __init__(
        self, path: Path | None, columns: Sequence[str], rows: Sequence[Mapping[str, float]] = ()
    ) -> None:
        self.path = path
        self.columns = list(columns)
        self.rows: list[dict[str, float]] = []
        if path is not None:
            write_atomic(path, (",".join(self.columns) + "\n").encode())
        for row in rows:
            self.append(row)

    def append(self, row: Mapping[str, float]) -> None:
        """Add a row; a key that is not a column is an error."""
        unknown = set(row) - set(self.columns)
        if unknown:
            raise ValueError(f"columns {sorted(unknown)} are not declared in {self.path}")
        finite = {key: value for key, value in row.items() if math.isfinite(value)}
        self.rows.append(finite)
        if self.path is None:
            return
        with open(self.path, "a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, self.columns, lineterminator="\n").writerow(
                {key: repr(value) for key, value in finite.items()}
            )


TIMING = (
    "update",
    "timestamp_ms",
    "wall_s",
    "core_s",
    "rollout_s",
    "reward_s",
    "update_s",
    "validation_s",
)


def metric_columns(rewards: Sequence[str]) -> list[str]:
    """Return the columns of metrics.csv, equal for all variants (names follow TRL).

    `rewards`: the columns of the rewards (`margrpo.rewards.columns`).
    """
    return [
        "update",
        "reward",
        "reward_std",
        *rewards,
        "frac_reward_zero_std",
        "kl",
        "loss",
        "grad_norm",
        "grad_norm/backbone",
        "grad_norm/head",
        "grad_norm/constant_advantage",
        "clip_ratio",
        "ratio_max_deviation",
        "diversity",
        "validation/reward",
    ]
