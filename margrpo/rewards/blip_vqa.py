"""T2I-CompBench's attribute score by asking BLIP-VQA about every noun phrase (behind a `Vqa` protocol).

The published score asks the original checkpoint at 480 px; transformers' conversion of it takes 384 px, so the
name says which one answered. Metric names can't hold the usual "@": MLflow refuses it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from margrpo.benchmarks.rules.t2i_attribute import attribute_clean, questions
from margrpo.config import RewardOptions
from margrpo.rewards import weights
from margrpo.rewards.base import Info, Reward, Specs, register
from margrpo.rewards.images import normalize, to_pil
from margrpo.rewards.tokenizers import BERT_FILES, BertTokenizer

REPOSITORY = "Salesforce/blip-vqa-base"
LENGTH = 35
"""Tokens of a question that are read."""
_WORDS = 50
_REMOVED = str.maketrans("", "", '.!"()*#:;~')
_TIES = {
    "text_decoder.cls.predictions.decoder.weight": "text_decoder.bert.embeddings.word_embeddings.weight",
    "text_decoder.cls.predictions.decoder.bias": "text_decoder.cls.predictions.bias",
}

_log = logging.getLogger("margrpo.rewards")


class Vqa(Protocol):
    """Answers yes/no questions about images."""

    def __call__(self, images: Tensor, questions: Sequence[Sequence[str]]) -> list[list[float]]:
        """Return P(yes) of every question of every image [B, 3, H, W] in [0, 1]."""
        ...


class BlipVqa:
    """BLIP-VQA of a transformers folder; P(yes) = p_yes / (p_yes + p_no) at the answer's first token."""

    def __init__(self, folder: Path, precision: str) -> None:
        self.model: Any = weights.hf_model(folder, "BlipConfig", "BlipForQuestionAnswering", _TIES)
        self.side = int(self.model.config.vision_config.image_size)
        self.tokenizer = BertTokenizer(folder, LENGTH)
        self.half = precision == "float16"
        self.start, self.encode = self.tokenizer.ids("[DEC]", "[ENC]")
        self.yes, self.no = self.tokenizer.ids("yes", "no")

    @torch.no_grad()
    def __call__(self, images: Tensor, questions: Sequence[Sequence[str]]) -> list[list[float]]:
        """Return P(yes) for each image's questions."""
        owner = [index for index, asked in enumerate(questions) for _ in asked]
        if not owner:
            return [[] for _ in questions]
        texts = [normalize_question(text) for asked in questions for text in asked]
        self.model.to(images.device)
        ids, mask = (part.to(images.device) for part in self.tokenizer(texts))
        ids[:, 0] = self.encode  # transformers leaves [CLS] there; the original does not
        with torch.autocast(images.device.type, torch.float16, enabled=self.half):
            seen = self.model.vision_model(pixel_values=self._pixels(images)).last_hidden_state[owner]
            asked_states = self.model.text_encoder(
                input_ids=ids,
                attention_mask=mask,
                encoder_hidden_states=seen,
                encoder_attention_mask=torch.ones(seen.shape[:2], dtype=torch.long, device=seen.device),
            ).last_hidden_state
            logits = self._first_logits(asked_states, mask.sum(1))
        p_yes = torch.softmax(logits[:, [self.no, self.yes]].float(), dim=-1)[:, 1].tolist()
        answers = iter(p_yes)
        return [[next(answers) for _ in asked] for asked in questions]

    def _first_logits(self, asked: Tensor, lengths: Tensor) -> Tensor:
        """Return the logits [N, vocabulary] of each answer's first token for encoded questions [N, L, D].

        Questions of equal length go together without their padding: the cross-attention of transformers'
        BLIP (5.24) ignores the mask that it is given.
        """
        rows: Tensor | None = None
        for length in lengths.unique().tolist():
            same = lengths == length
            part = self.model.text_decoder(
                input_ids=torch.full((int(same.sum()), 1), self.start, device=asked.device),
                encoder_hidden_states=asked[same, :length],
            ).logits[:, 0]
            rows = part.new_empty(len(asked), part.shape[-1]) if rows is None else rows
            rows[same] = part
        assert rows is not None  # there are questions
        return rows

    def _pixels(self, images: Tensor) -> Tensor:
        """Return images squeezed to the model's square, bicubic on 8-bit pictures, normalised."""
        size = self.side, self.side
        pictures = [picture.resize(size, Image.Resampling.BICUBIC) for picture in to_pil(images)]
        stacked = torch.from_numpy(np.stack([np.asarray(p) for p in pictures])).permute(0, 3, 1, 2)
        return normalize(stacked.to(images.device).float() / 255)


def normalize_question(text: str) -> str:
    """Return a question as BLIP's own code prepares it: lower case, some punctuation dropped, 50 words."""
    return " ".join(text.lower().translate(_REMOVED).rstrip().split(" ")[:_WORDS])


class AttributeReward:
    """Product of P(yes) over "<noun phrase>?" for each of `spec["noun_phrases"]`: float [B] in [0, 1].

    NaN, with a warning, where a spec has no noun phrases.
    """

    def __init__(self, vqa: Vqa) -> None:
        self.vqa = vqa

    def __call__(self, images: Tensor, prompts: Sequence[str], specs: Specs) -> Tensor:
        """Return one score per image."""
        asked = [questions(spec.get("noun_phrases") or []) for spec in specs]
        for prompt in sorted({p for p, some in zip(prompts, asked, strict=True) if not some}):
            _log.warning(
                "margrpo: reward t2i_attribute.blip: skipped %r: its spec has no noun_phrases", prompt
            )
        answers = self.vqa(images, asked)
        scores = [attribute_clean(p) if p else float("nan") for p in answers]
        return torch.tensor(scores, dtype=torch.float32)


@register(
    Info(
        "t2i_attribute.blip",
        "T2I-CompBench's color, shape, texture score: BLIP-VQA at 384 px asked about each noun phrase",
        "BSD-3-Clause",
        low=0.0,
        high=1.0,
        files=("config.json",),
        source=f"{REPOSITORY}, in transformers' layout with its BERT vocabulary",
        repository=REPOSITORY,
        batch_size=16,
    )
)
def blip_vqa(options: RewardOptions) -> Reward:
    """Return the scorer of a transformers folder; specs need `noun_phrases`."""
    files = ("config.json", "model.safetensors", "pytorch_model.bin", *BERT_FILES)
    folder = weights.folder("t2i_attribute.blip", options.path, REPOSITORY, files)
    return AttributeReward(BlipVqa(folder, options.precision))
