"""Images of a benchmark as files that the original scripts can score: named as they expect, resumable."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from margrpo.benchmarks.prompt_sets import digest
from margrpo.checkpoints import write_atomic
from margrpo.errors import MargrpoError
from margrpo.prompts import Prompt
from margrpo.rewards.images import to_pil
from margrpo.seeds import derive

Draw = Callable[[Sequence[str], Sequence[int]], Tensor]
"""(prompts, seeds) -> images [B, 3, H, W] in [0, 1]; an image depends on its own prompt and seed alone."""

RECORD = "generation.json"


def seed(benchmark: str, prompt_index: int, image_index: int) -> int:
    """Return the noise seed of an image: a function of its place in the benchmark and nothing else."""
    return derive("benchmark", benchmark, prompt_index, image_index)


def image_path(benchmark: str, prompts: Sequence[Prompt], index: int, image: int, each: int) -> Path:
    """Return an image's path below the benchmark's folder, as the original scripts read it.

    hpsv2: `<style>/<index in style>.jpg`. geneval: `<index>/samples/<image>.png`. t2i_compbench:
    `<category>/samples/<prompt>_<number>.png` with a number that runs through the category (T2I-CompBench
    sorts by it and takes ten per prompt). Others: `<index>_<image>.png`.
    """
    prompt = prompts[index]
    place = index - next(i for i, p in enumerate(prompts) if p.category == prompt.category)
    if benchmark == "hpsv2":
        return Path(prompt.category) / f"{place:05d}.jpg"
    if benchmark == "geneval":
        return Path(f"{index:05d}") / "samples" / f"{image:05d}.png"
    if benchmark == "t2i_compbench":
        return Path(prompt.category) / "samples" / f"{prompt.text}_{place * each + image:06d}.png"
    return Path(f"{index:05d}_{image:05d}.png")


def generate_images(
    benchmark: str,
    prompts: Sequence[Prompt],
    each: int,
    draw: Draw,
    folder: Path,
    settings: dict[str, Any],
    batch_size: int = 16,
    chosen: Sequence[int] | None = None,
    progress: Callable[[int], object] = lambda drawn: None,
) -> int:
    """Draw every image of a benchmark that is not in the folder yet; return how many were drawn.

    One process at a time may write a folder. `generation.json` in it says how its images are made.

    Args:
        each: images per prompt. settings: what the images depend on (policy's hash, sampler, steps, guidance,
            precision); kept beside the images, and a folder made with others is refused.
        chosen: indices of the prompts to draw, default all; names and noise are those of the whole benchmark.
        progress: told the number of images after every batch.

    Raises:
        MargrpoError: the folder's images were made with other settings or for other prompts.
    """
    indices = range(len(prompts)) if chosen is None else chosen
    facts = {
        "benchmark": benchmark,
        "images_per_prompt": each,
        "prompts_sha256": digest(prompts),
        "seeds": "sha256 of benchmark, prompt index and image index",
        **settings,
    }
    _record(folder, facts, {"prompts": len(indices), "images": len(indices) * each})
    for stray in folder.rglob(".*.tmp"):
        stray.unlink()  # left by a killed process; the original scripts would take it for an image
    if benchmark == "geneval":
        for index in indices:
            path = folder / f"{index:05d}" / "metadata.jsonl"
            if not path.is_file():
                write_atomic(path, (json.dumps(prompts[index].spec) + "\n").encode())
    wanted = [(index, image) for index in indices for image in range(each)]
    paths = [folder / image_path(benchmark, prompts, *item, each) for item in wanted]
    pending = [(*item, path) for item, path in zip(wanted, paths, strict=True) if not path.is_file()]
    progress(len(wanted) - len(pending))
    for start in range(0, len(pending), batch_size):
        part = pending[start : start + batch_size]
        texts = [prompts[index].text for index, _, _ in part]
        pictures = to_pil(draw(texts, [seed(benchmark, index, image) for index, image, _ in part]))
        for picture, (_, _, path) in zip(pictures, part, strict=True):
            write_atomic(path, _encode(picture, path.suffix))
        progress(len(part))
    return len(pending)


def read_images(paths: Sequence[Path]) -> list[Tensor]:
    """Return the pictures of files as float [3, H, W] in [0, 1].

    Raises:
        MargrpoError: a file is missing or no picture.
    """
    found = []
    for path in paths:
        try:
            with Image.open(path) as picture:
                array = np.asarray(picture.convert("RGB"))
        except OSError as error:
            reason = "is missing" if isinstance(error, FileNotFoundError) else "is not a readable picture"
            raise MargrpoError(f"{path}: {reason}; allowed: a complete folder of images") from None
        found.append(torch.from_numpy(array.copy()).permute(2, 0, 1).float() / 255)
    return found


def _record(folder: Path, facts: dict[str, Any], counts: dict[str, int]) -> None:
    """Keep facts beside the images; refuse a folder of others. `counts` may grow."""
    path = folder / RECORD
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
        changed = sorted(key for key in {*found, *facts} - {*counts} if found.get(key) != facts.get(key))
        if changed:
            key = changed[0]
            raise MargrpoError(
                f"{folder}: its images were made with {key} {found.get(key)}, now {facts.get(key)}; "
                f"allowed: the same settings, or another folder"
            )
        counts = {key: max(value, found[key]) for key, value in counts.items()}
    write_atomic(path, (json.dumps({**facts, **counts}, indent=2, sort_keys=True) + "\n").encode())


def _encode(picture: Image.Image, suffix: str) -> bytes:
    """Return the file's bytes: PNG, or JPEG at PIL's default quality, which HPSv2's scores include."""
    buffer = io.BytesIO()
    picture.save(buffer, format="JPEG" if suffix == ".jpg" else "PNG")
    return buffer.getvalue()
