"""The Qwen2 language model inside Harmon, through transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from transformers import Qwen2Config, Qwen2Model
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

from margrpo.policies.released import Cause

LLM_CAUSES = [
    Cause("embed_tokens", "llm", "llm.vocab_size and llm.hidden_size"),
    Cause("self_attn", "llm.num_hidden_layers", "llm.num_attention_heads and llm.num_key_value_heads"),
    Cause("mlp", "llm.num_hidden_layers", "llm.intermediate_size"),
    Cause("", "llm.num_hidden_layers", "llm.hidden_size"),
]


class LlmArchitecture(BaseModel):
    """What a policy needs of a Qwen2 config; everything else in it is ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, allow_inf_nan=False)

    vocab_size: int = Field(ge=2, le=1_000_000)
    hidden_size: int = Field(ge=8, le=16_384)
    intermediate_size: int = Field(ge=8, le=131_072)
    num_hidden_layers: int = Field(ge=1, le=128)
    num_attention_heads: int = Field(ge=1, le=256)
    num_key_value_heads: int = Field(ge=1, le=256)
    rope_theta: float = Field(1_000_000.0, gt=1.0)
    rms_norm_eps: float = Field(1e-6, gt=0.0, lt=1.0)
    hidden_act: str = Field("silu", pattern="^silu$")
    use_sliding_window: bool = False

    @model_validator(mode="before")
    @classmethod
    def read_rope_parameters(cls, values: Any) -> Any:
        """Take rope_theta from `rope_parameters`, where newer transformers write it."""
        if isinstance(values, Mapping) and isinstance(values.get("rope_parameters"), Mapping):
            return {**values, "rope_theta": values["rope_parameters"].get("rope_theta", 1_000_000.0)}
        return values

    @model_validator(mode="after")
    def heads_divide(self) -> LlmArchitecture:
        """Refuse head counts that do not divide, and sliding windows."""
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        if self.hidden_size % heads or self.hidden_size // heads % 2:
            raise ValueError(f"num_attention_heads\0{heads}\0hidden_size / heads even")
        if heads % groups:
            raise ValueError(f"num_key_value_heads\0{groups}\0a divisor of {heads} attention heads")
        if self.use_sliding_window:
            raise ValueError("use_sliding_window\0true\0false")
        return self


QWEN: dict[str, dict[str, int]] = {
    "0.5b": {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "1.5b": {
        "vocab_size": 151_936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
}
"""Qwen2.5 language models of the public checkpoints, whose .pth files come without a config."""


def build_llm(llm: LlmArchitecture) -> Qwen2Model:
    """Return the language model without output layer, its parameters on the meta device."""
    options: dict[str, Any] = {"attention_dropout": 0.0, "attn_implementation": "sdpa"}
    with torch.device("meta"):
        model = Qwen2Model(Qwen2Config(**llm.model_dump(), **options))
    # the table of its positions is no part of a state dict, and must not stay on the meta device
    model.rotary_emb = Qwen2RotaryEmbedding(model.config)
    return model
