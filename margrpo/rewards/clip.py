"""CLIP towers on transformers: loading the published layouts strictly, and normalised embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from margrpo.rewards.tokenizers import CLIP_FILES, ClipTokenizer
from margrpo.rewards.weights import DERIVED, State, build, hf_model, load_strict, read_json, read_state

HF_FILES = ("config.json", "model.safetensors", "pytorch_model.bin", *CLIP_FILES)

_VIT_H_14 = {
    "projection_dim": 1024,
    "vision_config": {
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "patch_size": 14,
        "image_size": 224,
        "projection_dim": 1024,
        "hidden_act": "gelu",
    },
    "text_config": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "max_position_embeddings": 77,
        "vocab_size": 49408,
        "projection_dim": 1024,
        "hidden_act": "gelu",
        "bos_token_id": 49406,
        "eos_token_id": 49407,
    },
}
_BLOCK = {
    "ln_1.": "layer_norm1.",
    "ln_2.": "layer_norm2.",
    "attn.out_proj.": "self_attn.out_proj.",
    "mlp.c_fc.": "mlp.fc1.",
    "mlp.c_proj.": "mlp.fc2.",
}
_SINGLE = {
    "logit_scale": "logit_scale",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",
    "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "visual.ln_post.weight": "vision_model.post_layernorm.weight",
    "visual.ln_post.bias": "vision_model.post_layernorm.bias",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
}
_TRANSPOSED = {"visual.proj": "visual_projection.weight", "text_projection": "text_projection.weight"}
_TOWERS = {"visual.transformer.resblocks.": "vision_model", "transformer.resblocks.": "text_model"}


class Clip:
    """A CLIP model and its tokenizer: float32, evaluation mode, no gradients.

    `image_size` is the side of its square input in px.
    """

    def __init__(self, model: Any, tokenizer: ClipTokenizer) -> None:
        self.model = model.float().eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.image_size = int(self.model.config.vision_config.image_size)

    def embed_images(self, pixels: Tensor) -> Tensor:
        """Return unit vectors [B, D] of preprocessed images [B, 3, side, side]."""
        self.model.to(pixels.device)
        return F.normalize(self.model.get_image_features(pixel_values=pixels).pooler_output, dim=-1)

    def embed_texts(self, prompts: Sequence[str], device: torch.device) -> Tensor:
        """Return unit vectors [B, D] of prompts; equal prompts are computed once."""
        self.model.to(device)
        distinct = list(dict.fromkeys(prompts))
        ids, mask = self.tokenizer(distinct)
        output = self.model.get_text_features(input_ids=ids.to(device), attention_mask=mask.to(device))
        row = {prompt: index for index, prompt in enumerate(distinct)}
        return F.normalize(output.pooler_output, dim=-1)[[row[prompt] for prompt in prompts]]

    def cosine(self, pixels: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return the cosine [B] of each preprocessed image and its prompt."""
        return (self.embed_images(pixels) * self.embed_texts(prompts, pixels.device)).sum(-1)

    def logit_scale(self) -> Tensor:
        """Return the learned factor of cosines, exp(logit_scale)."""
        return self.model.logit_scale.exp()


def load_hf(folder: Path, unescape: bool) -> Clip:
    """Return the model of a transformers folder (config.json, model.safetensors or pytorch_model.bin).

    `unescape`: of the tokenizer. Raises MargrpoError if a file is missing or its tensors are not those of
    the configuration.
    """
    return Clip(hf_model(folder, "CLIPConfig", "CLIPModel"), ClipTokenizer(folder, unescape))


def load_open_clip(path: Path, config: Path, tokenizer: Path) -> Clip:
    """Return the model of an OpenCLIP checkpoint; ViT-H-14 unless the file `config` describes another.

    `tokenizer`: folder of the tokenizer. Raises MargrpoError if a file is missing or is none of that kind.
    """
    record = read_json(config) if config.is_file() else _VIT_H_14
    model = build("CLIPConfig", "CLIPModel", record, config)
    load_strict(model, convert_open_clip(read_state(path)), path)
    return Clip(model, ClipTokenizer(tokenizer, unescape=True))


def convert_open_clip(state: State) -> State:
    """Return OpenCLIP's tensors under transformers' names; unknown names stay for the strict load to refuse."""
    result: State = {}
    for key, value in state.items():
        if key in _SINGLE:
            result[_SINGLE[key]] = value
        elif key in _TRANSPOSED:
            result[_TRANSPOSED[key]] = value.T.contiguous()
        elif not key.endswith(DERIVED):
            result |= _convert_block(key, value)
    return result


def _convert_block(key: str, value: Tensor) -> State:
    for prefix, tower in _TOWERS.items():
        if not key.startswith(prefix):
            continue
        number, rest = key.removeprefix(prefix).split(".", 1)
        place = f"{tower}.encoder.layers.{number}."
        if rest.startswith("attn.in_proj_"):
            kind = rest.removeprefix("attn.in_proj_")
            parts = zip("qkv", value.chunk(3), strict=True)
            return {f"{place}self_attn.{name}_proj.{kind}": part.contiguous() for name, part in parts}
        for old, new in _BLOCK.items():
            if rest.startswith(old):
                return {place + new + rest.removeprefix(old): value}
    return {key: value}
