from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from margrpo.benchmarks.rules.geneval import Detection
from margrpo.errors import MargrpoError
from margrpo.rewards.clip import load_hf
from margrpo.rewards.mask2former import COLORS, ColorNamer, GenEval, Instance, Mask2Former
from tests.oracles import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, SwinConfig

    folder = tmp_path_factory.mktemp("m2f")
    backbone = SwinConfig(
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 2, 2],
        window_size=2,
        image_size=64,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    config = Mask2FormerConfig(
        backbone_config=backbone,
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=16,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        dim_feedforward=16,
        num_queries=6,
        id2label={0: "dog", 1: "car"},
    )
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"size": {"shortest_edge": 64, "longest_edge": 96}, "size_divisor": 32})
    )
    model = Mask2FormerForUniversalSegmentation(config)
    shapes = {k: tuple(v.shape) for k, v in model.state_dict().items() if v.is_floating_point()}
    state = {**model.state_dict(), **tiny.fill(shapes, 3)}
    save_file({k: v.contiguous().clone() for k, v in state.items()}, folder / "model.safetensors")
    return folder


def test_instances_have_boxes_around_their_masks(folder):
    detect = Mask2Former(folder, "float32")
    images = torch.rand(2, 3, 48, 64, generator=torch.Generator().manual_seed(0))
    groups = detect(images)
    assert sum(len(group) for group in groups) > 0
    for group in groups:
        for instance in group:
            x0, y0, x1, y1 = (int(edge) for edge in instance.detection.box)
            assert instance.mask.shape == (48, 64)
            assert instance.detection.label in ("dog", "car")
            assert instance.detection.score >= 0.3
            outside = instance.mask.clone()
            outside[y0:y1, x0:x1] = False
            assert not outside.any()
            inside = instance.mask[y0:y1, x0:x1]
            assert inside[0].any()
            assert inside[-1].any()
            assert inside[:, 0].any()
            assert inside[:, -1].any()


def test_geneval_names_replace_the_models(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "object_names.txt").write_text("hound\nautomobile\n")
    assert Mask2Former(tmp_path, "float32").names == ["hound", "automobile"]
    (tmp_path / "object_names.txt").write_text("hound")
    with pytest.raises(MargrpoError, match="1 names; allowed: the 2 of the model"):
        Mask2Former(tmp_path, "float32")


def instance(label: str, left: int, score: float = 0.9) -> Instance:
    mask = torch.zeros(32, 64, dtype=torch.bool)
    mask[8:24, left : left + 16] = True
    return Instance(Detection(label, (left, 8, left + 16, 24), score), mask)


def test_colors_are_asked_on_the_cut_out_and_only_where_the_prompt_names_one():
    asked = []

    def detect(images: Tensor) -> list[list[Instance]]:
        return [[instance("car", 0), instance("dog", 40), instance("car", 20, score=0.2)]]

    def name_color(image: Tensor, found: Instance) -> str:
        asked.append(found.detection)
        return "red"

    red = {
        "tag": "color_attr",
        "include": [{"class": "car", "count": 1, "color": "red"}, {"class": "dog", "count": 1}],
    }
    blue = {"tag": "colors", "include": [{"class": "car", "count": 1, "color": "blue"}]}
    official = GenEval(detect, name_color, lambda verdict: float(verdict.official), "geneval")
    image = torch.zeros(1, 3, 32, 64)
    assert official(image, ["a red car and a dog"], [red]).tolist() == [1.0]
    assert [d.label for d in asked] == ["car"]
    assert official(image, ["a blue car"], [blue]).tolist() == [0.0]
    partial = GenEval(detect, name_color, lambda verdict: verdict.partial_clean, "geneval")
    assert partial(image, [""], [red]).tolist() == [1.0]
    assert partial(image, ["no spec"], [{}]).isnan().all()


def test_a_color_is_the_nearest_of_ten_class_vectors(tmp_path):
    clip = load_hf(tiny.clip_hf(tmp_path, seed=8), unescape=True)
    namer = ColorNamer(clip)
    image = torch.rand(3, 32, 64, generator=torch.Generator().manual_seed(2))
    car = instance("car", 8)
    answer = namer(image, car)
    cut = torch.full((3, 16, 16), 0x99 / 255)
    cut[:] = image[:, 8:24, 8:24]
    from margrpo.rewards.images import crop_center

    picture = clip.embed_images(crop_center(cut[None], 32, round_up=True))[0]
    closeness = []
    for color in COLORS:
        texts = [
            f"a photo of a {color} car",
            f"a photo of a {color}-colored car",
            f"a photo of a {color} object",
        ]
        mean = clip.embed_texts(texts, torch.device("cpu")).mean(0)
        closeness.append(float(picture @ mean / mean.norm()))
    assert answer == COLORS[closeness.index(max(closeness))]
