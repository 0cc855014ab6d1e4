"""The flows behind the other forms of Prefect's UI: reproduce, evaluate a checkpoint, pretrain the tiny policy.

Import this module only after `pipeline.reproduce.prepare_prefect`: Prefect reads its settings on import.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from prefect import flow, get_run_logger, runtime
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from margrpo.errors import ConfigError, MargrpoError
from margrpo.params import explain
from pipeline import flows, jobs, paths
from pipeline.children import Children, stage_environment, worth_reading
from pipeline.reproduce import workspace_for
from pipeline.sweeps.form import PLAIN, offer_profiles

_Form = TypeVar("_Form", bound="Form")


class Form(BaseModel):
    """What all forms have: a profile and single changes on top of params.yaml."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    profile: str = Field(
        PLAIN,
        title="Policy and sizes",
        json_schema_extra=offer_profiles,
        description="A profile of params.yaml; none = params.yaml as it is.",
    )
    changes: list[str] = Field(
        [],
        title="Changes",
        max_length=100,
        description="KEY=VALUE, as --set of the command line: train.updates=100.",
    )

    def options(self) -> list[str]:
        """Return the options of the command line that mean the same."""
        profile = [] if self.profile == PLAIN else ["--profile", self.profile]
        return [*profile, *(part for change in self.changes for part in ("--set", change))]


class Reproduction(Form):
    """Bring the study up to date; with a profile or changes in a scratch clone, else in the project itself."""

    workers: int | None = Field(
        None, ge=1, le=1024, title="Workers", description="Stages side by side; None = one a core."
    )


class Checkpoint(Form):
    """Evaluate a policy on the held-out test prompts."""

    checkpoint: str = Field(
        min_length=1,
        title="Checkpoint",
        description="A file that train or pretrain wrote: artifacts/runs/grpo-0/last.safetensors.",
    )
    out: str = Field(
        "artifacts/manual/evaluation", min_length=1, title="Folder", description="Folder for the results."
    )


class Pretraining(Form):
    """Pretrain the embedded tiny policy on rendered scenes."""

    out: str = Field(
        "artifacts/manual/pretrained.safetensors",
        pattern=r"\.safetensors$",
        title="File",
        description="Checkpoint to write; checkpoint.source: path then starts from it.",
    )


def _read(form: _Form | dict[str, Any], model: type[_Form]) -> _Form:
    try:
        return form if isinstance(form, model) else model.model_validate(form)
    except ValidationError as error:
        raise ConfigError(explain(error, model)) from None


@flow(name="reproduce-study", validate_parameters=False)
def reproduce_form(form: Reproduction = Reproduction()) -> State[Any]:  # noqa: B008 (Prefect reads the default)
    """Run the experiment of params.yaml: every stage that is not up to date, up to the report."""
    project = paths.home()
    try:
        given = _read(form, Reproduction)
        profile = None if given.profile == PLAIN else given.profile
        with workspace_for(project, project / paths.PARAMS, given.changes, profile) as (_, workspace):
            workers = given.workers or len(os.sched_getaffinity(0))
            state: State[Any] = flows.reproduce(workspace, workers, return_state=True)
    except MargrpoError as error:
        return _refused(error)
    if not state.is_completed():
        return Failed(message=state.message)
    return Completed(message=f"the report is {workspace / paths.REPORT}")


@flow(name="evaluate-checkpoint", validate_parameters=False)
def evaluate_checkpoint(form: Checkpoint) -> State[Any]:
    """Evaluate one policy on the held-out test prompts; numbers and sample grid become artifacts."""
    try:
        given = _read(form, Checkpoint)
        out = paths.home() / given.out
        _run_command(["evaluate", given.checkpoint, "--out", given.out, *given.options()])
    except MargrpoError as error:
        return _refused(error)
    measured = json.loads((out / "metrics.json").read_text(encoding="utf-8"))
    rows = [{"metric": name, "value": value} for name, value in jobs.flatten(measured).items()]
    create_table_artifact(rows, key="evaluation", description=given.checkpoint)
    picture = base64.b64encode((out / "grid.png").read_bytes()).decode()
    markdown = f"# {given.checkpoint}\n\n![Samples of the test prompts](data:image/png;base64,{picture})"
    create_markdown_artifact(markdown, key="evaluation-samples", description=given.checkpoint)
    return Completed(message=f"results are in {out}")


@flow(name="pretrain-tiny", validate_parameters=False)
def pretrain_tiny(form: Pretraining = Pretraining()) -> State[Any]:  # noqa: B008 (Prefect reads the default)
    """Pretrain the embedded tiny policy (section pretrain of params.yaml) and write its checkpoint."""
    try:
        given = _read(form, Pretraining)
        _run_command(["pretrain", "--out", given.out, *given.options()])
    except MargrpoError as error:
        return _refused(error)
    return Completed(message=f"the policy is {paths.home() / given.out}")


def _refused(error: MargrpoError) -> State[Any]:
    return Failed(message=" ".join(str(error).split()))


def _run_command(arguments: Sequence[str]) -> None:
    """Run a command of margrpo in the project, streaming its output.

    Raises:
        MargrpoError: it failed; says its last line.
    """
    logger, children = get_run_logger(), Children()
    command = [sys.executable, "-m", "pipeline", *arguments]
    last = ""
    try:
        environment = stage_environment(str(runtime.flow_run.id))
        with children.start(command, Path(paths.home()), environment) as process:
            for text in worth_reading(process.stdout or ()):
                last = text
                logger.info(text)
            code = process.wait()
    finally:
        children.stop()  # also on a cancelled flow run
    if code:
        raise MargrpoError(last.removeprefix("margrpo: error: ") or f"margrpo ended with code {code}")
