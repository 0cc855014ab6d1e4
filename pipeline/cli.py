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
def serve(
    prefect_port: Annotated[int, typer.Option(min=1, max=65_535, help="Port of Prefect's server.")] = 4200,
    mlflow_port: Annotated[int, typer.Option(min=1, max=65_535, help="Port of MLflow's UI.")] = 5000,
) -> None:
    """Serve the web forms and the curves on this machine: Prefect, MLflow and the deployments, until Ctrl-C.

    With PREFECT_API_URL set, the deployments are those of that server and none is started.
    """
    from pipeline.serve import serve as start

    start(Path.cwd(), prefect_port, mlflow_port)


@app.command()
def sweep(
    presets: Annotated[list[str], typer.Argument(help="Keys of `variants`.")],
    name: Annotated[str, typer.Option(help="Starts the names of the experiments.")] = "sweep",
    seeds: Annotated[str, typer.Option(metavar="N[,N...]", help="Training seeds.")] = "0",
    updates: Annotated[
        int | None, typer.Option(help="Updates of a cell; default those of the params.")
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=V[,V...]", help="Values to try of a key or switch; repeatable."),
    ] = None,
    max_parallel: Annotated[int, typer.Option(help="Cells side by side.")] = 2,
    skip_void: Annotated[
        bool, typer.Option("--skip-void", help="Leave out cells whose switches would change nothing.")
    ] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Print the cells and start nothing.")] = False,
    overrides: Overrides = None,
    profile: Profile = None,
) -> None:
    """Run presets x seeds x grid; each cell becomes a DVC experiment and an MLflow run.

    The same sweep again makes only the cells that are missing. params.yaml, dvc.lock and reports/ stay as they are.
    """
    from pipeline.sweep import sweep as start

    values = {"name": name, "presets": presets, "updates": updates, "max_parallel": max_parallel}
    changes = {"skip_void": skip_void, "changes": overrides or [], "profile": profile}
    start(Path.cwd(), {**values, **changes}, seeds, grid or [], plan)


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
