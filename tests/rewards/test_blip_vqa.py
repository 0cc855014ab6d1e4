from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from margrpo.errors import MargrpoError
from margrpo.rewards.blip_vqa import AttributeReward, BlipVqa, normalize_question
from margrpo.rewards.tokenizers import BertTokenizer
from tests.oracles import tiny

VOCABULARY = [*tiny.BERT, "yes", "no", "?"]
TEXT = {
    "hidden_size": 64,
    "encoder_hidden_size": 64,
    "intermediate_size": 64,
    "projection_dim": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": len(VOCABULARY) + 2,
    "max_position_embeddings": 64,
    "bos_token_id": len(VOCABULARY),
    "eos_token_id": 3,
    "sep_token_id": 3,
    "pad_token_id": 0,
    "is_decoder": True,
}
VISION = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 16,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import BlipConfig, BlipForQuestionAnswering

    folder = tmp_path_factory.mktemp("blip")
    config = BlipConfig(text_config=TEXT, vision_config=VISION, projection_dim=16)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    model = BlipForQuestionAnswering(config)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    tied = ("cls.predictions.decoder.weight", "cls.predictions.decoder.bias")
    save_file(
        tiny.fill({k: v for k, v in shapes.items() if not k.endswith(tied)}, 9), folder / "model.safetensors"
    )
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    return folder


def pictures(count: int) -> Tensor:
    return torch.rand(count, 3, 32, 32, generator=torch.Generator().manual_seed(3))


def test_p_yes_equals_that_of_transformers_own_generation(folder):
    vqa = BlipVqa(folder, "float32")
    asked = [["a red square?", "two dogs?"], [], ["the dog?"]]
    answers = vqa(pictures(3), asked)
    assert [len(row) for row in answers] == [2, 0, 1]
    ids, mask = BertTokenizer(folder, 35)(["a red square?", "two dogs?", "the dog?"])
    ids[:, 0] = len(VOCABULARY) + 1  # [ENC]
    expected = []
    for row, image in enumerate([0, 0, 2]):
        length = int(mask[row].sum())  # unpadded: generate() lets the answer look at padding
        generated = vqa.model.generate(
            input_ids=ids[row : row + 1, :length],
            pixel_values=vqa._pixels(pictures(3))[[image]],
            max_new_tokens=1,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        odds = torch.softmax(generated.logits[0][0], -1)
        yes, no = float(odds[len(tiny.BERT)]), float(odds[len(tiny.BERT) + 1])
        expected.append(yes / (yes + no))
    assert [*answers[0], *answers[2]] == pytest.approx(expected, abs=1e-5)
    assert max(expected) - min(expected) > 0.01  # the tiny model tells its inputs apart


def test_questions_are_prepared_as_blip_does():
    assert normalize_question('A "Red" (round) apple!? ') == "a red round apple?"
    assert len(normalize_question("word " * 80).split()) == 50


def test_the_score_is_the_product_and_a_prompt_without_phrases_is_skipped(caplog):
    asked = []

    def vqa(images: Tensor, questions: Sequence[Sequence[str]]) -> list[list[float]]:
        asked.extend(questions)
        return [[0.5, 0.8][: len(some)] for some in questions]

    specs = [{"noun_phrases": ["a red car", "the left", "a dog"]}, {"noun_phrases": ["a cat"]}, {}]
    scores = AttributeReward(vqa)(torch.zeros(3, 3, 4, 4), ["one", "two", "three"], specs)
    assert asked == [["a red car?", "a dog?"], ["a cat?"], []]
    assert scores[:2].tolist() == pytest.approx([0.4, 0.5])
    assert scores[2].isnan()
    assert "skipped 'three'" in caplog.text


def test_a_vocabulary_without_yes_is_one_line(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "vocab.txt").write_text("\n".join(tiny.BERT) + "\n")
    with pytest.raises(MargrpoError, match="no token yes"):
        BlipVqa(tmp_path, "float32")
