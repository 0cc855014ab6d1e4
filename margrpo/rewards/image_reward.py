"""ImageReward v1.0: BLIP ViT-L, text encoder that looks at the image, linear head (Xu et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from margrpo.config import RewardOptions
from margrpo.errors import MargrpoError
from margrpo.rewards import weights
from margrpo.rewards.aesthetic import load_stack
from margrpo.rewards.base import Info, Reward, Specs, register
from margrpo.rewards.images import crop_center
from margrpo.rewards.tokenizers import BERT_FILES, BertTokenizer
from margrpo.rewards.weights import State, load_strict, read_json, read_state

REPOSITORY = "zai-org/ImageReward"
TEXT = "google-bert/bert-base-uncased"
FILE, CONFIG = "ImageReward.pt", "med_config.json"
LENGTH = 35
"""Tokens of a prompt that are read; longer ones lose their tail."""
MEAN, STD = 0.16717362830052426, 1.0333394966054072

_HEAD_WIDTH = 64  # of all BLIP vision towers
_UNUSED = ("blip.vision_proj.", "blip.text_proj.")  # BLIP's pretraining heads lie in the file
_VISION = {
    "cls_token": "embeddings.class_embedding",
    "pos_embed": "embeddings.position_embedding",
    "patch_embed.proj": "embeddings.patch_embedding",
    "blocks": "encoder.layers",
    "norm1": "layer_norm1",
    "norm2": "layer_norm2",
    "attn.qkv": "self_attn.qkv",
    "attn.proj": "self_attn.projection",
    "norm": "post_layernorm",
}


class ImageReward:
    """About N(0, 1) over ordinary images, unbounded: float [B]."""

    def __init__(self, folder: Path, tokenizer: Path, precision: str) -> None:
        path = folder / FILE
        state = read_state(path)
        self.vision, self.image_size = _vision(_part(state, "blip.visual_encoder."), path)
        width = self.vision.config.hidden_size
        self.text = _text(_part(state, "blip.text_encoder."), folder / CONFIG, width, path)
        self.head = load_stack(_part(state, "mlp."), path)
        known = ("blip.visual_encoder.", "blip.text_encoder.", "mlp.", *_UNUSED)
        foreign = [key for key in state if not key.startswith(known)]
        if foreign:
            raise MargrpoError(
                f"{path}: has unknown {foreign[0]} ({len(foreign)} in all); allowed: ImageReward's"
            )
        self.tokenizer = BertTokenizer(tokenizer, LENGTH)
        self.half = precision == "float16"

    def __call__(self, images: Tensor, prompts: Sequence[str], specs: Specs) -> Tensor:
        """Return one score per image."""
        pixels = crop_center(images, self.image_size, round_up=True)
        for part in (self.vision, self.text, self.head):
            part.to(pixels.device)
        ids, mask = (part.to(pixels.device) for part in self.tokenizer(prompts))
        with torch.autocast(pixels.device.type, torch.float16, enabled=self.half):
            seen = self.vision(pixel_values=pixels).last_hidden_state
            read = self.text(
                input_ids=ids,
                attention_mask=mask,
                encoder_hidden_states=seen,
                encoder_attention_mask=torch.ones(seen.shape[:2], dtype=torch.long, device=seen.device),
                is_decoder=False,
            ).last_hidden_state
        return (self.head(read[:, 0].float()) - MEAN) / STD


def _part(state: State, prefix: str) -> State:
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def _vision(state: State, path: Path) -> tuple[Any, int]:
    """Return the vision tower and its input side; all its sizes follow from the tensors."""
    from transformers import BlipVisionConfig, BlipVisionModel

    patch, positions = state.get("patch_embed.proj.weight"), state.get("pos_embed")
    if patch is None or positions is None:
        raise MargrpoError(f"{path}: lacks blip.visual_encoder; allowed: ImageReward's own file")
    width, side = patch.shape[0], patch.shape[-1] * round((positions.shape[1] - 1) ** 0.5)
    config = BlipVisionConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=len({key.split(".")[1] for key in state if key.startswith("blocks.")}),
        num_attention_heads=max(width // _HEAD_WIDTH, 1),
        image_size=side,
        patch_size=patch.shape[-1],
        hidden_act="gelu",
        layer_norm_eps=1e-6,
    )
    model = BlipVisionModel(config)
    load_strict(model, {_rename(key): value for key, value in state.items()}, path)
    return model.eval().requires_grad_(False), side


def _rename(key: str) -> str:
    """Return a vision tensor's name in transformers."""
    parts = key.split(".")
    if parts[0] == "blocks":
        inner = ".".join(parts[2:])
        for old in ("attn.qkv", "attn.proj", "norm1", "norm2"):
            inner = inner.replace(old, _VISION[old])
        return f"{_VISION['blocks']}.{parts[1]}.{inner}"
    for old in ("cls_token", "pos_embed", "patch_embed.proj", "norm"):
        if key == old or key.startswith(f"{old}."):
            return _VISION[old] + key.removeprefix(old)
    return key


def _text(state: State, config_path: Path, vision_width: int, path: Path) -> nn.Module:
    """Return BLIP's text encoder with cross-attention on the image, as `med_config.json` describes it."""
    from transformers import BlipTextConfig
    from transformers.models.blip.modeling_blip_text import BlipTextModel

    record = read_json(config_path)
    # is_decoder gives the layers their cross-attention; the call itself is not causal
    config = BlipTextConfig(**{**record, "encoder_hidden_size": vision_width, "is_decoder": True})
    model = BlipTextModel(config, add_pooling_layer=False)
    load_strict(model, {k: v for k, v in state.items() if k != "embeddings.position_ids"}, path)
    return model.eval().requires_grad_(False)


@register(
    Info(
        "image_reward",
        "ImageReward v1.0, about N(0, 1); reads the first 35 tokens of a prompt",
        "Apache-2.0 (BLIP: BSD-3-Clause)",
        files=(FILE, CONFIG),
        source=f"{REPOSITORY}; tokenizer files of {TEXT}",
        repository=REPOSITORY,
        batch_size=32,
    )
)
def image_reward(options: RewardOptions) -> Reward:
    """Return the scorer of a folder with the two original files and a BERT tokenizer."""
    folder = weights.folder("image_reward", options.path, REPOSITORY, [FILE, CONFIG])
    tokenizer = folder if options.path else weights.folder("image_reward", None, TEXT, BERT_FILES)
    return ImageReward(folder, tokenizer, options.precision)
