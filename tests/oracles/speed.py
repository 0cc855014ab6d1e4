"""Images per second of our HPSv2 scorer against the original package's `score()` on the same weights.

A ViT-B/32 of random weights stands for the ViT-H-14, which is too slow for a CPU. The original reloads its
checkpoint in each call and scores image by image; `score(list)` saves the reloading for images of one prompt,
and is measured as well. Runs in the environment of record.py with this package's dependencies besides.
Usage: PYTHONPATH=. python tests/oracles/speed.py [IMAGES_OURS [IMAGES_ORIGINAL]]
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent))
import record
import tiny

from margrpo.config import RewardOptions
from margrpo.rewards import score

VIT_B = {
    "HPS_VISION": {"layers": 12, "width": 768, "head_width": 64, "patch_size": 32, "image_size": 224},
    "HPS_TEXT": {"layers": 12, "width": 512, "heads": 8, "context_length": 77},
    "HPS_EMBED": 512,
    "SIDE": 224,
}


def main(ours: int, original: int) -> None:
    """Print images/s of both and their ratio, and the largest difference of the scores."""
    for name, value in VIT_B.items():
        setattr(tiny, name, value)
    pictures = np.random.default_rng(0).integers(0, 256, (ours, 256, 256, 3), dtype=np.uint8)
    prompts = [f"a photo number {index // 4}" for index in range(ours)]  # four images a prompt
    with tempfile.TemporaryDirectory() as name:
        folder = tiny.hps(Path(name))
        options = {"hpsv2.1": RewardOptions(path=str(folder))}
        img_score = record.import_original(folder)
        images = torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 255
        weights = {"hpsv2.1": 1.0}
        score(weights, images[:2], prompts[:2], [{}] * 2, options)  # loads
        started = time.perf_counter()
        values = score(weights, images, prompts, [{}] * ours, options).total
        our_rate = ours / (time.perf_counter() - started)

        files = [Image.fromarray(picture) for picture in pictures[:original]]
        checkpoint = str(folder / tiny.HPS_FILE)
        img_score.score(files[0], prompts[0], cp=checkpoint)
        started = time.perf_counter()
        theirs = [
            float(img_score.score(f, p, cp=checkpoint)[0])
            for f, p in zip(files, prompts[:original], strict=True)
        ]
        single_rate = original / (time.perf_counter() - started)
        started = time.perf_counter()
        img_score.score(files, prompts[0], cp=checkpoint)
        list_rate = original / (time.perf_counter() - started)
    result = {
        "images": {"ours": ours, "original": original},
        "threads": torch.get_num_threads(),
        "ours_per_s": round(our_rate, 3),
        "original_per_s": round(single_rate, 3),
        "original_list_per_s": round(list_rate, 3),
        "ratio": round(our_rate / single_rate, 2),
        "ratio_list": round(our_rate / list_rate, 2),
        "largest_difference": float((values[:original] - torch.tensor(theirs)).abs().max()),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main(*(int(x) for x in [*sys.argv[1:], *("1000", "100")[len(sys.argv) - 1 :]]))
