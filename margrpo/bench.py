"""Commands around benchmarks: bench list, bench generate, bench score."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from margrpo.errors import ConfigError
from margrpo.options import PARAMS, Overrides, ParamsFile, Profile, load

if TYPE_CHECKING:
    from margrpo.benchmarks.suite import Suite
    from margrpo.config import Config

bench_app = typer.Typer(
    help="Images of published benchmarks, named as their own scripts read them, and their scores.",
    no_args_is_help=True,
)

Name = Annotated[
    str, typer.Argument(metavar="BENCH", help="A key of evaluation.benchmarks, or a name of `bench list`.")
]
Source = Annotated[
    Path | None, typer.Option("--path", help="Folder with the benchmark's own files, or a .txt or .jsonl.")
]
Images = Annotated[
    int | None, typer.Option(min=1, help="Images per prompt; default as many as the benchmark has.")
]
Limit = Annotated[int | None, typer.Option(min=1, help="First n prompts of each category; default all.")]


@bench_app.command("list")
def list_benchmarks() -> None:
    """List the benchmarks whose prompts can be read; none of them comes with margrpo."""
    from margrpo.benchmarks.prompt_sets import SETS

    for kind in SETS.values():
        count = f"{sum(kind.counts.values())} prompts" if kind.counts else "any number of prompts"
        parts = "" if len(kind.counts) < 2 else f" in {len(kind.counts)} categories"
        print(f"{kind.name}: {count}{parts}, {kind.images_per_prompt} images each ({kind.license})")
        print(f"  from {kind.source}" + (f": {', '.join(kind.files)}" if kind.files else ""))


@bench_app.command()
def generate(
    bench: Name,
    out: Annotated[Path, typer.Option(help="Folder of the images; what is complete in it is kept.")],
    path: Source = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Policy; default the base of the params.")] = None,
    images: Images = None,
    limit: Limit = None,
    sampler: Annotated[str | None, typer.Option(help="ode or sde; default ode.")] = None,
    precision: Annotated[str | None, typer.Option(help="float32 or bf16; default float32.")] = None,
    params: ParamsFile = PARAMS,
    overrides: Overrides = None,
    profile: Profile = None,
) -> None:
    """Draw a benchmark's images with a policy; the same command again goes on after a fault.

    The noise of an image depends on the benchmark, its prompt's index and its own index alone. generation.json
    in the folder says how the images were made; other settings need another folder.
    """
    config = load(params, overrides, profile)
    suite = _suite(
        config,
        bench,
        path=path,
        images_per_prompt=images,
        limit=limit,
        sampler=sampler,
        precision=precision,
    )
    import torch
    from tqdm import tqdm

    from margrpo.base import find_base
    from margrpo.benchmarks.suite import draw_images
    from margrpo.checkpoints import sha256
    from margrpo.evaluation import load as load_policy

    if config.evaluation.device == "cpu":
        torch.set_num_threads(1)
    file = checkpoint or find_base(config)
    policy = load_policy(file, config)
    total = len(suite.chosen) * suite.each
    with tqdm(total=total, desc=bench, disable=not sys.stderr.isatty()) as bar:
        drawn = draw_images(suite, policy, config, sha256(file), out, bar.update)
    print(f"{out}: {total} images, {drawn} of them drawn now")


@bench_app.command()
def score(
    bench: Name,
    folder: Annotated[Path, typer.Argument(help="Folder of images, as `bench generate` names them.")],
    scores: Annotated[
        list[str] | None, typer.Option("--score", help="A reward; repeatable; default those of the params.")
    ] = None,
    path: Source = None,
    images: Images = None,
    limit: Limit = None,
    out: Annotated[Path | None, typer.Option(help="CSV file to write; default FOLDER/scores.csv.")] = None,
    params: ParamsFile = PARAMS,
    overrides: Overrides = None,
    profile: Profile = None,
) -> None:
    """Score a folder of a benchmark's images: means of its categories, a row per prompt in a CSV file."""
    config = load(params, overrides, profile)
    suite = _suite(config, bench, path=path, images_per_prompt=images, limit=limit, scores=scores or None)
    if not suite.section.scores:
        raise ConfigError.of("--score", "none", "allowed: names of `margrpo rewards list`, one or more")
    import torch
    from tqdm import tqdm

    from margrpo.benchmarks.suite import check, read_record, score_images, summarize
    from margrpo.checkpoints import write_atomic
    from margrpo.hub import check_weights

    if config.evaluation.device == "cpu":
        torch.set_num_threads(1)
    check_weights("reward.options", config.reward.options)
    check_weights("evaluation.options", config.evaluation.options)
    check(config, suite.section.scores)
    total = len(suite.chosen) * suite.each
    with tqdm(total=total, desc=bench, disable=not sys.stderr.isatty()) as bar:
        table = score_images(suite, config, folder, bar.update)
    target = out or folder / "scores.csv"
    write_atomic(target, table.to_csv(index=False).encode())
    for key, value in read_record(folder).items():
        print(f"{key}: {value}")
    for found in summarize(table).values():
        for name, numbers in found.items():
            print(f"{name}: " + ", ".join(f"{key} {value:.6g}" for key, value in numbers.items()))
    print(target)


def _suite(config: Config, name: str, **given: Any) -> Suite:
    """Return a benchmark of the params, or one by its own name, with what the command line says on top."""
    from pydantic import ValidationError

    from margrpo.benchmarks.prompt_sets import SETS
    from margrpo.benchmarks.suite import prepare
    from margrpo.params import explain
    from margrpo.sources import Benchmark

    known = config.evaluation.benchmarks
    if name not in known and name not in SETS:
        allowed = [*known, *(kind for kind in SETS if kind not in known)]
        raise ConfigError.of("benchmark", name, f"allowed: {', '.join(allowed)}")
    base = known[name].model_dump() if name in known else {"prompts": name, "keep_images": True}
    changes = {
        key: str(value) if key == "path" else value for key, value in given.items() if value is not None
    }
    if "path" in changes:
        changes |= {"id": None, "revision": None}
    try:
        section = Benchmark.model_validate({**base, **changes})
    except ValidationError as error:
        raise ConfigError(f"benchmark {name}.{explain(error, Benchmark)}") from None
    return prepare(name, section)
