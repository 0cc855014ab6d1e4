from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from margrpo.benchmarks.rules.geneval import Detection
from margrpo.rewards.depth import Dpt, Spatial3d
from tests.oracles import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import DPTConfig, DPTForDepthEstimation

    folder = tmp_path_factory.mktemp("dpt")
    config = DPTConfig(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=64,
        patch_size=16,
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 8, 16, 16],
        fusion_hidden_size=16,
        readout_type="project",
        is_hybrid=False,
    )
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    model = DPTForDepthEstimation(config)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    state = {k: v.abs() if k.startswith("head") else v for k, v in tiny.fill(shapes, 5).items()}
    save_file(state, folder / "model.safetensors")
    return folder


def test_depth_keeps_the_models_order_and_spans_0_to_1(folder):
    dpt = Dpt(folder, "float32")
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    depth = dpt(images)
    assert depth.shape == (2, 64, 64)
    assert depth.amin((1, 2)).tolist() == [0, 0]
    assert depth.amax((1, 2)).tolist() == [1, 1]
    eight_bit = (images * 255).round() / 255
    raw = dpt.model(pixel_values=(eight_bit - 0.5) / 0.5).predicted_depth
    assert raw.shape == depth.shape  # the same size: nothing but scale, shift and 255 steps differ
    expected = (raw - raw.amin((1, 2), keepdim=True)) / (raw.amax((1, 2)) - raw.amin((1, 2)))[:, None, None]
    assert (depth - expected).abs().max() <= 0.5 / 255 + 1e-5


def test_the_nearer_object_is_in_front():
    def detect(images: Tensor, names: Sequence[Sequence[str]]) -> list[list[Detection]]:
        boxes = [Detection("dog", (0, 0, 32, 32), 0.8), Detection("chair", (8, 8, 40, 40), 0.4)]
        return [boxes if wanted else [] for wanted in names]

    def depth(images: Tensor) -> Tensor:
        result = torch.zeros(len(images), 64, 64)
        result[:, :32, :32] = 1.0  # the dog is nearer; symmetric, so the released axes don't matter
        return result

    specs = [{"obj1": "dog", "obj2": "chair", "locality": where} for where in ("in front of", "behind")]
    scores = Spatial3d(detect, depth)(torch.zeros(3, 3, 64, 64), ["a", "b", "c"], [*specs, {}])
    overlap = 24 * 24 / (2 * 32 * 32 - 24 * 24)  # .39 of .5
    assert scores[:2].tolist() == pytest.approx([0.3 + 0.5 * overlap / 0.5, 0.3], abs=1e-6)
    assert scores[2].isnan()
