from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from margrpo.benchmarks.rules.boxes import iou
from margrpo.benchmarks.rules.geneval import Detection
from margrpo.rewards import owlv2
from tests.oracles import tiny

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def detector(tmp_path_factory: pytest.TempPathFactory) -> owlv2.Owlv2:
    return owlv2.Owlv2(_write(tmp_path_factory.mktemp("owl")), "float32")


def _write(folder: Path) -> Path:
    from transformers import Owlv2Config, Owlv2ForObjectDetection

    tiny.clip_hf(folder, seed=1)  # for its tokenizer
    text = {**SIZES, "vocab_size": tiny.VOCABULARY, "max_position_embeddings": 16}
    text |= {"bos_token_id": tiny.VOCABULARY - 2, "eos_token_id": tiny.VOCABULARY - 1}
    config = Owlv2Config(
        text_config=text, vision_config={**SIZES, "image_size": 64, "patch_size": 16}, projection_dim=32
    )
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": {"height": 64, "width": 64}}))
    model = Owlv2ForObjectDetection(config)
    state = tiny.fill({name: tuple(value.shape) for name, value in model.state_dict().items()}, 11)
    save_file({k: v.contiguous() for k, v in state.items()}, folder / "model.safetensors")
    return folder


def test_detections_are_those_of_transformers_own_post_processing(detector, monkeypatch):
    images = torch.rand(2, 3, 40, 60, generator=torch.Generator().manual_seed(0))
    names = ("dog", "red square")
    monkeypatch.setattr(owlv2, "NMS", 1.0)  # suppression is ours
    found = detector(images, [names, names])
    logits, boxes = detector._raw(images, names)
    theirs = detector.processor.post_process_object_detection(
        type("Output", (), {"logits": logits, "pred_boxes": boxes}), owlv2.THRESHOLD, [(40, 60)] * 2
    )
    assert sum(len(group) for group in found) > 4
    for ours, expected in zip(found, theirs, strict=True):
        order = expected["scores"].argsort(descending=True)
        assert [d.score for d in ours] == pytest.approx(expected["scores"][order].tolist())
        assert [names.index(d.label) for d in ours] == expected["labels"][order].tolist()
        assert torch.allclose(torch.tensor([d.box for d in ours]), expected["boxes"][order], atol=1e-4)


def test_images_with_other_names_are_not_mixed_up(detector):
    images = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    together = detector(images, [("dog",), (), ("two dogs", "dog")])
    assert together[1] == []
    alone = detector(images[2:], [("two dogs", "dog")])[0]
    assert [d.label for d in together[2]] == [d.label for d in alone]
    assert {d.label for d in together[0]} <= {"dog"}


def test_duplicates_fall_within_a_label_only():
    found = [
        Detection("dog", (0, 0, 10, 10), 0.5),
        Detection("cat", (0, 0, 10, 10), 0.7),
        Detection("dog", (1, 0, 11, 10), 0.9),
        Detection("dog", (50, 0, 60, 10), 0.2),
    ]
    assert iou(found[0].box, found[2].box) > 0.5
    assert [(d.label, d.score) for d in owlv2.distinct(found)] == [("dog", 0.9), ("cat", 0.7), ("dog", 0.2)]


def test_rules_see_the_frame_of_479_px_and_the_right_names(caplog):
    asked = []

    def detect(images: Tensor, names: Sequence[Sequence[str]]) -> list[list[Detection]]:
        asked.extend(names)
        left = [Detection("person", (0, 0, 8, 8), 0.8), Detection("dog", (40, 10, 48, 18), 0.6)]
        return [left if wanted else [] for wanted in names]

    images = torch.zeros(3, 3, 64, 64)
    specs = [
        {"obj1": "boy", "obj2": "dog", "locality": "on the left of"},
        {"obj1": "boy", "obj2": "dog", "locality": "near"},
        {"obj1": None, "obj2": None, "locality": None},
    ]
    scores = owlv2.spatial_2d(detect)(images, ["a", "b", "c"], specs)
    assert asked == [["dog", "person"], ["dog", "person"], []]
    # dy = 10 px of 64 = 75 of 479: near; all of the relation, and a quarter of each confidence
    assert scores[:2].tolist() == pytest.approx([0.85, 0.85])
    assert scores[2].isnan()
    assert "skipped 'c'" in caplog.text

    counts = owlv2.numeracy(detect)(images[:1], ["two boys"], [{"objects": ["boy"], "counts": [2]}])
    assert counts.tolist() == [0.5]
