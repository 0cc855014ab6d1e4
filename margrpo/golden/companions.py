"""Tiny random text encoder, tokenizer and VAE that complete a NOVA golden folder.

Golden folders hold the transformer alone. With these beside it, everything a real checkpoint can do (encode
prompts, decode images, train, evaluate) runs in seconds on a CPU, on meaningless images.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from margrpo import seeds
from margrpo.policies.nova.libraries import quiet
from margrpo.policies.released import read_json

_TRANSFORMER = ("transformer", "scheduler")


def complete_folder(source: Path, folder: Path, seed: int = 0) -> Path:
    """Copy transformer and scheduler of a golden folder and add the rest in the layout of `BAAI/nova-*`.

    Args:
        source: holds `transformer/` and `scheduler/`. folder: where the checkpoint is made; must not exist.
        seed: of the random weights.

    Returns `folder`.
    """
    for name in _TRANSFORMER:
        (folder / name).mkdir(parents=True)
        for file in sorted((source / name).iterdir()):
            shutil.copyfile(file, folder / name / file.name)
    config = read_json(folder / "transformer" / "config.json")
    write_tokenizer(folder / "tokenizer")
    write_text_encoder(folder / "text_encoder", config["text_token_dim"], seed)
    write_vae(folder / "vae", config["image_dim"], config["image_stride"], seed)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level `tokenizer.json`: a token per byte of the prompt."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))


def write_text_encoder(folder: Path, width: int, seed: int) -> None:
    """Write a one-layer Phi of `width` channels with the key names of a language model."""
    from transformers import PhiConfig, PhiForCausalLM

    config = PhiConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=512,
    )
    model = PhiForCausalLM(config)
    _randomize(model, "phi", seed)
    with quiet():
        model.save_pretrained(folder)


def write_vae(folder: Path, channels: int, stride: int, seed: int) -> None:
    """Write an AutoencoderKL whose latents have `channels` and a side of 1 / stride."""
    from diffusers import AutoencoderKL

    levels = int(math.log2(stride)) + 1
    vae: Any = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=(8,) * levels,
        latent_channels=channels,
        norm_num_groups=2,
        sample_size=stride,
        scaling_factor=0.5,
    )
    _randomize(vae, "vae", seed)
    vae.save_pretrained(folder)


@torch.no_grad()
def _randomize(module: nn.Module, purpose: str, seed: int) -> None:
    """Replace all weights; the libraries' own initialisation draws from the global generator."""
    generator = seeds.generator("companion", purpose, seed)
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1:
            fan_in = parameter[0].numel()
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / math.sqrt(fan_in))
        elif name.endswith("bias"):
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
        else:
            parameter.fill_(1.0)
