"""Tiny checkpoints of the real families for the tests: golden weights plus what a policy needs to train."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from torch import Tensor

from margrpo.policies.harmon import read_harmon
from margrpo.policies.mar import read_mar
from margrpo.policies.masked import MaskedPolicy

GOLDEN = Path(__file__).parents[1] / "golden"
WORDS = ["user", "assistant", "Generate", "an", "image", ":", ".", "a", "red", "blue", "circle", "square"]


def read(family: str, folder: Path) -> MaskedPolicy:
    return {"mar": read_mar, "harmon": read_harmon}[family](folder)


def copy_folder(family: str, target: Path) -> Path:
    """Copy a golden checkpoint without its vectors; files are writable."""
    target.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(GOLDEN / family / name, target / name)
    return target


def edit_config(folder: Path, **sections: Mapping[str, Any] | Any) -> None:
    """Change keys of a folder's config.json; mappings merge, None removes."""
    config = json.loads((folder / "config.json").read_text())
    for section, values in sections.items():
        config[section] = {**config.get(section, {}), **values} if isinstance(values, dict) else values
    (folder / "config.json").write_text(json.dumps(config))


def write_tokenizer(folder: Path) -> None:
    """Write a word-level tokenizer.json with the control tokens of Qwen."""
    vocabulary = {word: i for i, word in enumerate(["<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(
        [AddedToken(text, normalized=False) for text in ("<|im_start|>", "<|im_end|>")]
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def trainable_folder(family: str, target: Path) -> Path:
    """A folder whose policy can encode prompts and decode images."""
    folder = copy_folder(family, target)
    if family == "harmon":
        write_tokenizer(folder)
        return folder
    harmon = load_file(GOLDEN / "harmon" / "model.safetensors")
    vae = {name.removeprefix("vae."): value for name, value in harmon.items() if name.startswith("vae.")}
    save_file(vae, folder / "vae.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["vae"] = json.loads((GOLDEN / "harmon" / "config.json").read_text())["vae"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def prompts_of(family: str) -> list[str]:
    return ["3", "7"] if family == "mar" else ["a red circle", "a blue square"]


def randomize(policy: MaskedPolicy, seed: int = 0, scale: float = 0.1) -> None:
    """Replace meta weights by small random ones (norm weights around 1)."""
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Tensor] = {}
    for name, value in policy.state_dict().items():
        if value.dtype == torch.uint8:
            state[name] = value
            continue
        around = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        state[name] = around + scale * torch.randn(value.shape, generator=generator)
    policy.load_state_dict(state, assign=True)
