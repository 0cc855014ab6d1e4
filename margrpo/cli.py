"""Command line of the library: pretrain, train, sample, diagnose without a pipeline around them.

Heavy imports happen inside the commands, so that `--help` and errors in params answer at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from margrpo import bench, commands
from margrpo.errors import ConfigError, MargrpoError
from margrpo.options import PARAMS, Overrides, ParamsFile, Profile, load

__all__ = ["PARAMS", "Overrides", "ParamsFile", "Profile", "app", "load", "run"]

app = typer.Typer(
    name="margrpo",
    help="Reinforce hybrid (masked autoregressive + diffusion head) image generators with MAR-GRPO.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(commands.rewards_app, name="rewards")
app.add_typer(bench.bench_app, name="bench")
app.command("serve-reward")(commands.serve_reward)

# Typer's own usage errors, whichever click it carries: BadParameter -> UsageError -> ClickException.
_UsageError: type[Exception] = typer.BadParameter.__mro__[2]


def run(application: typer.Typer, arguments: Sequence[str] | None = None) -> int:
    """Run a command line; return 2 after one line on stderr for anything that a person can correct."""
    try:
        result = application(args=None if arguments is None else list(arguments), standalone_mode=False)
    except MargrpoError as error:
        return _fail(str(error))
    except (typer.Abort, KeyboardInterrupt):
        print("margrpo: stopped", file=sys.stderr)
        return 130
    except _UsageError as error:
        format_message = getattr(error, "format_message", None)
        return _fail(format_message() if format_message else str(error))
    return result if isinstance(result, int) else 0


def _fail(message: str) -> int:
    print(f"margrpo: error: {' '.join(message.split())}", file=sys.stderr)
    return 2


@app.command()
def pretrain(
    out: Annotated[Path, typer.Option(help="Checkpoint file to write.")],
    params: ParamsFile = PARAMS,
    overrides: Overrides = None,
    profile: Profile = None,
) -> None:
    """Pretrain the embedded tiny policy on rendered scenes (section `pretrain` of the params)."""
    config = load(params, overrides, profile)
    _use_one_thread()
    from margrpo.base import write_base

    given = config.checkpoint.model_copy(update={"source": "pretrain", "path": None})
    print(f"{out} sha256 {write_base(config.model_copy(update={'checkpoint': given}), out)}")


@app.command()
def train(
    variant: Annotated[str, typer.Argument(help="A key of `variants`.")],
    seed: Annotated[int, typer.Option(min=0, help="Training seed.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder to write; default artifacts/manual/<run>.")] = None,
    params: ParamsFile = PARAMS,
    overrides: Overrides = None,
    profile: Profile = None,
) -> None:
    """Train one variant outside of the pipeline; checkpoints and logs go to one folder."""
    config = load(params, overrides, profile)
    config.objective_of(variant)
    _use_one_thread()
    from margrpo import rewards, trainer
    from margrpo.base import find_base
    from margrpo.hub import check_weights
    from margrpo.prompts import load_splits

    rewards.check(config.reward.weights, config.reward.options)
    check_weights("reward.options", config.reward.options)
    folder = out or Path("artifacts/manual") / f"{variant}-{seed}"
    prompts = load_splits(config.prompts)
    result = trainer.train(config, variant, seed, find_base(config), prompts, out=folder, logs=folder)
    if os.environ.get("RANK", "0") == "0":  # of several processes the first one talks
        print(f"{folder} last.safetensors sha256 {result.last_sha256}")


@app.command()
def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="A policy that `train` or `pretrain` wrote.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")] = Path("artifacts/manual/evaluation"),
    params: ParamsFile = PARAMS,
    overrides: Overrides = None,
    profile: Profile = None,
) -> None:
    """Evaluate one policy on the held-out test prompts and the benchmarks of the params."""
    config = load(params, overrides, profile)
    _use_one_thread()
    from margrpo import evaluation, rewards
    from margrpo.base import find_base
    from margrpo.hub import check_weights
    from margrpo.prompts import load_splits

    rewards.check(config.reward.weights, config.reward.options)
    check_weights("reward.options", config.reward.options)
    check_weights("evaluation.options", config.evaluation.options)
    test = load_splits(config.prompts)["test"]
    evaluation.evaluate(config, {"last": checkpoint}, find_base(config), out, test)
    print(out)


@app.command()
def sample(
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="[PROMPT]...", help='For example "a red circle".')
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="The same as an option; repeatable.")] = None,
    policy: Annotated[
        Path | None,
        typer.Option(
            "--policy",
            "--checkpoint",
            help="File, or folder of a released model; default the base of the params.",
        ),
    ] = None,
    images: Annotated[int, typer.Option("--n", "--images", min=1, max=1000, help="Images per prompt.")] = 8,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write.")] = Path("samples"),
    seed: Annotated[int, typer.Option(min=0, help="Seed of the noise.")] = 0,
    sampler: Annotated[str, typer.Option(help="ode or sde.")] = "ode",
    params: ParamsFile = PARAMS,
    overrides: Overrides = None,
    profile: Profile = None,
) -> None:
    """Draw images for prompts: one file each, a grid with a row per prompt, and samples.json with their seeds."""
    config = load(params, overrides, profile)
    if sampler not in ("ode", "sde"):
        raise ConfigError.of("--sampler", sampler, "allowed: ode | sde")
    texts = [*(prompts or ()), *(prompt or ())]
    if not texts:
        raise ConfigError.of("prompt", "none", 'allowed: at least one, for example "a red circle"')
    _use_one_thread()
    from margrpo.base import find_base
    from margrpo.samples import write_samples

    write_samples(config, policy or find_base(config), texts, images, seed, sampler == "sde", out)
    print(out)


@app.command()
def diagnose(
    variants: Annotated[list[str] | None, typer.Argument(help="Keys of `variants`; default all.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Policy; default the base of the params.")] = None,
    updates: Annotated[int, typer.Option(min=2, max=10_000, help="Gradients per variant.")] = 32,
    seed: Annotated[int, typer.Option(min=0, help="Seed of prompts and noise.")] = 0,
    out: Annotated[Path | None, typer.Option(help="CSV file to write as well.")] = None,
    params: ParamsFile = PARAMS,
    overrides: Overrides = None,
    profile: Profile = None,
) -> None:
    """Measure the gradient noise of variants at one policy: variance, signal-to-noise, projection on the signal."""
    config = load(params, overrides, profile)
    chosen = variants or list(config.variants)
    for variant in chosen:
        config.objective_of(variant)
    _use_one_thread()
    from margrpo.base import find_base
    from margrpo.checkpoints import write_atomic
    from margrpo.diagnose import diagnose as measure
    from margrpo.prompts import load_splits

    prompts = load_splits(config.prompts)
    table = measure(
        config,
        chosen,
        seed,
        checkpoint or find_base(config),
        prompts,
        updates,
        report=lambda text: print(f"margrpo: {text}", file=sys.stderr),
    )
    print(table.to_string(index=False, float_format=lambda value: f"{value:.4g}"))
    if out is not None:
        write_atomic(out, table.to_csv(index=False).encode())


@app.command()
def estimate(
    variant: Annotated[str, typer.Argument(help="A key of `variants`.")],
    processes: Annotated[int, typer.Option(min=1, max=65_536, help="Processes that share an update.")] = 1,
    tflops: Annotated[
        float | None, typer.Option(min=1e-6, help="Sustained TFLOP/s of one device; default a guess.")
    ] = None,
    params: ParamsFile = PARAMS,
    overrides: Overrides = None,
    profile: Profile = None,
) -> None:
    """Estimate memory and time of a run from its params; only config files of the checkpoint are read."""
    config = load(params, overrides, profile)
    config.objective_of(variant)
    from margrpo.base import sketch_base
    from margrpo.estimate import describe
    from margrpo.estimate import estimate as compute

    print(describe(compute(config, variant, sketch_base(config), processes, tflops)))


@app.command()
def verify(
    golden: Annotated[
        Path | None, typer.Option("--golden", metavar="DIR", help="Folder of reference vectors.")
    ] = None,
    cases: Annotated[
        Path | None, typer.Option("--cases", metavar="FILE", help="JSON file of recorded scoring cases.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Replay reference vectors of a real model (MAR, Harmon, NOVA), or recorded cases of scoring rules.

    Exit 0 only if all are inside tolerance.
    """
    if (golden is None) == (cases is None):
        raise ConfigError.of("verify", "both or none of --golden and --cases", "allowed: one of them")
    if cases is not None:
        code = commands.replay_cases(cases, as_json)
    else:
        from margrpo.golden.runner import verify as replay

        assert golden is not None  # one of the two is given
        code = replay(golden, as_json)
    if code:
        raise typer.Exit(code)


def _use_one_thread() -> None:
    import torch

    torch.set_num_threads(1)
