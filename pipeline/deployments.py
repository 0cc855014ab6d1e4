"""The deployments of `margrpo serve`: forms in Prefect's UI, and the runner that executes what they start.

`python -m pipeline.deployments FILE` serves them; FILE is written once they are there. Import this module only
after `pipeline.reproduce.prepare_prefect`: Prefect reads its settings on import.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from prefect import Flow, get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.deployments.runner import RunnerDeployment
from prefect.exceptions import ObjectAlreadyExists
from prefect.runner import Runner
from prefect.types.entrypoint import EntrypointType

from pipeline import paths
from pipeline.forms import evaluate_checkpoint, pretrain_tiny, reproduce_form
from pipeline.sweeps.flow import ablation_sweep
from pipeline.sweeps.slots import GPU_LIMIT, gpus

RUNS_AT_ONCE = 4  # flow runs; further ones wait for these, as their cells would for a core
_WATCH_SECONDS = 2.0


async def deployments() -> list[RunnerDeployment]:
    """Return the deployments with the choices that params.yaml has now."""
    flows: dict[str, Flow[..., Any]] = {
        "ablation-sweep": ablation_sweep,
        "reproduce": reproduce_form,
        "evaluate-checkpoint": evaluate_checkpoint,
        "pretrain-tiny": pretrain_tiny,
    }
    return [
        await flow.ato_deployment(
            name, description=flow.description, entrypoint_type=EntrypointType.MODULE_PATH
        )
        for name, flow in flows.items()
    ]


async def serve(ready: Path) -> None:
    """Register the deployments and execute their runs until SIGTERM, which cancels those that run."""
    runner = Runner(name="margrpo", limit=RUNS_AT_ONCE, query_seconds=2.0, pause_on_shutdown=False)
    await _limit_gpus()
    for deployment in await deployments():
        await runner.aadd_deployment(deployment)
    watching = asyncio.create_task(_follow_params(runner, ready))
    await runner.start()
    watching.cancel()


async def _follow_params(runner: Runner, ready: Path) -> None:
    """Say that the runner is up; then offer new variants and profiles in the forms when params.yaml changes."""
    while not runner.started:
        await asyncio.sleep(0.1)
    ready.parent.mkdir(parents=True, exist_ok=True)
    ready.touch()
    file = paths.home() / paths.PARAMS
    seen = _stamp(file)
    while True:
        await asyncio.sleep(_WATCH_SECONDS)
        if _stamp(file) != seen:
            seen = _stamp(file)
            for deployment in await deployments():
                await runner.aadd_deployment(deployment)


def _stamp(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


async def _limit_gpus() -> None:
    """Make the limit on cells on GPUs, unless somebody did; its number can be changed in the UI."""
    count = len(gpus())
    if count:
        async with get_client() as client:
            try:
                await client.create_global_concurrency_limit(
                    GlobalConcurrencyLimitCreate(name=GPU_LIMIT, limit=count, active=True)
                )
            except ObjectAlreadyExists:
                return


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
