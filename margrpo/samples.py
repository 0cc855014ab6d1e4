"""`margrpo sample`: images of prompts as single files, a grid of them, and what made each."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from margrpo.batches import chunks
from margrpo.checkpoints import sha256, write_atomic
from margrpo.config import Config
from margrpo.errors import ConfigError
from margrpo.evaluation import draw, load
from margrpo.grids import grid_png
from margrpo.seeds import derive


def write_samples(
    config: Config,
    checkpoint: Path,
    prompts: Sequence[str],
    images: int,
    seed: int,
    stochastic: bool,
    out: Path,
) -> None:
    """Draw `images` images per prompt and write <prompt>-<image>.png, grid.png and samples.json to a folder.

    The seed of an image depends on `seed`, its prompt and its number alone; samples.json holds it, with everything
    else that decided the image.

    Args:
        checkpoint: a policy's file or the folder of a released checkpoint. stochastic: SDE instead of ODE.

    Raises:
        ConfigError: `out` is a file; options of NOVA's pipeline with the SDE or another policy.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError.of("--out", out, "allowed: a folder (this is a file)")
    if stochastic and config.evaluation.tuned:
        allowed = "allowed: ode with evaluation.guidance_renorm or guidance_trunc"
        raise ConfigError.of("--sampler", "sde", allowed)
    policy = load(checkpoint, config)
    texts = [prompt for prompt in prompts for _ in range(images)]
    seeds = [derive("sample", seed, prompt, index) for prompt in prompts for index in range(images)]
    with torch.no_grad():
        drawn = [
            draw(policy, config, [texts[i] for i in part], [seeds[i] for i in part], stochastic).cpu()
            for part in chunks(range(len(texts)), config.evaluation.batch_size)
        ]
    pixels = torch.cat(drawn).unflatten(0, (len(prompts), images))
    facts = []
    for row, prompt in enumerate(prompts):
        for column in range(images):
            file = f"{row:03d}-{column:03d}.png"
            write_atomic(out / file, _png(pixels[row, column]))
            facts.append({"file": file, "prompt": prompt, "seed": seeds[row * images + column]})
    write_atomic(out / "grid.png", grid_png(prompts, pixels))
    settings = {
        "checkpoint": str(checkpoint),
        "sha256": sha256(checkpoint),
        "seed": seed,
        "sampler": "sde" if stochastic else "ode",
        **config.sampler.model_dump(),
        **{key: value for key, value in config.evaluation.model_dump().items() if key.startswith("guidance")},
    }
    text = json.dumps({"settings": settings, "images": facts}, indent=2, ensure_ascii=False)
    write_atomic(out / "samples.json", (text + "\n").encode())


def _png(image: Tensor) -> bytes:
    """Return the PNG of an image [3, H, W] in [0, 1]."""
    pixels = (image.detach().float().clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()
