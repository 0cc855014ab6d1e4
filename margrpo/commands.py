"""Commands around rewards and benchmark rules: rewards list, rewards check, the cases of verify."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from margrpo.options import PARAMS, Overrides, ParamsFile

if TYPE_CHECKING:
    from margrpo.config import RewardOptions

rewards_app = typer.Typer(
    help="What rewards there are, what they need, and whether they work here.", no_args_is_help=True
)


def replay_cases(cases: Path, as_json: bool) -> int:
    """Print the replay of recorded cases of published scoring rules; return 1 if any differs, else 0."""
    from margrpo.benchmarks.cases import verify

    report = verify(cases)
    print(report.to_json() if as_json else report.to_text())
    return int(report.failed > 0)


def serve_reward(
    name: Annotated[str, typer.Argument(help="A reward; `margrpo rewards list` names them.")],
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port; 0 takes a free one.")] = 8410,
    host: Annotated[
        str, typer.Option(help="Address to listen on; there is no authentication.")
    ] = "127.0.0.1",
    path: Annotated[Path | None, typer.Option(help="Folder with the weight files.")] = None,
    device: Annotated[str | None, typer.Option(help="torch device of the reward; default cpu.")] = None,
    precision: Annotated[str, typer.Option(help="float32 or float16.")] = "float32",
    batch_size: Annotated[
        int | None, typer.Option(help="Images scored together; default the reward's.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds for a batch before its images get no score.")
    ] = None,
    queue: Annotated[int, typer.Option(min=1, max=1000, help="Requests that may wait; more get 503.")] = 8,
    max_mib: Annotated[int, typer.Option(min=1, max=4096, help="Largest request in MiB.")] = 256,
) -> None:
    """Score images for runs with `reward.options.NAME.url`, until interrupted; prints the address."""
    from pydantic import ValidationError

    from margrpo.config import RewardOptions
    from margrpo.errors import ConfigError
    from margrpo.params import explain
    from margrpo.rewards.server import serve

    given = {"path": None if path is None else str(path), "device": device, "precision": precision}
    try:
        options = RewardOptions.model_validate({**given, "batch_size": batch_size, "timeout_s": timeout})
    except ValidationError as error:
        raise ConfigError(f"serve-reward: {explain(error, RewardOptions)}") from None
    serve(name, options, host, port, queue, max_mib * 2**20)


@rewards_app.command("list")
def list_rewards(params: ParamsFile = PARAMS) -> None:
    """List every reward: range, licence, the files it needs, where they come from, and what is found here.

    Looks where the options of the params say, if there is a params file, else in the hub's cache.
    """
    from margrpo import rewards
    from margrpo.config import RewardOptions
    from margrpo.params import load_config
    from margrpo.rewards.status import state

    options = load_config(params).reward.options if params.is_file() else {}
    for name in rewards.names():
        info = rewards.entry(name).info
        print(f"{name}: {info.summary}")
        print(f"  range {info.low:g} .. {info.high:g}; licence: {info.license}")
        if info.files:
            print(f"  files: {', '.join(info.files)} ({info.source})")
        if info.extra is not None:
            print(f"  package: pip install 'margrpo[{info.extra[0]}]'")
        print(f"  {state(name, options.get(name, RewardOptions()))}")


@rewards_app.command("check")
def check_rewards(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Rewards; default those of the params.")
    ] = None,
    params: ParamsFile = PARAMS,
    overrides: Overrides = None,
) -> None:
    """Load rewards, score two known pictures, hash the files that were read; exit code 1 if one does not work."""
    from margrpo import rewards
    from margrpo.config import RewardOptions
    from margrpo.errors import MargrpoError
    from margrpo.params import load_config

    reward = load_config(params, overrides or (), None).reward
    broken = False
    for name in names or reward.weights:
        info = rewards.entry(name).info
        try:
            lines = _tried(name, reward.options.get(name, RewardOptions()))
        except MargrpoError as error:
            broken = True
            lines = [f"{name}: not usable: {error}"]
        print("\n".join([*lines, f"  licence: {info.license}"]))
    if broken:
        raise typer.Exit(1)


def _tried(name: str, options: RewardOptions) -> list[str]:
    """Return what a self-test of a reward gave; raises MargrpoError if it is not usable."""
    from margrpo import rewards
    from margrpo.checkpoints import sha256
    from margrpo.errors import MargrpoError
    from margrpo.rewards.selftest import selftest
    from margrpo.rewards.weights import recorded_files

    problem = rewards.missing(name, options)
    if problem:
        raise MargrpoError(problem)
    with recorded_files() as files:
        result = selftest(name, options)
    own, other = (", ".join(f"{x:.4f}" for x in pair) for pair in (result.own, result.exchanged))
    scores = f"pictures with their prompts {own}; exchanged {other}"
    if result.problem:
        raise MargrpoError(f"{result.problem}; {scores}")
    return [
        f"{name}: works; {scores}; {result.prompts}",
        *(f"  {file} sha256 {sha256(file)}" for file in files),
    ]
