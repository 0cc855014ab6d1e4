"""NOVA text-to-image behind the policy protocol (baaivision/NOVA checkpoints)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from margrpo.config import Sampler
from margrpo.errors import ConfigError
from margrpo.policies.base import Condition, Policy
from margrpo.policies.nova import schedule
from margrpo.policies.nova.config import NovaConfig
from margrpo.policies.nova.parts import Finder, Parts, marks_of
from margrpo.policies.nova.positions import unpatchify
from margrpo.policies.nova.text import TextEncoder
from margrpo.policies.nova.transformer import NovaTransformer
from margrpo.policies.nova.vae import LatentDecoder
from margrpo.policies.released import Cause, load_strictly, open_weights, read_json

_TRANSFORMER = "transformer"
_STEM = "diffusion_pytorch_model"
_SIZES = "image_dim or image_stride"
_CAUSES = (
    Cause("video_pos_embed", "rotary_pos_embed", "arch"),
    Cause("motion_embed", "video_base_size (video checkpoints are not supported)", "arch"),
    Cause("image_decoder", "arch[2]", "arch[2] or image_dim"),
    Cause("patch_embed", "arch", f"arch, {_SIZES}"),
    Cause("video_encoder", "arch[0]", "arch[0]"),
    Cause("image_encoder", "arch[1]", "arch[1]"),
    Cause("text_embed", "arch", "text_token_dim or arch"),
    Cause("mask_embed", "arch", "arch"),
)


def commit_counts(tokens: int, steps: int) -> list[int]:
    """Return the tokens that each of `steps` AR steps commits, zeros included: cosine, halves to even."""
    unknown = [round(tokens * math.cos(math.pi * k / (2 * steps))) for k in range(steps + 1)]
    return [before - after for before, after in pairwise(unknown)]


class NovaPolicy(Policy):
    """NOVA's transformer and head; a token is a patch of VAE latents, channel fastest.

    The frozen text encoder and VAE are no part of the module: they are read from the released checkpoint's folder
    when the first prompt or image needs them, and a second copy of the policy (the reference) never does.

    Args:
        config: the mapping in `transformer/config.json`. scheduler: that in `scheduler_config.json`.
        where: name of the config file for messages. marks: of the frozen parts, see `Parts`.

    Weights are on the meta device until `read_nova` or a checkpoint fills them.
    """

    kind = "nova"

    def __init__(
        self,
        config: Mapping[str, Any],
        scheduler: Mapping[str, Any],
        where: str = f"{_TRANSFORMER}/config.json",
        marks: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.config = NovaConfig.parse(config, where)
        schedule.check_scheduler(scheduler)
        self.scheduler = dict(scheduler)
        self.parts = Parts(marks or {})
        self.source = {"config": dict(config), "scheduler": dict(scheduler), "parts": self.parts.marks}
        with torch.device("meta"):
            self.transformer = NovaTransformer(self.config)
        # embeds given frames; text-to-image has none, so it has no gradient
        self.transformer.video_encoder.patch_embed.requires_grad_(False)
        self.tokens = math.prod(self.config.grid)
        self.channels = self.config.channels
        self.text = TextEncoder(self.parts, self.config.text_len, self.config.text_dim)
        self.decoder = LatentDecoder(self.parts, self.config.latent[0], int(config["image_stride"]))

    @property
    def rows(self) -> int:
        """Condition and image tokens; see `Policy.rows`."""
        return self.tokens + math.prod(self.config.video_grid)

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> NovaPolicy:
        """Return a policy with unset weights of the kind that `describe` gave."""
        policy = cls(description["config"], description["scheduler"], marks=description["parts"])
        policy.configure(Sampler())
        return policy

    def describe(self) -> dict[str, Any]:
        """Return what a checkpoint stores beside the weights (JSON types)."""
        return dict(self.source)

    def locate(self, find: Finder) -> None:
        """Look for text encoder, tokenizer and VAE in the folder that `find` returns before other places."""
        self.parts.look(find)

    def encode(self, prompts: Sequence[str | None]) -> Condition:
        """Return the padded language model states "text" [B, L, text_dim] (None, "": padding)."""
        device = self.transformer.text_embed.weight.device
        texts = [prompt for prompt in prompts if prompt]
        states = dict(zip(texts, self.text.states(texts, device), strict=True))
        return self.pad([states[prompt] if prompt else torch.zeros(0, 0) for prompt in prompts])

    def pad(self, states: Sequence[Tensor]) -> Condition:
        """Return the condition of language model states [n, text_dim] per prompt (n may be 0)."""
        embed, width = self.transformer.text_embed, self.config.text_dim
        device = embed.weight.device
        rows = [part.to(device) if len(part) else embed.weight.new_zeros(0, width) for part in states]
        return Condition({"text": embed.pad(rows, self.config.text_len)})

    def prefill(self, condition: Condition) -> Condition:
        """Add the condition tokens "c" [B, Lv, D], which do not depend on the image."""
        text = condition["text"].to(self._dtype)
        return Condition({**condition.tensors, "c": self.transformer.condition(text)})

    def backbone(self, tokens: Tensor, known: Tensor, condition: Condition) -> Tensor:
        """Return z [B, L, D]; see `Policy.backbone`. The condition went through `prefill`."""
        return self.transformer.latents(tokens.to(self._dtype), known, condition["c"])

    def head(self, x: Tensor, t: Tensor, z: Tensor) -> Tensor:
        """Return the velocity noise - x0 (flow) or epsilon (DDPM) [N, C] at x [N, C] under z [N, D].

        t [N] is in [0, 1000]. The result is float32 or wider, whatever the weights are: transitions use it.
        """
        output = self.transformer.image_decoder(x.to(self._dtype), t, z)
        return output.to(torch.promote_types(output.dtype, torch.float32))

    def configure(self, sampler: Sampler) -> None:
        """Set the transition: the checkpoint's scheduler with the sampler's denoising steps."""
        self.transition = schedule.transition(self.scheduler, sampler)
        self.guidance_schedule = sampler.guidance_schedule

    def ar_schedule(self, steps: int) -> list[int]:
        """Return n_k of the cosine schedule: before AR step k, round(L cos(pi k / 2K)) tokens are unknown."""
        if not 1 <= steps <= self.tokens:
            raise ConfigError.of("sampler.ar_steps", steps, f"1..{self.tokens} (the tokens of an image)")
        return [count for count in commit_counts(self.tokens, steps) if count]

    @torch.no_grad()
    def sample_tuned(
        self,
        prompts: Sequence[str],
        order: Tensor,
        initial: Tensor,
        scale: float,
        renorm: float,
        trunc: float,
    ) -> Tensor:
        """See `Policy.sample_tuned`."""
        from margrpo.policies.nova.sampling import NovaGuidance, sample_latent_tokens  # imports this module

        text, null = self.encode(prompts)["text"], self.encode([None] * len(prompts))["text"]
        options = NovaGuidance(scale, renorm=renorm, trunc=trunc)
        return sample_latent_tokens(self, text, null, order, initial, options)

    def decode(self, tokens: Tensor) -> Tensor:
        """Return images [B, 3, H, W] in [0, 1] of tokens [B, L, C]."""
        return self.decoder.decode(unpatchify(tokens, self.config.patch, self.config.grid))

    def backbone_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that write z (the video patch embedding is never used)."""
        for name, parameter in self.transformer.named_parameters():
            if not name.startswith(("image_decoder.", "video_encoder.patch_embed.")):
                yield parameter

    def head_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of the diffusion head."""
        return self.transformer.image_decoder.parameters()

    @property
    def _dtype(self) -> torch.dtype:
        return self.transformer.mask_embed.mask_token.dtype


def read_nova(folder: Path) -> NovaPolicy:
    """Return the policy of a checkpoint folder in the layout of `BAAI/nova-*`, weights as float32.

    Raises:
        MargrpoError: one line, before anything is allocated, if files, names or shapes do not fit.
    """
    file = folder / _TRANSFORMER / "config.json"
    config, scheduler = read_json(file), read_json(folder / "scheduler" / "scheduler_config.json")
    policy = NovaPolicy(config, scheduler, str(file), marks_of(folder))
    policy.locate(lambda: folder)
    single = folder / _TRANSFORMER / f"{_STEM}.safetensors"
    index = single.with_name(f"{single.name}.index.json")
    weights = open_weights(index if index.is_file() and not single.is_file() else single)
    load_strictly(policy.transformer, weights, _CAUSES)
    policy.configure(Sampler())
    return policy
