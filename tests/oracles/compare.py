"""The largest differences between our scorers and the originals' recorded scores, with their limits."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from margrpo.config import RewardOptions
from margrpo.rewards import base
from tests.oracles import tiny

RECORDED = Path(__file__).parents[1] / "golden" / "rewards" / "oracles.json"
LIMITS = {
    "hpsv2.1": 1e-6,
    "image_reward": 1e-5,
    "pickscore": 20 * 1e-6,  # 1e-6 of the cosine, which the tiny model scales by exp(3) = 20
    "aesthetic": 1e-6,
}


def folders(root: Path) -> dict[str, Path]:
    """Write the tiny checkpoints that `record.py` scored; return their folders by reward."""
    return {
        "hpsv2.1": tiny.hps(root / "hps"),
        "pickscore": tiny.clip_hf(root / "pickscore", seed=2, activation="gelu"),
        "aesthetic": tiny.aesthetic(root / "aesthetic"),
        "image_reward": tiny.image_reward(root / "image_reward"),
    }


def images() -> list[Tensor]:
    """Return the pictures, each [1, 3, H, W] in [0, 1]."""
    pictures = [torch.from_numpy(np.array(picture)) for picture in tiny.images()]
    return [picture.permute(2, 0, 1)[None].float() / 255 for picture in pictures]


def recorded(name: str) -> Tensor:
    """Return the original's scores [image, prompt]."""
    return torch.tensor(json.loads(RECORDED.read_text())["scores"][name])


def ours(name: str, folder: Path) -> Tensor:
    """Return our scores [image, prompt] of what the original scored."""
    reward = base.entry(name).build(RewardOptions(path=str(folder)))
    prompts = tiny.PROMPTS[: recorded(name).shape[1]]
    with torch.no_grad():
        rows = [reward(i.repeat(len(prompts), 1, 1, 1), prompts, [{}] * len(prompts)) for i in images()]
    return torch.stack(rows)


def main() -> None:
    """Print a line per scorer."""
    with tempfile.TemporaryDirectory() as root:
        for name, folder in folders(Path(root)).items():
            difference = float((ours(name, folder) - recorded(name)).abs().max())
            print(f"{name}: largest difference {difference:.1e}, limit {LIMITS[name]:.0e}")


if __name__ == "__main__":
    main()
