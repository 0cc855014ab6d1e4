"""What a remote reward and its server say to each other: JSON, with images as base64 of PNG files.

PNG has 8 bits a channel: a reward behind a server sees round(255 x) / 255. The published scorers round in the
same way when they score in this process (`images.to_uint8`), so that their scores are the same; `scenes` does
not, and its score of a rounded image can differ.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from margrpo.rewards.images import to_pil

PROTOCOL: Literal[1] = 1
MAX_PIXELS = 2**26
"""Of all images of a request: 64 of 1024 x 1024; as float32 they take 0.8 GB."""

_PNG_LEVEL = 1  # zlib's fastest: the images travel once


class MalformedError(Exception):
    """A request that cannot be read; the message says what is wrong with it."""


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Identity(_Message):
    """What a server scores with; `weights`: hash of the files that it read, None if it needs none.

    Range limits are None where the reward is unbounded.
    """

    protocol: Literal[1] = PROTOCOL
    name: str
    version: str
    weights: str | None
    license: str
    low: float | None
    high: float | None


class Request(_Message):
    """Images as base64 of PNG files (RGB, all of one size), and a prompt and a spec for each."""

    images: Annotated[list[str], Field(min_length=1, max_length=65_536)]
    prompts: list[str]
    specs: list[dict[str, Any]]


class Answer(_Message):
    """One score per image, None where there is none, with the reasons; and who scored."""

    name: str
    weights: str | None
    scores: list[float | None]
    reasons: list[str]


def encode(images: Tensor, prompts: Sequence[str], specs: Sequence[Any]) -> bytes:
    """Return the request for images [B, 3, H, W] in [0, 1], rounded to 8 bit.

    Raises ValueError for a spec that JSON cannot express.
    """
    files = []
    for picture in to_pil(images):
        buffer = io.BytesIO()
        picture.save(buffer, format="PNG", compress_level=_PNG_LEVEL)
        files.append(base64.b64encode(buffer.getvalue()).decode())
    request = Request(images=files, prompts=list(prompts), specs=[dict(spec) for spec in specs])
    return request.model_dump_json().encode()


def decode(body: bytes) -> tuple[Tensor, list[str], list[dict[str, Any]]]:
    """Return images [B, 3, H, W] in [0, 1], prompts and specs of a request; raises MalformedError."""
    try:
        request = Request.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "body"
        raise MalformedError(f"{place}: {first['msg']}") from None
    count = len(request.images)
    for name in ("prompts", "specs"):
        given = len(getattr(request, name))
        if given != count:
            raise MalformedError(f"{name}: {given} of them for {count} images")
    arrays = [_decode(text, index, count) for index, text in enumerate(request.images)]
    if len({array.shape for array in arrays}) > 1:
        raise MalformedError("images: of several sizes; allowed: one size in a request")
    pixels = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).contiguous()  # sums round by layout
    return pixels.float() / 255, request.prompts, request.specs


def limit(bound: float) -> float | None:
    """Return a limit of a reward's range as JSON can hold it."""
    return bound if math.isfinite(bound) else None


def _decode(text: str, index: int, count: int) -> np.ndarray:
    """Return an RGB picture [H, W, 3], uint8, after a look at its size."""
    place = f"images.{index}"
    try:
        picture = Image.open(io.BytesIO(base64.b64decode(text, validate=True)), formats=["PNG"])
        if picture.mode != "RGB":
            raise MalformedError(f"{place}: mode {picture.mode}; allowed: RGB with 8 bits a channel")
        width, height = picture.size
        if width * height * count > MAX_PIXELS:
            raise MalformedError(
                f"{place}: {count} images of {width} x {height}; allowed: {MAX_PIXELS} pixels in all"
            )
        return np.array(picture)
    except binascii.Error:
        raise MalformedError(f"{place}: not base64") from None
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        raise MalformedError(f"{place}: not a PNG file") from None
