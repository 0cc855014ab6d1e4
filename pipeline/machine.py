"""What a stage and its machine use, sampled by the follower: MLflow's own monitors, and the stage's process."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import psutil

from pipeline import processes

INTERVAL_SECONDS = 10.0


@dataclass
class Machine:
    """Samples of CPU, memory and GPUs under MLflow's names (`system/...`), at most one in an interval per process."""

    _processes: dict[int, psutil.Process] = field(default_factory=dict)
    _sampled: dict[int, float] = field(default_factory=dict)  # pid -> monotonic seconds
    _monitors: list[Any] | None = None

    def sample(self, process: dict[str, Any]) -> dict[str, float]:
        """Return what the process of a `processes.identity` and this machine use now.

        Empty for a process of another machine or one that is gone, before the interval is over, and for the
        first look: shares of a CPU are those since the last one.
        """
        pid, now = int(process["pid"]), time.monotonic()
        if now - self._sampled.get(pid, -INTERVAL_SECONDS) < INTERVAL_SECONDS or not processes.is_alive(
            process
        ):
            return {}
        self._sampled[pid] = now
        first = pid not in self._processes
        try:
            found = self._processes.setdefault(pid, psutil.Process(pid))
            own = {
                "process_cpu_percentage": found.cpu_percent(),
                "process_memory_megabytes": found.memory_info().rss / 1e6,
            }
        except psutil.Error:
            return {}
        whole = self._whole()
        return {} if first else {f"system/{name}": value for name, value in {**own, **whole}.items()}

    def _whole(self) -> dict[str, float]:
        if self._monitors is None:
            self._monitors = _monitors()
        found: dict[str, float] = {}
        for monitor in self._monitors:
            monitor.collect_metrics()
            found |= monitor.aggregate_metrics()
            monitor.clear_metrics()
        return found


def _monitors() -> list[Any]:
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor

    try:
        return [CPUMonitor(), GPUMonitor()]
    except (ImportError, RuntimeError):  # no nvidia-ml-py, or no GPU
        return [CPUMonitor()]
