"""LAION's improved aesthetic predictor, v2: an affine map of a CLIP ViT-L/14 embedding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from margrpo.config import RewardOptions
from margrpo.errors import MargrpoError
from margrpo.rewards import weights
from margrpo.rewards.base import Info, Reward, Specs, register
from margrpo.rewards.clip import HF_FILES, Clip, load_hf
from margrpo.rewards.images import crop_center
from margrpo.rewards.weights import State, load_strict, read_state

FILE = "sac+logos+ava1-l14-linearMSE.pth"
_WIDTHS = (1024, 128, 64, 16, 1)
_PLACES = (0, 2, 4, 6, 7)  # dropout layers of the original stand between them


class LinearStack(nn.Module):
    """Linear layers to 1024, 128, 64, 16 and 1 without activations, named as in the original (dropout off)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for place, size in zip(_PLACES, _WIDTHS, strict=True):
            self.layers[str(place)] = nn.Linear(width, size)
            width = size

    def forward(self, x: Tensor) -> Tensor:
        """Return [B] for x [B, width]."""
        for layer in self.layers.values():
            x = layer(x)
        return x.squeeze(-1)


def load_stack(state: State, path: Path) -> LinearStack:
    """Return the stack of a file with `layers.{0,2,4,6,7}.*`; its input width is that of the first layer."""
    first = state.get("layers.0.weight")
    if first is None or first.ndim != 2:
        raise MargrpoError(f"{path}: lacks layers.0.weight; allowed: the five linear layers of the original")
    stack = LinearStack(first.shape[1])
    load_strict(stack, state, path)
    return stack.eval().requires_grad_(False)


class Aesthetic:
    """Nominally 1 .. 10 (some 4.5 .. 6.5); does not see the prompt, so it cannot see collapse either."""

    def __init__(self, clip: Clip, stack: LinearStack, precision: str) -> None:
        self.clip, self.stack, self.half = clip, stack, precision == "float16"

    def __call__(self, images: Tensor, prompts: Sequence[str], specs: Specs) -> Tensor:
        """Return one score per image."""
        pixels = crop_center(images, self.clip.image_size, round_up=True)
        with torch.autocast(pixels.device.type, torch.float16, enabled=self.half):
            embedding = self.clip.embed_images(pixels)
        return self.stack.to(pixels.device)(embedding.float())


@register(
    Info(
        "aesthetic",
        "LAION aesthetic predictor v2 (sac+logos+ava1), prompt-independent",
        "Apache-2.0 (predictor), MIT (CLIP)",
        files=(FILE, "config.json"),
        source="openai/clip-vit-large-patch14 in transformers' layout, with the predictor's .pth beside it",
        batch_size=32,
    )
)
def aesthetic(options: RewardOptions) -> Reward:
    """Return the scorer; the predictor is on no hub, so the folder must be given."""
    if options.path is None:
        raise MargrpoError(
            f"reward.options.aesthetic.path: null; allowed: a folder with CLIP ViT-L/14 and {FILE} "
            "(christophschuhmann/improved-aesthetic-predictor)"
        )
    folder = weights.folder("aesthetic", options.path, "", HF_FILES)
    stack = load_stack(read_state(folder / FILE), folder / FILE)
    return Aesthetic(load_hf(folder, unescape=True), stack, options.precision)
