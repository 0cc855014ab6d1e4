"""The NOVA transformer: text -> condition tokens c, known image tokens -> latents z."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from margrpo.policies.nova.config import TEXT_ROWS, NovaConfig
from margrpo.policies.nova.modules import DiffusionHead, Encoder, MaskEmbed, Rotation, TextEmbed, TimeEmbed
from margrpo.policies.nova.positions import coordinates, rotation, space_embedding


class NovaTransformer(nn.Module):
    """Video encoder, image encoder and diffusion head; state-dict names are those of the checkpoints."""

    def __init__(self, config: NovaConfig) -> None:
        super().__init__()
        self.config = config
        channels, width, heads = config.latent[0], config.width, config.heads
        self.video_encoder = Encoder(channels, width, heads, config.video_depth, 2 * config.patch)
        self.image_encoder = Encoder(channels, width, heads, config.image_depth, config.patch)
        self.image_decoder = DiffusionHead(
            channels, width, config.head_width, config.head_depth, config.patch
        )
        self.mask_embed = MaskEmbed(width)
        self.text_embed = TextEmbed(config.text_dim, width, TEXT_ROWS)
        if not config.rotary:
            self.video_pos_embed = TimeEmbed(width)

    def condition(self, text: Tensor) -> Tensor:
        """Return the condition tokens c [B, Lv, D] of padded text states [B, L, text_dim]."""
        rows, columns = self.config.video_grid
        frame = self.mask_embed.bos_token.expand(len(text), 1, rows * columns, -1)
        return self.encode_frames(text, frame)

    def encode_frames(self, text: Tensor, frames: Tensor) -> Tensor:
        """Return the video encoder's last F * Lv states, normed, [B, F * Lv, D].

        Args:
            text: [B, L, text_dim]. frames: [B, F, Lv, D], token embeddings without positions.
        """
        count, device = frames.shape[1], frames.device
        grid, width = self.config.video_grid, self.config.width
        turn = None
        if self.config.rotary:
            places = coordinates(grid, count, device)
            turn = self._turn(places.new_zeros(text.shape[1], 3), places)
        else:
            time = self.video_pos_embed(count, self.config.frames)
            frames = frames + (time + space_embedding(grid, width, device).to(time))
        h = torch.cat([self.text_embed(text), frames.flatten(1, 2)], dim=1)
        for block in self.video_encoder.blocks:
            h = block(h, turn)
        return self.video_encoder.norm(h[:, text.shape[1] :])

    def latents(self, tokens: Tensor, known: Tensor, c: Tensor) -> Tensor:
        """Return z [B, L, D] of tokens [B, L, P] of which `known` (bool [B, L]) are given.

        The first half of the blocks sees only the condition and the known tokens, the second half all.
        """
        e = self._embed(tokens, known)
        count = known.sum(1)
        visible = int(count.max())
        # known positions first; where images know different numbers, the surplus is masked
        index = known.logical_not().to(torch.uint8).argsort(dim=1, stable=True)[:, :visible]
        h = torch.cat([c, e.gather(1, _columns(index, e))], dim=1)
        mask = None
        if int(count.min()) < visible:
            filled = torch.arange(visible, device=known.device) < count[:, None]
            mask = torch.cat([filled.new_ones(c.shape[:2]), filled], dim=1)[:, None, None]
        early = self.config.image_depth // 2
        turn = self._image_turn(c, index)
        for block in self.image_encoder.blocks[:early]:
            h = block(h, turn, mask)
        c, seen = h[:, : c.shape[1]], h[:, c.shape[1] :]
        e = torch.where(known[..., None], e.scatter(1, _columns(index, e), seen), e)
        h = torch.cat([c, e], dim=1)
        turn = self._image_turn(c, None)
        for block in self.image_encoder.blocks[early:]:
            h = block(h, turn)
        return self.image_encoder.norm(h[:, c.shape[1] :])

    def _embed(self, tokens: Tensor, known: Tensor) -> Tensor:
        given = known[..., None]
        # the content of unknown tokens must not matter, not even if it is not finite
        patches = self.image_encoder.patch_embed(tokens.masked_fill(~given, 0.0))
        e = torch.where(given, patches, self.mask_embed.mask_token)
        if self.config.rotary:
            return e
        return e + space_embedding(self.config.grid, self.config.width, e.device).to(e)

    def _image_turn(self, c: Tensor, index: Tensor | None) -> Rotation | None:
        """Return the rotations of [c ; the image tokens `index` [B, n] or all]."""
        if not self.config.rotary:
            return None
        places = coordinates(self.config.grid, device=c.device)
        return self._turn(places.new_zeros(c.shape[1], 3), places if index is None else places[index])

    def _turn(self, front: Tensor, places: Tensor) -> Rotation:
        """Return cos, sin [1 or B, 1, S, d / 2] of `front` [m, 3], then `places` [n, 3] or [B, n, 3]."""
        places = places[None] if places.dim() == 2 else places
        everything = torch.cat([front.expand(len(places), -1, -1), places], dim=1)
        cos, sin = rotation(everything, self.config.rotary_split)
        return cos[:, None], sin[:, None]


def _columns(index: Tensor, like: Tensor) -> Tensor:
    return index[..., None].expand(-1, -1, like.shape[-1])
