"""The embedded policy: a text-conditioned MAR of about half a million weights for 32x32 scenes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from margrpo import seeds
from margrpo.config import Architecture, Sampler
from margrpo.diffusion import FlowSDE
from margrpo.errors import ConfigError
from margrpo.policies.base import Condition, Policy
from margrpo.policies.layers import AdaLNHead, AttentionBlock
from margrpo.scenes.grammar import CANVAS, CELL, MAX_WORDS, VOCABULARY, tokenize

TOKENS = (CANVAS // CELL) ** 2
PIXELS = 3 * CELL * CELL
NULL_WORD = len(VOCABULARY)
"""Word id of the learned null prompt of classifier-free guidance."""
TIME_SCALE = 1000.0
"""The head's timestep features expect t in [0, 1000], as the real MAR heads do."""
TIME_FEATURES = 64
_WHITENING = 0.5


class PatchTokenizer(nn.Module):
    """Linear tokenizer: each 8x8x3 patch -> its first C principal components, half-whitened.

    Half-whitening scales a component by its standard deviation to the power -1/2: components keep part of
    their order of importance. One common factor makes the mean variance 1, as the noise of the flow expects.
    """

    mean: Tensor
    analysis: Tensor
    synthesis: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(PIXELS))
        self.register_buffer("analysis", torch.zeros(channels, PIXELS))
        self.register_buffer("synthesis", torch.zeros(PIXELS, channels))

    def fit(self, images: Tensor) -> None:
        """Set the components from images [B, 3, 32, 32] in [0, 1] (exact, float64, signs fixed)."""
        patches = self._patches(images).flatten(0, 1).double()
        mean = patches.mean(dim=0)
        covariance = torch.cov((patches - mean).T)
        variances, vectors = torch.linalg.eigh(covariance)
        channels = len(self.analysis)
        # eigh sorts upwards; of the two signs take the one whose largest entry is positive
        components = vectors.flip(dims=[1])[:, :channels].T
        largest = components.gather(1, components.abs().argmax(dim=1, keepdim=True))
        components = components * largest.sign()
        deviations = variances.flip(dims=[0])[:channels].clamp_min(1e-12).sqrt()
        scale = deviations.pow(-_WHITENING)
        scale = scale / (scale * deviations).square().mean().sqrt()
        self._assign(mean, components, scale)

    def set_orthonormal(self, generator: torch.Generator) -> None:
        """Set random orthonormal components around gray (before `fit`)."""
        channels = len(self.analysis)
        basis, _ = torch.linalg.qr(torch.randn(PIXELS, channels, generator=generator, dtype=torch.float64))
        self._assign(torch.full((PIXELS,), 0.5), basis.T, torch.ones(channels, dtype=torch.float64))

    def encode(self, images: Tensor) -> Tensor:
        """Return tokens [B, L, C] of images [B, 3, 32, 32] in [0, 1]."""
        return (self._patches(images) - self.mean) @ self.analysis.T

    def decode(self, tokens: Tensor) -> Tensor:
        """Return images [B, 3, 32, 32], clamped to [0, 1], of tokens [B, L, C]."""
        side = CANVAS // CELL
        patches = tokens @ self.synthesis.T + self.mean
        grid = patches.view(-1, side, side, 3, CELL, CELL).permute(0, 3, 1, 4, 2, 5)
        return grid.reshape(-1, 3, CANVAS, CANVAS).clamp(0.0, 1.0)

    def _assign(self, mean: Tensor, components: Tensor, scale: Tensor) -> None:
        self.mean.copy_(mean)
        self.analysis.copy_(components * scale[:, None])
        self.synthesis.copy_((components / scale[:, None]).T)

    @staticmethod
    def _patches(images: Tensor) -> Tensor:
        """Return [B, L, 3 * 8 * 8]: patches row by row, each (color, row, column)."""
        side = CANVAS // CELL
        grid = images.reshape(-1, 3, side, CELL, side, CELL)
        return grid.permute(0, 2, 4, 1, 3, 5).reshape(len(images), TOKENS, PIXELS)


class TinyBackbone(nn.Module):
    """Transformer over [words, image tokens]: known tokens where given, a mask vector elsewhere -> z."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        width, heads = architecture.width, architecture.heads
        self.words = nn.Embedding(len(VOCABULARY) + 1, width)
        self.word_positions = nn.Parameter(torch.zeros(MAX_WORDS, width))
        self.token_proj = nn.Linear(architecture.channels, width)
        self.mask_token = nn.Parameter(torch.zeros(width))
        self.token_positions = nn.Parameter(torch.zeros(TOKENS, width))
        self.blocks = nn.ModuleList(AttentionBlock(width, heads) for _ in range(architecture.depth))
        self.norm = nn.LayerNorm(width, eps=1e-6)

    def forward(self, tokens: Tensor, known: Tensor, words: Tensor) -> Tensor:
        """Return z [B, L, D] for tokens [B, L, C], known [B, L] (bool) and word ids [B, W] (0 = padding)."""
        given = known[..., None]
        # the content of unknown tokens must not matter, not even if it is not finite
        image = torch.where(given, self.token_proj(tokens.masked_fill(~given, 0.0)), self.mask_token)
        h = torch.cat([self.words(words) + self.word_positions, image + self.token_positions], dim=1)
        mask = torch.zeros(len(h), 1, 1, h.shape[1], dtype=h.dtype, device=h.device)
        mask[:, 0, 0, :MAX_WORDS].masked_fill_(words == 0, -math.inf)
        for block in self.blocks[:-1]:
            h = block(h, mask)
        return self.norm(self.blocks[-1](h, mask, start=MAX_WORDS))


class TinyPolicy(Policy):
    """Patch tokenizer, backbone and AdaLN flow head behind the policy protocol; all weights float32.

    Args:
        architecture: the sizes.
        seed: of the initial weights (a checkpoint replaces them).
    """

    kind = "tiny"
    tokens = TOKENS

    def __init__(self, architecture: Architecture | None = None, seed: int = 0) -> None:
        super().__init__()
        self.architecture = architecture or Architecture()
        self.channels = self.architecture.channels
        with torch.random.fork_rng(devices=[]):  # torch's own initialisation draws from the global generator
            self.tokenizer = PatchTokenizer(self.channels)
            self.transformer = TinyBackbone(self.architecture)
            self.denoiser = AdaLNHead(
                channels=self.channels,
                outputs=self.channels,
                condition=self.architecture.width,
                width=self.architecture.head_width,
                depth=self.architecture.head_depth,
                features=TIME_FEATURES,
            )
        self._initialize(seeds.generator("tiny", seed))
        self.configure(Sampler())

    @property
    def rows(self) -> int:
        """Words and image tokens; see `Policy.rows`."""
        return MAX_WORDS + TOKENS

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> TinyPolicy:
        """Return a policy of the sizes that `describe` gave; ConfigError if this version's words differ."""
        if list(description.get("vocabulary", [])) != list(VOCABULARY):
            raise ConfigError("made for another vocabulary; pretrain again with this version")
        return cls(Architecture.model_validate(description["architecture"]))

    def describe(self) -> dict[str, Any]:
        """Return what a checkpoint stores beside the weights (JSON types)."""
        return {"architecture": self.architecture.model_dump(), "vocabulary": list(VOCABULARY)}

    def encode(self, prompts: Sequence[str | None]) -> Condition:
        """Return the condition of prompts of the scene grammar: word ids [B, 8], int64, 0 = padding.

        Raises ConfigError for a word outside the grammar.
        """
        words = torch.zeros(len(prompts), MAX_WORDS, dtype=torch.int64)
        for row, prompt in zip(words, prompts, strict=True):
            ids = [NULL_WORD] if prompt is None else tokenize(prompt)
            row[: len(ids)] = torch.tensor(ids)
        return Condition({"words": words})

    def backbone(self, tokens: Tensor, known: Tensor, condition: Condition) -> Tensor:
        """Return z [B, L, D]; see `Policy.backbone`."""
        return self.transformer(tokens, known, condition["words"])

    def head(self, x: Tensor, t: Tensor, z: Tensor) -> Tensor:
        """Return the velocity eps - x0 [N, C] at x [N, C], t [N] = sigma in [0, 1], z [N, D]."""
        return self.denoiser(x, t * TIME_SCALE, z)

    def configure(self, sampler: Sampler) -> None:
        """Set the flow SDE with equal steps of sigma from 1 to 0; ConfigError for switches of a DDPM."""
        if sampler.temperature != 1.0:
            allowed = "allowed: 1.0 (the noise of a flow is sampler.eta)"
            raise ConfigError.of("sampler.temperature", sampler.temperature, allowed)
        sigmas = torch.linspace(1.0, 0.0, sampler.denoising_steps + 1, dtype=torch.float64)
        self.transition = FlowSDE(sigmas, sampler.eta, sampler.final_step)
        self.guidance_schedule = sampler.guidance_schedule

    def ar_schedule(self, steps: int) -> list[int]:
        """Return n_k of the cosine schedule: before AR step k, round(L cos(pi k / 2K)) tokens are unknown."""
        if not 1 <= steps <= TOKENS:
            raise ConfigError.of("sampler.ar_steps", steps, f"1..{TOKENS} (the tokens of an image)")
        unknown = [round(TOKENS * math.cos(math.pi * k / (2 * steps))) for k in range(steps + 1)]
        return [before - after for before, after in pairwise(unknown) if before > after]

    def decode(self, tokens: Tensor) -> Tensor:
        """Return images [B, 3, 32, 32] in [0, 1] of tokens [B, L, C]."""
        return self.tokenizer.decode(tokens)

    def backbone_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of the transformer, its embeddings and the null prompt."""
        return self.transformer.parameters()

    def head_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of the diffusion head."""
        return self.denoiser.parameters()

    @torch.no_grad()
    def _initialize(self, generator: torch.Generator) -> None:
        """Xavier weights, zero biases, small embeddings; the head starts by predicting 0 (adaLN-zero)."""
        self.tokenizer.set_orthonormal(generator)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight, generator=generator)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm) and module.elementwise_affine:
                nn.init.ones_(module.weight)
                nn.init.zeros_(module.bias)
        trunk = self.transformer
        for table in (trunk.words.weight, trunk.word_positions, trunk.mask_token, trunk.token_positions):
            nn.init.normal_(table, std=0.1, generator=generator)
        self.denoiser.zero_outputs()
