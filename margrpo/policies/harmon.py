"""Harmon 0.5B and 1.5B: MAR whose encoder states pass through a causal language model before its decoder.

Source: wusize/Harmon (`src/models/harmon.py`); Wu et al. 2025. As in MAR-GRPO the MAR part learns; language
model, projectors and autoencoder are frozen. The prompt is part of every pass instead of a key-value cache that
outlives it: no pass can see what another one left behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from margrpo.errors import ConfigError, MargrpoError
from margrpo.policies.base import Condition
from margrpo.policies.kl_vae import KlVae
from margrpo.policies.mar import (
    describe_vae,
    described_vae,
    load_vae,
    mar_architecture,
    parse,
    read_vae,
    weight_file,
)
from margrpo.policies.masked import CAUSES, MaskedArchitecture, MaskedPolicy, known_index, own_name
from margrpo.policies.qwen import LLM_CAUSES, QWEN, LlmArchitecture, build_llm
from margrpo.policies.released import Cause, Weights, load_strictly, open_weights, read_json

IMAGE_SIDE = 512
"""Pixels per side that Harmon generates; its position tables are those of 256."""
TEMPLATE = "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
QUESTION = "Generate an image: {prompt}"
NULL_QUESTION = "Generate an image."


TRAINED_FILE = "mar.safetensors"
_TOKENIZER_LIMIT = 64 * 2**20
_MAR_TYPE = {"0.5b": "mar_base", "1.5b": "mar_huge"}


class HarmonPolicy(MaskedPolicy):
    """Harmon behind the policy protocol.

    Args:
        architecture: sizes of the MAR part. llm: sizes of the language model. grid: tokens (rows, columns).
        vae: decoder of the latents, None if the checkpoint has none.
        tokenizer: bytes of a tokenizer.json; empty: prompts cannot be encoded.
    """

    kind = "harmon"
    tokenizer_json: Tensor

    def __init__(
        self,
        architecture: MaskedArchitecture,
        llm: LlmArchitecture,
        grid: tuple[int, int],
        vae: KlVae | None = None,
        tokenizer: bytes = b"",
    ) -> None:
        super().__init__(architecture, grid, vae)
        self.llm_architecture = llm
        hidden, width = llm.hidden_size, architecture.encoder_embed_dim
        self.llm = build_llm(llm)
        with torch.device("meta"):
            self.proj_in = nn.Sequential(nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
            self.proj_out = nn.Sequential(nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, width))
        self.register_buffer(
            "tokenizer_json", torch.frombuffer(bytearray(tokenizer or b"\0"), dtype=torch.uint8)
        )
        self._tokenizer: Tokenizer | None = None
        self.freeze()

    def freeze(self) -> None:
        """Leave the MAR part alone trainable, without the class vectors that Harmon never reads."""
        self.requires_grad_(False)
        self.mar.requires_grad_(True)
        self.mar.class_emb.requires_grad_(False)

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> HarmonPolicy:
        """Return a policy of the sizes that `describe` gave, on the meta device."""
        size = int(description["tokenizer_bytes"])
        if not 0 < size <= _TOKENIZER_LIMIT:
            raise ConfigError.of("tokenizer_bytes", size, f"allowed: 1..{_TOKENIZER_LIMIT}")
        return cls(
            parse(MaskedArchitecture, description["architecture"], "architecture"),
            parse(LlmArchitecture, description["llm"], "llm"),
            _grid(description["grid"], "grid"),
            described_vae(description),
            bytes(size),
        )

    def describe(self) -> dict[str, Any]:
        """Return what a checkpoint stores beside the weights (JSON types)."""
        return {
            "architecture": self.architecture.model_dump(),
            "llm": self.llm_architecture.model_dump(),
            "grid": list(self.grid),
            "tokenizer_bytes": len(self.tokenizer_json),
        } | describe_vae(self.vae)

    def encode(self, prompts: Sequence[str | None]) -> Condition:
        """Return the condition: token ids [B, P], right padded, and their mask (int64, 1 = real).

        Raises:
            ConfigError: the checkpoint came without a tokenizer, or a prompt would end its own turn.
        """
        tokenizer = self.tokenizer()
        rows = [tokenizer.encode(question(prompt), add_special_tokens=False).ids for prompt in prompts]
        return condition_of(rows).to(self.mar.fake_latent.device)

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the checkpoint; ConfigError if it has none or an unreadable one."""
        if self._tokenizer is None:
            text = bytes(self.tokenizer_json.tolist())
            if text == b"\0":
                allowed = "allowed: a folder with the tokenizer.json of its language model"
                raise ConfigError.of("checkpoint", "no tokenizer", allowed)
            self._tokenizer = _parse_tokenizer(text, "tokenizer.json")
        return self._tokenizer

    def backbone(self, tokens: Tensor, known: Tensor, condition: Condition) -> Tensor:
        """Return z [B, L, D]; see `Policy.backbone`."""
        index = known_index(known)
        states = self.mar.encode(tokens, index, self.mar.fake_latent.expand(len(tokens), -1))
        return self.mar.decode(self.fuse(states, condition), index)

    def fuse(self, states: Tensor, condition: Condition) -> Tensor:
        """Return the encoder's states [B, N_b + n, E] after the language model read prompt and states.

        It reads the prompt, the known tokens, then the buffer rows: causal, padding not attended, positions
        counted over real tokens.
        """
        image, count = self.project(states), states.shape[1] - self.mar.buffer_rows
        ids, mask = condition["ids"], condition["mask"]
        mask = torch.cat([mask, mask.new_ones(image.shape[:2])], dim=1)
        hidden = self.llm(
            inputs_embeds=torch.cat([self.llm.embed_tokens(ids), image], dim=1),
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp_min(0),
            use_cache=False,
        ).last_hidden_state[:, ids.shape[1] :]
        return states + self.proj_out(torch.cat([hidden[:, count:], hidden[:, :count]], dim=1))

    def project(self, states: Tensor) -> Tensor:
        """Return the language model's inputs [B, n + N_b, H]: known tokens, then buffer rows."""
        buffers = self.mar.buffer_rows
        return self.proj_in(torch.cat([states[:, buffers:], states[:, :buffers]], dim=1))

    def backbone_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of the MAR encoder and decoder; the language model stays frozen."""
        unused = ("denoiser.", "class_emb.")
        return (value for name, value in self.mar.named_parameters() if not name.startswith(unused))


def question(prompt: str | None) -> str:
    """Return the chat turn that asks for an image; None is the negative prompt of guidance.

    Raises:
        ConfigError: the prompt holds a control token of the template.
    """
    if prompt is not None and ("<|im_" in prompt or "<|endoftext|>" in prompt):
        raise ConfigError.of("prompt", prompt[:80], "allowed: text without control tokens (<|im_start|> ..)")
    asked = NULL_QUESTION if prompt is None else QUESTION.format(prompt=prompt)
    return TEMPLATE.format(question=asked)


def condition_of(rows: Sequence[Sequence[int]]) -> Condition:
    """Return the right-padded condition of token ids, one list per image."""
    width = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row, dtype=torch.int64)
        mask[i, : len(row)] = 1
    return Condition({"ids": ids, "mask": mask})


def read_harmon(path: Path, grid: tuple[int, int] | None = None) -> HarmonPolicy:
    """Return the policy of a released checkpoint: a folder, or its weight file with the others beside it.

    Reads the folder of the Hugging Face form (config.json with llm and mar) and the flat .pth of the first
    release, whose size is recognised by the width of its language model. The autoencoder comes from `vae.*` or
    from kl16.ckpt, the tokenizer from tokenizer.json. A mar.safetensors beside them replaces the MAR part: that is all
    that the released MAR-GRPO code saves.

    Args:
        grid: tokens (rows, columns); default image_shape of config.json, else 512 x 512 pixels.

    Raises:
        MargrpoError: files are missing, damaged, hostile or do not fit the config; one line.
    """
    folder, weights = path if path.is_dir() else path.parent, open_weights(weight_file(path))
    file = folder / "config.json"
    config = read_json(file) if file.is_file() else {}
    llm, architecture = _architectures(config, weights, file)
    side = IMAGE_SIDE // (architecture.vae_stride * architecture.patch_size)
    shape = grid or _grid(config.get("image_shape", [side, side]), f"{file}: image_shape")
    inside = weights.select("vae.")
    vae = load_vae(inside, config) if inside.shapes else read_vae(folder, config)
    policy = HarmonPolicy(architecture, llm, shape, vae, _read_tokenizer(folder / "tokenizer.json"))
    load_strictly(policy.llm, weights.select("llm.model."), LLM_CAUSES)
    trained = folder / TRAINED_FILE
    mar = _bare(open_weights(trained)) if trained.is_file() else weights.select("mar.")
    load_strictly(policy.mar, mar.rename(own_name), CAUSES)
    for name in ("proj_in", "proj_out"):
        causes = [Cause("", "the kind of model", f"llm.hidden_size and encoder_embed_dim ({name})")]
        load_strictly(policy.get_submodule(name), weights.select(f"{name}."), causes)
    known = ("llm.model.", "mar.", "proj_in.", "proj_out.", "vae.", "llm.lm_head.weight")
    stray = [name for name in weights.shapes if not name.startswith(known)]
    if stray:
        raise MargrpoError(f"{weights.source}: has unknown {', '.join(stray[:3])} ({len(stray)} in all)")
    policy.freeze()
    return policy


def _bare(weights: Weights) -> Weights:
    """Return MAR weights under bare names, also if all have the prefix `mar.` or `module.mar.`."""
    for prefix in ("module.mar.", "mar."):
        if weights.shapes and all(name.startswith(prefix) for name in weights.shapes):
            return weights.select(prefix)
    return weights


def sketch_harmon(config: Mapping[str, Any], file: Path) -> HarmonPolicy:
    """Return the policy that a config.json describes, on the meta device and without tokenizer."""
    llm, architecture = _architectures(config, Weights(file, {}, {}), file)
    side = IMAGE_SIDE // (architecture.vae_stride * architecture.patch_size)
    shape = _grid(config.get("image_shape", [side, side]), f"{file}: image_shape")
    return HarmonPolicy(architecture, llm, shape, described_vae({"vae": {}, **config}))


def _architectures(
    config: Mapping[str, Any], weights: Weights, file: Path
) -> tuple[LlmArchitecture, MaskedArchitecture]:
    if config:
        sections = [config.get("llm"), config.get("mar"), config.get("mar_size", {})]
        if not all(isinstance(section, Mapping) for section in sections):
            raise ConfigError(f"{file}: no objects llm and mar; allowed: both, as in Harmon's config")
        llm, mar, size = (dict(section) for section in sections if section is not None)
        return parse(LlmArchitecture, llm, f"{file}: llm"), mar_architecture(mar | size, f"{file}: mar")
    width = weights.shapes.get("llm.model.embed_tokens.weight", [0, 0])[-1]
    name = next((name for name, values in QWEN.items() if values["hidden_size"] == width), None)
    if name is None:
        widths = ", ".join(f"{values['hidden_size']} ({name})" for name, values in QWEN.items())
        raise MargrpoError(
            f"{weights.source}: language model width {width}, no config.json; allowed: {widths}"
        )
    return parse(LlmArchitecture, QWEN[name], name), mar_architecture({"type": _MAR_TYPE[name]}, name)


def _grid(shape: Any, where: str) -> tuple[int, int]:
    if (
        not isinstance(shape, Sequence)
        or [type(n) for n in shape] != [int, int]
        or not 1 <= min(shape) <= max(shape) <= 512
    ):
        raise ConfigError(f"{where}: {shape}; allowed: tokens [rows, columns], 1..512 each")
    return shape[0], shape[1]


def _read_tokenizer(file: Path) -> bytes:
    if not file.is_file():
        return b""
    content = file.read_bytes()
    _parse_tokenizer(content, str(file))
    return content


def _parse_tokenizer(content: bytes, where: str) -> Tokenizer:
    try:
        return Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:  # the library raises bare Exception
        reason = " ".join(str(error).split())[:120]
        raise MargrpoError(f"{where}: not a readable tokenizer ({reason}); download it again") from None
