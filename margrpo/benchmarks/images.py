"""Images of a benchmark as files that the original scripts can score: named as they expect, resumable."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

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
) -> int:
    """Draw every image of a benchmark that is not in the folder yet; return how many were drawn.

    Args:
        each: images per prompt. settings: what the images depend on (policy's hash, sampler, steps, guidance,
            precision); kept beside the images, and a folder made with others is refused.

    Raises:
        MargrpoError: the folder's images were made with other settings or for other prompts.
    """
    _same_settings(folder, {"benchmark": benchmark, "images_per_prompt": each, **settings}, prompts)
    if benchmark == "geneval":
        for index, prompt in enumerate(prompts):
            path = folder / f"{index:05d}" / "metadata.jsonl"
            if not path.is_file():
                write_atomic(path, (json.dumps(prompt.spec) + "\n").encode())
    pending = [
        (index, image, folder / image_path(benchmark, prompts, index, image, each))
        for index in range(len(prompts))
        for image in range(each)
    ]
    pending = [item for item in pending if not item[2].is_file()]
    for start in range(0, len(pending), batch_size):
        part = pending[start : start + batch_size]
        texts = [prompts[index].text for index, _, _ in part]
        pictures = to_pil(draw(texts, [seed(benchmark, index, image) for index, image, _ in part]))
        for picture, (_, _, path) in zip(pictures, part, strict=True):
            write_atomic(path, _encode(picture, path.suffix))
    return len(pending)


def _same_settings(folder: Path, settings: dict[str, Any], prompts: Sequence[Prompt]) -> None:
    texts = "\n".join(f"{prompt.category}\t{prompt.text}" for prompt in prompts)
    record = {**settings, "prompts_sha256": hashlib.sha256(texts.encode()).hexdigest()}
    path = folder / RECORD
    if not path.is_file():
        write_atomic(path, (json.dumps(record, indent=2, sort_keys=True) + "\n").encode())
        return
    found = json.loads(path.read_text(encoding="utf-8"))
    changed = sorted(key for key in {*found, *record} if found.get(key) != record.get(key))
    if changed:
        key = changed[0]
        raise MargrpoError(
            f"{folder}: its images were made with {key} {found.get(key)}, now {record.get(key)}; "
            f"allowed: the same settings, or another folder"
        )


def _encode(picture: Image.Image, suffix: str) -> bytes:
    """Return the file's bytes: PNG, or JPEG at PIL's default quality, which HPSv2's scores include."""
    buffer = io.BytesIO()
    picture.save(buffer, format="JPEG" if suffix == ".jpg" else "PNG")
    return buffer.getvalue()
