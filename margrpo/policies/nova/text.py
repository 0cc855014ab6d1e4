"""NOVA's frozen text encoder: the last hidden states of Phi-2, through transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from margrpo.errors import MargrpoError
from margrpo.policies.nova.libraries import quiet
from margrpo.policies.nova.parts import Parts
from margrpo.policies.released import read_json

_BATCH = 16
_KEPT = 8192  # prompts whose states are remembered


class TextEncoder:
    """Hidden states of prompts; read from the folder at the first prompt, and each prompt encoded once.

    Args:
        parts: finds `text_encoder/` and `tokenizer/`.
        length: tokens kept of a prompt. width: of the states, for a check.
    """

    def __init__(self, parts: Parts, length: int, width: int) -> None:
        self.parts, self.length, self.width = parts, length, width
        self.passes = 0
        """Prompts that went through the language model."""
        self._states: dict[str, Tensor] = {}
        self._model: Any = None
        self._tokenizer: Any = None

    def states(self, prompts: Sequence[str], device: torch.device) -> list[Tensor]:
        """Return the states [n, width] (float32, CPU) of each prompt's first n <= length tokens.

        An empty prompt has none. The attention is causal: padding on the right changes nothing.

        Raises:
            MargrpoError: the folder lacks the encoder or the tokenizer, or they do not fit.
        """
        wanted = {prompt: self._states[prompt] for prompt in prompts if prompt in self._states}
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in wanted]
        if new and self._model is None:
            self._load(device)
        for start in range(0, len(new), _BATCH):
            part = new[start : start + _BATCH]
            wanted |= zip(part, self._encode(part, device), strict=True)
        self._states |= wanted
        for oldest in list(self._states)[: max(0, len(self._states) - _KEPT)]:
            del self._states[oldest]
        return [wanted[prompt] for prompt in prompts]

    @torch.no_grad()
    def _encode(self, prompts: Sequence[str], device: torch.device) -> list[Tensor]:
        ids = [row[: self.length] for row in self._tokenizer(list(prompts))["input_ids"]]
        self.passes += len(ids)
        batch = torch.zeros(len(ids), max(map(len, ids)), dtype=torch.int64)
        if batch.shape[1] == 0:
            return [torch.zeros(0, self.width) for _ in ids]
        for row, values in zip(batch, ids, strict=True):
            row[: len(values)] = torch.tensor(values)
        states = self._model.to(device)(input_ids=batch.to(device)).last_hidden_state.float().cpu()
        return [row[: len(values)].clone() for row, values in zip(states, ids, strict=True)]

    def _load(self, device: torch.device) -> None:
        from transformers import PhiConfig, PhiModel, PreTrainedTokenizerFast  # seconds to import

        encoder = self.parts.folder("text_encoder")
        tokenizer = self.parts.folder("tokenizer") / "tokenizer.json"
        read_json(tokenizer)
        width = read_json(encoder / "config.json").get("hidden_size")
        if width != self.width:
            allowed = f"allowed: {self.width}, the text_token_dim of transformer/config.json"
            raise MargrpoError(f"{encoder}/config.json: hidden_size {width}; {allowed}")
        try:
            self._tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer))
            with quiet():
                loaded: Any = PhiModel.from_pretrained(
                    encoder,
                    config=PhiConfig.from_pretrained(encoder, local_files_only=True),
                    local_files_only=True,
                    use_safetensors=True,
                    output_loading_info=True,
                )
        except Exception as error:  # what these libraries raise for damaged files is not one type
            raise MargrpoError(
                f"{encoder}: not loadable ({_one_line(error)}); fetch the folder again"
            ) from error
        model, report = loaded
        unexpected = [key for key in report["unexpected_keys"] if not key.startswith("lm_head.")]
        for label, names in (("missing", report["missing_keys"]), ("unexpected", unexpected)):
            if names:
                first = ", ".join(sorted(map(str, names))[:3])
                raise MargrpoError(
                    f"{encoder}: {len(names)} tensors {label} ({first}); check its config.json"
                )
        if device.type == "cpu":
            model = model.float()  # half precision crawls on CPUs
        self._model = model.eval().requires_grad_(False)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
