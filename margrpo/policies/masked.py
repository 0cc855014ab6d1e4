"""What MAR and Harmon share: the masked encoder and decoder, the diffusion head, schedule and latents.

Source: LTH14/mar `models/mar.py`; Li et al. 2024. Dropout is left out: a policy must score a transition under
the distribution that drew it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from margrpo.config import Sampler, Section
from margrpo.ddpm import DDPM, cosine_alphas_cumprod, respace
from margrpo.errors import ConfigError
from margrpo.policies.base import Policy
from margrpo.policies.kl_vae import KlVae
from margrpo.policies.layers import AdaLNHead, AttentionBlock
from margrpo.policies.released import Cause

CAUSES = [
    Cause("encoder_blocks", "encoder_depth", "encoder_embed_dim and mlp_ratio"),
    Cause("decoder_blocks", "decoder_depth", "decoder_embed_dim and mlp_ratio"),
    Cause("res_blocks", "diffloss_d", "diffloss_w"),
    Cause("denoiser", "the head", "diffloss_w, vae_embed_dim and patch_size"),
    Cause("class_emb", "class_num", "class_num and encoder_embed_dim"),
    Cause("pos_embed", "the position tables", "img_size, vae_stride, patch_size and buffer_size"),
    Cause("z_proj", "the encoder", "encoder_embed_dim, vae_embed_dim and patch_size"),
    Cause("", "the kind of model", "encoder_embed_dim and decoder_embed_dim"),
]
TRAINING_KEYS = frozenset(
    {
        "mask_ratio_min",
        "label_drop_prob",
        "attn_dropout",
        "proj_dropout",
        "diffusion_batch_mul",
        "grad_checkpointing",
    }
)
"""Keys of released configs that only pretraining reads."""

_Width = Field(ge=4, le=16_384)
_Depth = Field(ge=1, le=128)


class MaskedArchitecture(Section):
    """Constructor arguments of the released MAR that a policy needs."""

    img_size: int = Field(256, ge=8, le=8192, description="pixels per side of the native grid")
    vae_stride: int = Field(16, ge=1, le=64, description="pixels per latent")
    patch_size: int = Field(1, ge=1, le=16, description="latents per side of a token")
    vae_embed_dim: int = Field(16, ge=1, le=256, description="latent channels")
    encoder_embed_dim: int = _Width
    encoder_depth: int = _Depth
    encoder_num_heads: int = Field(ge=1, le=256)
    decoder_embed_dim: int = _Width
    decoder_depth: int = _Depth
    decoder_num_heads: int = Field(ge=1, le=256)
    mlp_ratio: float = Field(4.0, gt=0.0, le=32.0, description="width of the MLP over that of the block")
    class_num: int = Field(1000, ge=1, le=1_000_000, description="classes")
    buffer_size: int = Field(64, ge=1, le=4096, description="condition rows before the image tokens")
    diffloss_d: int = Field(ge=1, le=128, description="blocks of the head")
    diffloss_w: int = Field(ge=4, le=16_384, description="width of the head")
    num_sampling_steps: str = Field("100", max_length=4000, description="the sampler's own spacing")

    @model_validator(mode="after")
    def parts_divide(self) -> MaskedArchitecture:
        """Refuse sizes that do not divide."""
        if self.img_size % (self.vae_stride * self.patch_size):
            raise ValueError(f"img_size\0{self.img_size}\0a multiple of vae_stride * patch_size")
        for part in ("encoder", "decoder"):
            width, heads = getattr(self, f"{part}_embed_dim"), getattr(self, f"{part}_num_heads")
            if width % heads:
                raise ValueError(f"{part}_num_heads\0{heads}\0a divisor of {part}_embed_dim {width}")
        respace(self.num_sampling_steps)
        return self

    @property
    def side(self) -> int:
        """Tokens per side of the native grid."""
        return self.img_size // (self.vae_stride * self.patch_size)

    @property
    def channels(self) -> int:
        """C: channels of a token."""
        return self.vae_embed_dim * self.patch_size**2


class MaskedTransformer(nn.Module):
    """MAR encoder over [buffer, known tokens], decoder over [buffer, all tokens], and the diffusion head.

    Args:
        architecture: the sizes. grid: tokens (rows, columns); other than the native square, the position
            tables are interpolated.
    """

    def __init__(self, architecture: MaskedArchitecture, grid: tuple[int, int]) -> None:
        super().__init__()
        a = architecture
        self.grid, self.side, self.buffer_rows = grid, a.side, a.buffer_size
        encoder, decoder, length = a.encoder_embed_dim, a.decoder_embed_dim, a.side**2
        self.class_emb = nn.Embedding(a.class_num, encoder)
        self.fake_latent = nn.Parameter(torch.empty(1, encoder))
        self.z_proj = nn.Linear(a.channels, encoder)
        self.z_proj_ln = nn.LayerNorm(encoder, eps=1e-6)
        self.encoder_pos_embed_learned = nn.Parameter(torch.empty(1, a.buffer_size + length, encoder))
        self.encoder_blocks = nn.ModuleList(
            AttentionBlock(encoder, a.encoder_num_heads, a.mlp_ratio) for _ in range(a.encoder_depth)
        )
        self.encoder_norm = nn.LayerNorm(encoder, eps=1e-6)
        self.decoder_embed = nn.Linear(encoder, decoder)
        self.mask_token = nn.Parameter(torch.empty(1, 1, decoder))
        self.decoder_pos_embed_learned = nn.Parameter(torch.empty(1, a.buffer_size + length, decoder))
        self.decoder_blocks = nn.ModuleList(
            AttentionBlock(decoder, a.decoder_num_heads, a.mlp_ratio) for _ in range(a.decoder_depth)
        )
        self.decoder_norm = nn.LayerNorm(decoder, eps=1e-6)
        self.diffusion_pos_embed_learned = nn.Parameter(torch.empty(1, length, decoder))
        self.denoiser = AdaLNHead(a.channels, 2 * a.channels, decoder, a.diffloss_w, a.diffloss_d)

    def encode(self, tokens: Tensor, index: Tensor, buffer: Tensor) -> Tensor:
        """Return the encoder's states [B, N_b + n, E].

        Args:
            tokens: [B, L, C]. index: int64 [B, n], the known tokens in raster order.
            buffer: [B, E], the vector that fills every buffer row.
        """
        rows = torch.arange(len(index), device=index.device)[:, None]
        h = torch.cat(
            [buffer[:, None].expand(-1, self.buffer_rows, -1), self.z_proj(tokens[rows, index])], dim=1
        )
        positions = self.positions(self.encoder_pos_embed_learned).expand(len(index), -1, -1)
        table = torch.cat(
            [positions[:, : self.buffer_rows], positions[rows, self.buffer_rows + index]], dim=1
        )
        h = self.z_proj_ln(h + table)
        for block in self.encoder_blocks:
            h = block(h)
        return self.encoder_norm(h)

    def decode(self, states: Tensor, index: Tensor) -> Tensor:
        """Return z [B, L, D] for the encoder's states [B, N_b + n, E] of the known tokens `index` [B, n]."""
        h = self.decoder_embed(states)
        length = self.grid[0] * self.grid[1]
        image = (
            self.mask_token.to(h.dtype)
            .expand(len(h), length, -1)
            .scatter(1, index[..., None].expand(-1, -1, h.shape[-1]), h[:, self.buffer_rows :])
        )
        h = torch.cat([h[:, : self.buffer_rows], image], dim=1) + self.positions(
            self.decoder_pos_embed_learned
        )
        for block in self.decoder_blocks[:-1]:
            h = block(h)
        h = self.decoder_norm(self.decoder_blocks[-1](h, start=self.buffer_rows))
        return h + self.positions(self.diffusion_pos_embed_learned)

    def positions(self, table: Tensor) -> Tensor:
        """Return a position table [1, (N_b +) L', X] for the image's grid, bilinear as in Harmon."""
        rows, columns = self.grid
        if self.grid == (self.side, self.side):
            return table
        buffer = table[:, : table.shape[1] - self.side**2]
        native = table[:, buffer.shape[1] :].transpose(1, 2).unflatten(2, (self.side, self.side))
        image = functional.interpolate(native, (rows, columns), mode="bilinear", align_corners=False)
        return torch.cat([buffer, image.flatten(2).transpose(1, 2)], dim=1)


def own_name(released: str) -> str:
    """Return our name of a released MAR parameter."""
    name = re.sub(r"(_blocks\.\d+)\.attn\.", r"\1.", released)
    name = re.sub(r"(_blocks\.\d+)\.mlp\.fc1\.", r"\1.mlp.0.", name)
    name = re.sub(r"(_blocks\.\d+)\.mlp\.fc2\.", r"\1.mlp.2.", name)
    return name.replace("diffloss.net.", "denoiser.")


def known_index(known: Tensor) -> Tensor:
    """Return int64 [B, n]: the known tokens of each image in raster order, for known bool [B, L].

    Raises:
        ValueError: the images know different numbers of tokens.
    """
    counts = known.sum(1)
    if (counts != counts[0]).any():
        raise ValueError(f"known tokens per image: {counts.tolist()}; allowed: the same number in a batch")
    return known.nonzero()[:, 1].view(len(known), int(counts[0]))


class MaskedPolicy(Policy):
    """Common part of MAR and Harmon: `mar` and `vae` on the meta device until weights are loaded.

    Args:
        architecture: MAR's sizes. grid: tokens (rows, columns). vae: the decoder of latents.
    """

    mar: MaskedTransformer
    vae: KlVae | None

    def __init__(self, architecture: MaskedArchitecture, grid: tuple[int, int], vae: KlVae | None) -> None:
        super().__init__()
        self.architecture, self.grid = architecture, grid
        self.tokens, self.channels = grid[0] * grid[1], architecture.channels
        with torch.device("meta"):
            self.mar = MaskedTransformer(architecture, grid)
        self.vae = vae
        self.transition = spaced_ddpm(architecture.num_sampling_steps)

    @property
    def rows(self) -> int:
        """Buffer rows and image tokens; see `Policy.rows`."""
        return self.architecture.buffer_size + self.tokens

    def head(self, x: Tensor, t: Tensor, z: Tensor) -> Tensor:
        """Return [epsilon | v] [N, 2C] at x [N, C], t [N] in 0..999, z [N, D]."""
        return self.mar.denoiser(x, t, z)

    def configure(self, sampler: Sampler) -> None:
        """Set the respaced DDPM: the checkpoint's own spacing if it has as many steps, else equal steps.

        Raises:
            ConfigError: switches of the flow SDE, or more steps than the process has.
        """
        defaults = Sampler()
        if sampler.final_step != "deterministic":
            raise ConfigError.of("sampler.final_step", sampler.final_step, "allowed: deterministic (DDPM)")
        if sampler.eta != defaults.eta:
            allowed = f"allowed: {defaults.eta} (a DDPM takes its noise from its tables)"
            raise ConfigError.of("sampler.eta", sampler.eta, allowed)
        own = self.architecture.num_sampling_steps
        steps = sampler.denoising_steps
        spacing = own if len(respace(own)) == steps else str(steps)
        self.transition = spaced_ddpm(spacing, sampler.temperature)
        self.guidance_schedule = sampler.guidance_schedule

    def ar_schedule(self, steps: int) -> list[int]:
        """Return n_k of the cosine schedule; at least one token stays unknown until the last step.

        More steps than tokens are allowed: those without a token are dropped (as in the source).
        """
        if steps < 1:
            raise ConfigError.of("sampler.ar_steps", steps, "allowed: at least 1")
        unknown, counts = self.tokens, []
        for k in range(1, steps):
            after = math.floor(self.tokens * math.cos(math.pi / 2 * k / steps))
            after = max(1, min(unknown - 1, after))
            counts.append(unknown - after)
            unknown = after
        return [count for count in [*counts, unknown] if count > 0]

    def latents(self, tokens: Tensor) -> Tensor:
        """Return latents [B, c, h, w], still scaled, of tokens [B, L, C] whose channels are (c, row, column)."""
        p, (rows, columns) = self.architecture.patch_size, self.grid
        grid = tokens.view(len(tokens), rows, columns, -1, p, p)
        return grid.permute(0, 3, 1, 4, 2, 5).reshape(len(tokens), -1, rows * p, columns * p)

    def patches(self, latents: Tensor) -> Tensor:
        """Return tokens [B, L, C] of latents [B, c, h, w]: the inverse of `latents`."""
        p, (rows, columns) = self.architecture.patch_size, self.grid
        grid = latents.view(len(latents), -1, rows, p, columns, p)
        return grid.permute(0, 2, 4, 1, 3, 5).reshape(len(latents), rows * columns, -1)

    def decode(self, tokens: Tensor) -> Tensor:
        """Return images [B, 3, H, W] in [0, 1] of tokens [B, L, C].

        Raises:
            ConfigError: the checkpoint came without an autoencoder.
        """
        if self.vae is None:
            allowed = (
                "allowed: a folder with kl16.ckpt, kl16.safetensors or vae.safetensors beside the weights"
            )
            raise ConfigError.of("checkpoint", "no autoencoder", allowed)
        return (self.vae.decode(self.latents(tokens) / self.vae.scale) / 2 + 0.5).clamp(0.0, 1.0)

    def head_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of the diffusion head."""
        return self.mar.denoiser.parameters()


def spaced_ddpm(spacing: str, temperature: float = 1.0) -> DDPM:
    """Return the learned-range DDPM of MAR: cosine table of 1000 steps, respaced."""
    return DDPM(cosine_alphas_cumprod(), respace(spacing), "learned_range", temperature)
