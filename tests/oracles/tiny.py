"""Tiny random checkpoints in the layouts of the published scorers, and the images and prompts to score.

Everything is a function of a seed through numpy alone, so that the originals' environment and ours build the
same files. Nothing here knows margrpo.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

SIDE = 32
PROMPTS = [
    "a red square left of a blue circle",
    "two dogs",
    "A painting of the sea, oil on canvas &amp; gold",
    "the the the " * 40,
    "",
]
HPS_FILE = "HPS_v2.1_compressed.pt"
AESTHETIC_FILE = "sac+logos+ava1-l14-linearMSE.pth"
HPS_VISION = {"layers": 2, "width": 64, "head_width": 32, "patch_size": 8, "image_size": SIDE}
HPS_TEXT = {"layers": 2, "width": 48, "heads": 2, "context_length": 77}
HPS_EMBED = 16
MERGES = ["t h", "th e</w>", "r e", "re d</w>", "s q", "d o", "o f</w>", "l e", "a n", "c i", "b l", "i n"]
VOCABULARY = 2 * 256 + len(MERGES) + 2
BLIP_WIDTH, BLIP_DEPTH, BLIP_PATCH = 64, 2, 16
WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "the",
    "a",
    "red",
    "square",
    "dog",
    "##s",
    "two",
    ",",
    "&",
]
LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
BERT = list(dict.fromkeys([*WORDS, *LETTERS, *(f"##{letter}" for letter in LETTERS)]))
MED_CONFIG = {
    "architectures": ["BertModel"],
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 64,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 64,
    "model_type": "bert",
    "num_attention_heads": 12,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "type_vocab_size": 2,
    "vocab_size": len(BERT) + 2,
    "encoder_width": 768,
    "add_cross_attention": True,
}


def images() -> list[Image.Image]:
    """Return five pictures of several shapes: gradients with some noise."""
    pictures = []
    for index, (width, height) in enumerate([(32, 32), (48, 48), (64, 40), (41, 77), (224, 224)]):
        random = np.random.default_rng(index)
        x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
        planes = [(x * random.random() + y * random.random()) * 120 for _ in range(3)]
        noise = random.integers(0, 60, (height, width, 3))
        pictures.append(Image.fromarray((np.stack(planes, -1) + noise).astype(np.uint8)))
    return pictures


def fill(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Return random tensors: norms near 1, biases near 0, matrices scaled to keep the signal's size."""
    random = np.random.default_rng(seed)
    state = {}
    for name in sorted(shapes):
        shape = shapes[name]
        values = random.standard_normal(shape)
        if len(shape) == 1 and name.endswith("weight"):
            values = 1 + 0.1 * values
        elif len(shape) <= 1:
            values = 0.1 * values
        else:
            values = values / np.prod(shape[1:]) ** 0.5
        state[name] = torch.from_numpy(np.asarray(values, dtype=np.float32))
    return state


def clip_tokenizer(folder: Path) -> None:
    """Write the byte-pair file as OpenAI's CLIP and OpenCLIP have it."""
    text = "\n".join(["version", *MERGES])
    (folder / "bpe_simple_vocab_16e6.txt.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


def hps(folder: Path) -> Path:
    """Write an HPSv2 checkpoint (OpenCLIP keys under `state_dict`) with tokenizer and configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    state = fill(_open_clip_shapes(), seed=1)
    torch.save({"epoch": 1, "state_dict": state}, folder / HPS_FILE)
    clip_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(clip_config("gelu", HPS_EMBED, HPS_VISION, HPS_TEXT)))
    return folder


def clip_hf(folder: Path, seed: int, embed: int = 24, activation: str = "quick_gelu") -> Path:
    """Write a CLIP model in the layout of transformers, with tokenizer."""
    from transformers import CLIPConfig, CLIPModel
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    folder.mkdir(parents=True, exist_ok=True)
    vision = {"layers": 1, "width": 64, "head_width": 32, "patch_size": 16, "image_size": SIDE}
    config = clip_config(activation, embed, vision, {**HPS_TEXT, "layers": 1})
    (folder / "config.json").write_text(json.dumps(config))
    model = CLIPModel(CLIPConfig.from_dict(config))
    state = fill({name: tuple(value.shape) for name, value in model.state_dict().items()}, seed)
    state["logit_scale"] = torch.tensor(3.0)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    letters = list(bytes_to_unicode().values())
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), *(m.replace(" ", "") for m in MERGES)]
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *MERGES]) + "\n")
    return folder


def aesthetic(folder: Path) -> Path:
    """Write the predictor's .pth beside a CLIP model whose embedding has the 768 entries that it takes."""
    clip_hf(folder, seed=3, embed=768)
    torch.save(fill(_stack_shapes(768), seed=4), folder / AESTHETIC_FILE)
    return folder


def image_reward(folder: Path) -> Path:
    """Write ImageReward.pt with med_config.json and a BERT vocabulary."""
    folder.mkdir(parents=True, exist_ok=True)
    shapes = {f"blip.visual_encoder.{k}": v for k, v in _blip_vision_shapes().items()}
    shapes |= {f"blip.text_encoder.{k}": v for k, v in _blip_text_shapes().items()}
    shapes |= {f"mlp.{k}": v for k, v in _stack_shapes(768).items()}
    shapes |= {"blip.vision_proj.weight": (256, BLIP_WIDTH), "blip.vision_proj.bias": (256,)}
    shapes |= {"blip.text_proj.weight": (256, 768), "blip.text_proj.bias": (256,)}
    state = fill(shapes, seed=5)
    positions = torch.arange(MED_CONFIG["max_position_embeddings"])[None]
    state["blip.text_encoder.embeddings.position_ids"] = positions
    torch.save(state, folder / "ImageReward.pt")
    (folder / "med_config.json").write_text(json.dumps(MED_CONFIG))
    (folder / "vocab.txt").write_text("\n".join(BERT) + "\n")
    return folder


def clip_config(
    activation: str, embed: int, vision: Mapping[str, int], text: Mapping[str, int]
) -> dict[str, Any]:
    """Return the configuration of transformers for OpenCLIP's sizes."""
    return {
        "projection_dim": embed,
        "vision_config": {
            "hidden_size": vision["width"],
            "intermediate_size": 4 * vision["width"],
            "num_hidden_layers": vision["layers"],
            "num_attention_heads": vision["width"] // vision["head_width"],
            "patch_size": vision["patch_size"],
            "image_size": vision["image_size"],
            "projection_dim": embed,
            "hidden_act": activation,
        },
        "text_config": {
            "hidden_size": text["width"],
            "intermediate_size": 4 * text["width"],
            "num_hidden_layers": text["layers"],
            "num_attention_heads": text["heads"],
            "max_position_embeddings": text["context_length"],
            "vocab_size": VOCABULARY,
            "projection_dim": embed,
            "hidden_act": activation,
            "bos_token_id": VOCABULARY - 2,
            "eos_token_id": VOCABULARY - 1,
        },
    }


def _open_clip_shapes() -> dict[str, tuple[int, ...]]:
    vision, text = HPS_VISION, HPS_TEXT
    grid = (vision["image_size"] // vision["patch_size"]) ** 2
    shapes: dict[str, tuple[int, ...]] = {
        "logit_scale": (),
        "positional_embedding": (text["context_length"], text["width"]),
        "text_projection": (text["width"], HPS_EMBED),
        "token_embedding.weight": (VOCABULARY, text["width"]),
        "ln_final.weight": (text["width"],),
        "ln_final.bias": (text["width"],),
        "visual.class_embedding": (vision["width"],),
        "visual.positional_embedding": (grid + 1, vision["width"]),
        "visual.proj": (vision["width"], HPS_EMBED),
        "visual.conv1.weight": (vision["width"], 3, vision["patch_size"], vision["patch_size"]),
    }
    for norm in ("ln_pre", "ln_post"):
        shapes |= {f"visual.{norm}.{kind}": (vision["width"],) for kind in ("weight", "bias")}
    for prefix, sizes in (("visual.", vision), ("", text)):
        for layer in range(sizes["layers"]):
            block = _open_clip_block(sizes["width"])
            shapes |= {
                f"{prefix}transformer.resblocks.{layer}.{name}": shape for name, shape in block.items()
            }
    return shapes


def _open_clip_block(width: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "attn.in_proj_weight": (3 * width, width),
        "attn.in_proj_bias": (3 * width,),
    }
    for name, out, into in (
        ("attn.out_proj", width, width),
        ("mlp.c_fc", 4 * width, width),
        ("mlp.c_proj", width, 4 * width),
    ):
        shapes |= {f"{name}.weight": (out, into), f"{name}.bias": (out,)}
    for norm in ("ln_1", "ln_2"):
        shapes |= {f"{norm}.{kind}": (width,) for kind in ("weight", "bias")}
    return shapes


def _stack_shapes(width: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for place, size in zip((0, 2, 4, 6, 7), (1024, 128, 64, 16, 1), strict=True):
        shapes |= {f"layers.{place}.weight": (size, width), f"layers.{place}.bias": (size,)}
        width = size
    return shapes


def _blip_vision_shapes() -> dict[str, tuple[int, ...]]:
    width = BLIP_WIDTH
    shapes: dict[str, tuple[int, ...]] = {
        "cls_token": (1, 1, width),
        "pos_embed": (1, (SIDE // BLIP_PATCH) ** 2 + 1, width),
        "patch_embed.proj.weight": (width, 3, BLIP_PATCH, BLIP_PATCH),
        "patch_embed.proj.bias": (width,),
        "norm.weight": (width,),
        "norm.bias": (width,),
    }
    for layer in range(BLIP_DEPTH):
        for name, out, into in (
            ("attn.qkv", 3 * width, width),
            ("attn.proj", width, width),
            ("mlp.fc1", 4 * width, width),
            ("mlp.fc2", width, 4 * width),
        ):
            shapes |= {f"blocks.{layer}.{name}.weight": (out, into), f"blocks.{layer}.{name}.bias": (out,)}
        for norm in ("norm1", "norm2"):
            shapes |= {f"blocks.{layer}.{norm}.{kind}": (width,) for kind in ("weight", "bias")}
    return shapes


def _blip_text_shapes() -> dict[str, tuple[int, ...]]:
    from transformers import BlipTextConfig
    from transformers.models.blip.modeling_blip_text import BlipTextModel

    config = BlipTextConfig(**{**MED_CONFIG, "encoder_hidden_size": BLIP_WIDTH, "is_decoder": True})
    model: nn.Module = BlipTextModel(config, add_pooling_layer=False)
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}
