"""What `transformer/config.json` of a NOVA checkpoint says, and the sizes that follow from it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from margrpo.errors import ConfigError

_CLASS = "NOVATransformer3DModel"
_HEADS = {768: 12, 1024: 16, 1536: 16}
"""The checkpoints do not store their head count: baaivision/NOVA derives it from the name of the model."""
_KEYS = (
    "image_dim",
    "image_size",
    "image_stride",
    "text_token_dim",
    "text_token_len",
    "image_base_size",
    "video_base_size",
    "video_mixer_rank",
    "rotary_pos_embed",
    "arch",
)
TEXT_ROWS = 512
"""Rows of the padding table `text_embed.weight`."""


@dataclass(frozen=True)
class NovaConfig:
    """Sizes of a NOVA text-to-image transformer.

    Attributes:
        latent: (channels, height, width) of the VAE latents.
        patch: p, side of an image token in latent pixels; a video token has side 2p.
        frames: base_t of the time embedding.
        text_dim, text_len: width and number of text tokens.
        width, heads: D of both transformers and their attention heads.
        video_depth, image_depth: their blocks. head_width, head_depth: of the diffusion head.
        rotary: rotary instead of absolute positions.
    """

    latent: tuple[int, int, int]
    patch: int
    frames: int
    text_dim: int
    text_len: int
    width: int
    heads: int
    video_depth: int
    image_depth: int
    head_width: int
    head_depth: int
    rotary: bool

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of image tokens."""
        return self.latent[1] // self.patch, self.latent[2] // self.patch

    @property
    def video_grid(self) -> tuple[int, int]:
        """Rows and columns of video tokens."""
        return self.latent[1] // (2 * self.patch), self.latent[2] // (2 * self.patch)

    @property
    def channels(self) -> int:
        """Channels of a token: p * p * latent channels."""
        return self.patch**2 * self.latent[0]

    @classmethod
    def parse(cls, data: Mapping[str, Any], where: str = "transformer/config.json") -> NovaConfig:
        """Return the sizes that a `config.json` describes.

        Args:
            data: the mapping; keys that start with "_" (library versions) are ignored but
                `_test_num_heads`, the head count of tiny test models.
            where: file name for messages.

        Raises:
            ConfigError: a missing, unknown or impossible value; video checkpoints (mixer) are not supported.
        """
        kind = data.get("_class_name", _CLASS)
        if kind != _CLASS:
            raise ConfigError.of(f"{where}: _class_name", kind, f"allowed: {_CLASS}")
        unknown = sorted(key for key in data if key not in _KEYS and not key.startswith("_") and data[key])
        if unknown:
            allowed = f"allowed: {', '.join(_KEYS)} (made for another version of NOVA?)"
            raise ConfigError.of(f"{where}: {unknown[0]}", data[unknown[0]], allowed)
        if data.get("video_mixer_rank"):
            allowed = "allowed: null (video checkpoints are not supported, choose a text-to-image one)"
            raise ConfigError.of(f"{where}: video_mixer_rank", data["video_mixer_rank"], allowed)
        stride = _integer(data, "image_stride", where)
        height, width = _pair(data, "image_size", where)
        frames, *video = _integers(data, "video_base_size", where, (3,))
        video_depth, video_width = _arch(data, 0, r"vit_d(\d+)w(\d+)", where)
        image_depth, image_width = _arch(data, 1, r"vit_d(\d+)w(\d+)", where)
        head_depth, head_width = _arch(data, 2, r"mlp_d(\d+)w(\d+)", where)
        if video_width != image_width:
            raise ConfigError.of(f"{where}: arch", data["arch"], "allowed: both transformers of one width")
        result = cls(
            latent=(_integer(data, "image_dim", where), height // stride, width // stride),
            patch=15 // stride + 1,
            frames=frames,
            text_dim=_integer(data, "text_token_dim", where),
            text_len=_integer(data, "text_token_len", where, TEXT_ROWS),
            width=image_width,
            heads=_heads(data, image_width, where),
            video_depth=video_depth,
            image_depth=image_depth,
            head_width=head_width,
            head_depth=head_depth,
            rotary=bool(data.get("rotary_pos_embed")),
        )
        unit = 2 * stride * result.patch
        if height % unit or width % unit:
            raise ConfigError.of(f"{where}: image_size", [height, width], f"allowed: multiples of {unit}")
        for key, given, grid in (
            ("image_base_size", _pair(data, "image_base_size", where), result.grid),
            ("video_base_size", tuple(video), result.video_grid),
        ):
            if given != grid:
                allowed = f"allowed: {list(grid)} for image_size {[height, width]} and stride {stride}"
                raise ConfigError.of(f"{where}: {key}", list(given), allowed)
        result._check_widths(where)
        return result

    def _check_widths(self, where: str) -> None:
        if self.width % self.heads or self.width % 4:
            allowed = f"allowed: a multiple of 4 and of the {self.heads} heads"
            raise ConfigError.of(f"{where}: arch width", self.width, allowed)
        if self.rotary and any(part % 2 for part in self.rotary_split):
            allowed = "allowed: heads whose three rotary parts are even"
            raise ConfigError.of(f"{where}: rotary head width", self.width // self.heads, allowed)

    @property
    def rotary_split(self) -> tuple[int, int, int]:
        """Channels of a head that turn with frame, row and column."""
        head = self.width // self.heads
        side = (head - head // 8) // 2
        return head // 8, side, side


def _heads(data: Mapping[str, Any], width: int, where: str) -> int:
    if data.get("_test_num_heads") is not None:
        return _integer(data, "_test_num_heads", where)
    if width not in _HEADS:
        known = ", ".join(map(str, _HEADS))
        raise ConfigError.of(
            f"{where}: arch width", width, f"allowed: {known} (no head count is known for it)"
        )
    return _HEADS[width]


def _arch(data: Mapping[str, Any], index: int, pattern: str, where: str) -> tuple[int, int]:
    """Return depth and width of one of the three names in `arch`."""
    names = data.get("arch")
    allowed = "allowed: three names like vit_d16w1024, vit_d32w1024, mlp_d6w1024"
    if not isinstance(names, list) or len(names) != 3:
        raise ConfigError.of(f"{where}: arch", names, allowed)
    match = re.fullmatch(pattern, str(names[index]))
    if match is None or not int(match[1]) or not int(match[2]):
        raise ConfigError.of(f"{where}: arch[{index}]", names[index], allowed)
    return int(match[1]), int(match[2])


def _integer(data: Mapping[str, Any], key: str, where: str, high: int = 1 << 20) -> int:
    value = data.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= high:
        raise ConfigError.of(f"{where}: {key}", value, f"allowed: an integer 1..{high}")
    return value


def _integers(data: Mapping[str, Any], key: str, where: str, lengths: tuple[int, ...]) -> list[int]:
    values = data.get(key)
    good = (
        isinstance(values, list) and len(values) in lengths and all(type(v) is int and v > 0 for v in values)
    )
    if not isinstance(values, list) or not good:
        raise ConfigError.of(f"{where}: {key}", values, f"allowed: {lengths[0]} positive integers")
    return values


def _pair(data: Mapping[str, Any], key: str, where: str) -> tuple[int, int]:
    """Return (height, width) of a value that is one integer or two."""
    if type(data.get(key)) is int:
        return _integer(data, key, where), _integer(data, key, where)
    height, width = _integers(data, key, where, (2,))
    return height, width
