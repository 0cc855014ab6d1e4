"""CLIP and BERT tokenizers from local files, in the layouts that the scorers' weights come with."""

from __future__ import annotations

import gzip
import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from margrpo.errors import MargrpoError
from margrpo.rewards.weights import note

CLIP_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "bpe_simple_vocab_16e6.txt.gz")
BERT_FILES = ("tokenizer.json", "vocab.txt")
CONTEXT = 77
_START, _END = "<|startoftext|>", "<|endoftext|>"
_MERGES = 49152 - 256 - 2


class ClipTokenizer:
    """Prompts to CLIP's token ids, cut at 77 tokens; the last one kept is the end token.

    Args:
        folder: holds `tokenizer.json`, or `vocab.json` and `merges.txt`, or OpenAI's and OpenCLIP's
            `bpe_simple_vocab_16e6.txt.gz`.
        unescape: turn HTML entities into characters first, as OpenAI's and OpenCLIP's tokenizers do and
            transformers' does not.

    Raises:
        MargrpoError: none of them is there.
    """

    def __init__(self, folder: Path, unescape: bool) -> None:
        self._tokenizer, self._unescape = _clip_tokenizer(folder), unescape

    def __call__(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return ids and attention mask, int64 [B, up to 77]."""
        texts = [html.unescape(html.unescape(p)) if self._unescape else p for p in prompts]
        batch = self._tokenizer(texts, padding=True, truncation=True, max_length=CONTEXT, return_tensors="pt")
        return batch["input_ids"], batch["attention_mask"]


class BertTokenizer:
    """Prompts to BERT's token ids, padded and cut to a fixed length, with BLIP's [DEC] and [ENC] added.

    Raises MargrpoError if the folder has neither `vocab.txt` nor `tokenizer.json`.
    """

    def __init__(self, folder: Path, length: int) -> None:
        from transformers import BertTokenizer as Bert

        if not any((folder / name).is_file() for name in BERT_FILES):
            raise MargrpoError(
                f"{folder}: no BERT tokenizer; allowed: a folder with {' or '.join(BERT_FILES)}"
            )
        note(*(folder / name for name in BERT_FILES))
        tokenizer: Any = Bert.from_pretrained(str(folder), local_files_only=True)
        tokenizer.add_special_tokens({"bos_token": "[DEC]", "additional_special_tokens": ["[ENC]"]})
        self._tokenizer, self._length = tokenizer, length

    def __call__(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return ids and attention mask, int64 [B, length]."""
        batch = self._tokenizer(
            list(prompts), padding="max_length", truncation=True, max_length=self._length, return_tensors="pt"
        )
        return batch["input_ids"], batch["attention_mask"]

    def ids(self, *tokens: str) -> list[int]:
        """Return the ids of single tokens; raises MargrpoError for one that the vocabulary lacks."""
        found = self._tokenizer.convert_tokens_to_ids(list(tokens))
        unknown = self._tokenizer.unk_token_id
        for token, index in zip(tokens, found, strict=True):
            if index is None or index == unknown:
                raise MargrpoError(f"the BERT vocabulary has no token {token}; allowed: bert-base-uncased's")
        return [int(index) for index in found]


def _clip_tokenizer(folder: Path) -> Any:
    from transformers import CLIPTokenizer

    note(*(folder / name for name in CLIP_FILES))
    if (folder / "tokenizer.json").is_file() or (folder / "vocab.json").is_file():
        return CLIPTokenizer.from_pretrained(str(folder), local_files_only=True)
    packed = folder / "bpe_simple_vocab_16e6.txt.gz"
    if not packed.is_file():
        raise MargrpoError(
            f"{folder}: no CLIP tokenizer; allowed: a folder with tokenizer.json, or vocab.json and merges.txt, "
            f"or {packed.name}"
        )
    lines = gzip.decompress(packed.read_bytes()).decode("utf-8").split("\n")[1 : _MERGES + 1]
    merges = [tuple(line.split()) for line in lines if line]
    letters = _byte_letters()
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), *("".join(m) for m in merges), _START, _END]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    arguments: dict[str, Any] = {"vocab": vocabulary, "merges": merges}
    return CLIPTokenizer(**arguments, bos_token=_START, eos_token=_END)


def _byte_letters() -> list[str]:
    """Return a printable letter for each byte in the order of CLIP's vocabulary (byte-level BPE)."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + index) for index in range(len(others))]
