"""The training loop: updates, validations, logs, checkpoints, and resuming after any fault."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from margrpo import rewards
from margrpo.checkpoints import load_state, read_header, save_policy, save_state, write_atomic
from margrpo.config import Config
from margrpo.errors import MargrpoError, RewardError, TrainingError
from margrpo.grids import sheet_png
from margrpo.logs import TIMING, RowFile, metric_columns
from margrpo.progress import Progress, say
from margrpo.prompts import Prompt
from margrpo.updater import Updater

SNAPSHOTS = ("last", "best", "milestone")
GRIDS = "validation"
"""Folder, below that of the checkpoints, of the images of every validation: `<update>.png`."""
_PATIENCE = 10  # updates without any learning signal before training stops


@dataclass(frozen=True)
class TrainResult:
    """Facts about a finished run; deterministic for a seed and machine."""

    run: str
    variant: str
    seed: int
    updates: int
    base_sha256: str
    last_sha256: str
    best_sha256: str
    best_update: int
    best_validation_reward: float


def train(
    config: Config,
    variant: str,
    seed: int,
    base: Path,
    prompts: Mapping[str, list[Prompt]],
    out: Path,
    logs: Path,
    resume: Path | None = None,
    progress: bool = True,
) -> TrainResult:
    """Train one variant with one seed and write its checkpoints and logs.

    Args:
        base: checkpoint of the base policy. prompts: "train" and "validation".
        out: folder for last, best and milestone.safetensors, and the folder `validation` of sample grids.
        logs: folder for metrics.csv, timing.csv, summary.json.
        resume: file that holds the state while training; if it is there, training goes on from it. Its name
            must depend on everything that the result depends on. Removed at the end.

    Raises:
        TrainingError: non-finite numbers, no learning signal at all, or a reward that gives no scores any
            more (then the state of the last finished update is saved); says where the last good state is.
    """
    updater = Updater(config, variant, seed, base, prompts["train"], prompts["validation"])
    return _Loop(updater, out, logs, resume).run(progress)


class _Loop:
    """The state of a run between updates: what a resume file holds."""

    def __init__(self, updater: Updater, out: Path, logs: Path, resume: Path | None) -> None:
        self.updater, self.out, self.logs, self.resume = updater, out, logs, resume
        self.snapshots: dict[str, dict[str, Tensor]] = {}
        self.grids: dict[int, bytes] = {}  # PNG by update
        self.best: dict[str, float] = {"update": 0, "reward": -math.inf}
        self.done = 0
        self.flat = 0  # updates in a row without any signal
        self.unvalidated: dict[str, float] | None = None  # row of an update whose validation is still to come
        rows: dict[str, list[dict[str, float]]] = {"metrics": [], "timing": []}
        if resume is not None and resume.is_file():
            rows = self._restore(resume)
        self.core_offset = rows["timing"][-1]["core_s"] if rows["timing"] else 0.0
        self.wall_offset = rows["timing"][-1]["wall_s"] if rows["timing"] else 0.0
        columns = metric_columns(rewards.columns(list(updater.config.reward.weights)))
        folder = logs if updater.workers.main else None  # other processes of a distributed run only compute
        self.metrics = RowFile(folder and folder / "metrics.csv", columns, rows["metrics"])
        self.timing = RowFile(folder and folder / "timing.csv", TIMING, rows["timing"])
        if updater.workers.main:
            for old in (out / GRIDS).glob("*.png"):
                old.unlink()
            for update, picture in self.grids.items():
                write_atomic(_grid(out, update), picture)

    def run(self, progress: bool) -> TrainResult:
        updater, train = self.updater, self.updater.config.train
        core, wall = time.process_time(), time.perf_counter()
        name = f"{updater.variant}-{updater.seed}"
        with Progress(name, train.updates, self.done, progress and updater.workers.main) as bar:
            for update in range(self.done + 1, train.updates + 1):
                row = self._update(update)
                self.metrics.append(row)
                self.timing.append(
                    {
                        "update": update,
                        "timestamp_ms": time.time_ns() // 1_000_000,
                        "wall_s": round(self.wall_offset + time.perf_counter() - wall, 3),
                        "core_s": round(self.core_offset + time.process_time() - core, 3),
                        **{key: round(value, 4) for key, value in updater.seconds.items()},
                    }
                )
                self.done = update
                self._watch(row)
                bar.show(update, row)
                if update % train.checkpoint_every == 0 or update == train.updates:
                    self._save()
        return self._finish(name)

    def _update(self, update: int) -> dict[str, float]:
        train = self.updater.config.train
        validates = update % train.validation_every == 0 or update == train.updates
        self.updater.seconds = {}
        try:
            row = self.unvalidated or self.updater.update(update, validates)
            if validates:
                self.unvalidated = row
                row = {**row, "validation/reward": self.updater.validate()}
                self.unvalidated = None
        except RewardError as error:
            self._save()  # nothing was changed since the last update, or since the one to validate
            raise TrainingError(f"{error}; {self._last_good()}") from None
        except TrainingError as error:
            raise TrainingError(f"{error}; {self._last_good()}") from None
        if validates:
            reward = row["validation/reward"]
            if reward > self.best["reward"]:
                self.best = {"update": update, "reward": reward}
                self.snapshots["best"] = self.updater.models.chosen()
            if self.updater.workers.main:
                self._draw(update)
        if update == train.milestone:
            self.snapshots["milestone"] = self.updater.models.chosen()
        return row

    def _watch(self, row: Mapping[str, float]) -> None:
        """Warn about weak reward signals; stop when there has been none at all for a while."""
        if row["frac_reward_zero_std"] > 0.5:
            share = 100 * row["frac_reward_zero_std"]
            say(
                f"warning: update {row['update']}: {share:.0f} % of the groups have equal rewards (no signal)"
            )
        silent = row["frac_reward_zero_std"] == 1.0 and row["grad_norm"] == 0.0
        self.flat = self.flat + 1 if silent else 0
        if self.flat >= _PATIENCE:
            name = f"{self.updater.variant}-{self.updater.seed}"
            raise TrainingError(
                f"{name}: every group had equal rewards and the gradient was 0 for {_PATIENCE} updates "
                f"(until {row['update']}); use another reward or more images per prompt"
            )

    def _draw(self, update: int) -> None:
        """Write the images of this update's validation; they were sampled for its reward."""
        images, prompts = self.updater.validated, self.updater.validation_prompts
        assert images is not None
        groups = [(prompt.category, prompt.seen) for prompt in prompts]
        self.grids[update] = sheet_png([prompt.text for prompt in prompts], groups, images)
        write_atomic(_grid(self.out, update), self.grids[update])

    def _finish(self, name: str) -> TrainResult:
        updater = self.updater
        now = updater.models.chosen()
        weights = {"last": now, "milestone": now, **self.snapshots}
        hashes = {}
        provenance = {"run": name, "base_sha256": updater.base_sha256, "updates": self.done}
        for snapshot in SNAPSHOTS:
            updater.models.set_weights(weights[snapshot])
            file, facts = self.out / f"{snapshot}.safetensors", provenance | {"snapshot": snapshot}
            export = partial(save_policy, updater.policy, file, facts, updater.models.export())
            hashes[snapshot] = updater.workers.on_main(export)
        result = TrainResult(
            run=name,
            variant=updater.variant,
            seed=updater.seed,
            updates=self.done,
            base_sha256=updater.base_sha256,
            last_sha256=hashes["last"],
            best_sha256=hashes["best"],
            best_update=int(self.best["update"]),
            best_validation_reward=self.best["reward"],
        )
        if updater.workers.main:
            write_atomic(self.logs / "summary.json", (json.dumps(asdict(result), indent=2) + "\n").encode())
            if self.resume is not None:
                self.resume.unlink(missing_ok=True)
        return result

    def _last_good(self) -> str:
        if self.resume is None or not self.resume.is_file():
            return "no resume state was written yet"
        meta: dict[str, Any] = read_header(self.resume)
        update = meta["done"] + (meta["unvalidated"] is not None)
        return f"the last good state is {self.resume} (update {update}); the same command goes on from it"

    def _save(self) -> None:
        """Write the resume state, if this run keeps one and there is something to keep."""
        started = self.done > 0 or self.unvalidated is not None
        if self.resume is None or not started or not self.updater.workers.main:
            return
        tensors = {f"policy/{name}": value for name, value in self.updater.models.weights().items()}
        average = self.updater.models.average or {}
        tensors |= {f"average/{name}": value for name, value in average.items()}
        for label, weights in self.snapshots.items():
            tensors |= {f"snapshot/{label}/{name}": value for name, value in weights.items()}
        for index, state in self.updater.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer/{index}/{name}": value for name, value in state.items()}
        for update, picture in self.grids.items():
            tensors[f"grid/{update}"] = torch.frombuffer(bytearray(picture), dtype=torch.uint8)
        meta = {
            "done": self.done,
            "flat": self.flat,
            "best": None if math.isinf(self.best["reward"]) else self.best,
            "unvalidated": self.unvalidated and _without_nan(self.unvalidated),
            "rows": {"metrics": self.metrics.rows, "timing": self.timing.rows},
        }
        save_state(self.resume, tensors, meta)

    def _restore(self, path: Path) -> dict[str, list[dict[str, float]]]:
        tensors, meta = load_state(path)
        policy: dict[str, Tensor] = {}
        average: dict[str, Tensor] = {}
        moments: dict[int, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            kind, rest = key.split("/", 1)
            if kind == "policy":
                policy[rest] = value
                continue
            if kind == "average":
                average[rest] = value
                continue
            if kind == "grid":
                self.grids[int(rest)] = value.numpy().tobytes()
                continue
            label, name = rest.split("/", 1)
            if kind == "snapshot":
                self.snapshots.setdefault(label, {})[name] = value
            else:
                moments.setdefault(int(label), {})[name] = value
        optimizer = self.updater.optimizer.state_dict()
        names = self.updater.models.trainable().keys()
        averaged = names if self.updater.models.average is not None else {}
        if policy.keys() != names or len(moments) != len(names) or average.keys() != set(averaged):
            raise MargrpoError(f"{path}: resume state of another run; remove the file to start anew")
        self.updater.models.set_weights(policy)
        self.updater.models.average = average or None
        self.updater.optimizer.load_state_dict({**optimizer, "state": moments})
        self.done, self.flat = meta["done"], meta["flat"]
        self.best = meta["best"] or self.best
        row = meta["unvalidated"]
        self.unvalidated = row and {key: math.nan if value is None else value for key, value in row.items()}
        rows: dict[str, list[dict[str, float]]] = meta["rows"]
        last = self.done + (row is not None)
        say(f"resuming {self.updater.variant}-{self.updater.seed} after update {last}")
        return rows


def _without_nan(row: Mapping[str, float]) -> dict[str, float | None]:
    return {key: value if math.isfinite(value) else None for key, value in row.items()}


def _grid(out: Path, update: int) -> Path:
    return out / GRIDS / f"{update:06d}.png"


def single_thread() -> None:
    """Use one torch thread: two per process are slower than one when the cores are busy."""
    torch.set_num_threads(1)
