"""The console script `margrpo`: the library's commands plus those that run the whole experiment."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from margrpo.cli import PARAMS, Overrides, ParamsFile, Profile, app, load, run


@app.command()
def reproduce(
    workers: Annotated[
        int | None, typer.Option(min=1, help="Stages side by side; default one a core.")
    ] = None,
    params: ParamsFile = PARAMS,
    overrides: Overrides = None,
    profile: Profile = None,
) -> None:
    """Run the experiment of the params: every stage that is not up to date, up to the report.

    With another params file, a profile or overrides it runs in a scratch clone under .margrpo/scratch, so that
    params.yaml, dvc.lock and reports/ stay as they are.
    """
    from pipeline.reproduce import reproduce as start

    start(Path.cwd(), params, overrides or (), profile, workers)


@app.command()
def report(params: ParamsFile = PARAMS, overrides: Overrides = None, profile: Profile = None) -> None:
    """Write the report of the runs in reports/ anew, without DVC."""
    config = load(params, overrides, profile)
    from pipeline import paths
    from pipeline.report import build

    build(config, Path.cwd())
    print(paths.REPORT)


@app.command()
def compare(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Run names, MLflow run ids, or variants (all their seeds)."),
    ],
    within: Annotated[
        str | None, typer.Option(metavar="STUDY", help="Only runs of this study or sweep (name or run id).")
    ] = None,
    out: Annotated[Path, typer.Option(help="PNG file of the curves.")] = Path("compare.png"),
    params: ParamsFile = PARAMS,
    overrides: Overrides = None,
    profile: Profile = None,
) -> None:
    """Compare runs of MLflow: a table of their results, what their params differ in, and their curves."""
    config = load(params, overrides, profile)
    from pipeline.compare import compare as compare_runs

    print(compare_runs(config, runs, within, out))


def main() -> None:
    """Run the command line and exit."""
    sys.exit(run(app))
