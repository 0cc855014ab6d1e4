"""Weight files in the originals' layouts: what is accepted, and the one line for what is not."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

from margrpo.config import RewardOptions
from margrpo.errors import MargrpoError
from margrpo.rewards import base, weights
from margrpo.rewards.aesthetic import LinearStack
from margrpo.rewards.tokenizers import BertTokenizer, ClipTokenizer
from tests.oracles import tiny


def build(name: str, folder: Path) -> base.Reward:
    return base.entry(name).build(RewardOptions(path=str(folder)))


def one_line(error: pytest.ExceptionInfo[MargrpoError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("name", ["clipscore", "clip_t2i", "clip_l14", "clip_h14"])
def test_clip_scores_differ_by_their_definition(name, tmp_path):
    folder = tiny.clip_hf(tmp_path / "clip", seed=7)
    image = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    prompts = tiny.PROMPTS[:2]
    score = build(name, folder)(image, prompts, [{}, {}])
    cosine = build("clip_t2i", folder)(image, prompts, [{}, {}])
    if name == "clipscore":
        assert torch.allclose(score, 2.5 * cosine.clamp(min=0))
    else:  # a square image is cropped and padded alike
        assert torch.allclose(score, cosine, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("visual.proj"), r"lacks visual_projection.weight \(1 in all\)"),
        (lambda s: s.update({"score_head.weight": torch.zeros(1)}), "has unknown score_head.weight"),
        (
            lambda s: s.update({"visual.proj": torch.zeros(3, 3)}),
            "has another shape of visual_projection.weight",
        ),
    ],
)
def test_an_hps_file_that_is_not_whole_is_refused(change, message, tmp_path):
    folder = tiny.hps(tmp_path)
    state = torch.load(folder / tiny.HPS_FILE, weights_only=True)["state_dict"]
    change(state)
    torch.save({"state_dict": state}, folder / tiny.HPS_FILE)
    with pytest.raises(MargrpoError, match=message) as error:
        build("hpsv2.1", folder)
    assert "tensors of the original" in one_line(error)


def test_the_real_sizes_are_assumed_without_a_configuration(tmp_path):
    folder = tiny.hps(tmp_path)
    (folder / "config.json").unlink()
    # on the meta device a ViT-H-14 goes without its 4 GB; it has 910 tensors
    with pytest.raises(MargrpoError, match=r"the 910 tensors of the original"), torch.device("meta"):
        build("hpsv2.1", folder)


def test_files_with_code_in_them_are_not_run(tmp_path):
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (Path(tmp_path / "ran"),))  # type: ignore[return-value]

    (tmp_path / tiny.HPS_FILE).write_bytes(pickle.dumps({"state_dict": Bomb()}))
    with pytest.raises(MargrpoError, match="not a readable file of tensors") as error:
        weights.read_state(tmp_path / tiny.HPS_FILE)
    one_line(error)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"<html>not found</html>"])
def test_damaged_files_are_one_line(content, tmp_path):
    for name in ("w.pt", "w.safetensors"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(MargrpoError, match="not a readable file of tensors") as error:
            weights.read_state(tmp_path / name)
        one_line(error)


def test_a_file_without_tensors_is_refused(tmp_path):
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(MargrpoError, match="holds no named tensors"):
        weights.read_state(tmp_path / "list.pt")
    with pytest.raises(MargrpoError, match="no such file"):
        weights.read_state(tmp_path / "none.pt")


def test_image_reward_accepts_the_pretraining_heads_and_nothing_else(tmp_path):
    folder = tiny.image_reward(tmp_path)
    build("image_reward", folder)
    state = torch.load(folder / "ImageReward.pt", weights_only=True)
    torch.save({**state, "blip.extra.weight": torch.zeros(1)}, folder / "ImageReward.pt")
    with pytest.raises(MargrpoError, match=r"has unknown blip.extra.weight \(1 in all\)"):
        build("image_reward", folder)
    torch.save({k: v for k, v in state.items() if not k.startswith("mlp.")}, folder / "ImageReward.pt")
    with pytest.raises(MargrpoError, match=r"lacks layers\.0\.weight"):
        build("image_reward", folder)
    torch.save({"weight": torch.zeros(1)}, folder / "ImageReward.pt")
    with pytest.raises(MargrpoError, match=r"lacks blip\.visual_encoder"):
        build("image_reward", folder)


def test_an_aesthetic_folder_must_be_given():
    with pytest.raises(MargrpoError, match=r"allowed: a folder with CLIP ViT-L/14 and sac\+logos"):
        base.entry("aesthetic").build(RewardOptions())


def test_the_aesthetic_stack_is_an_affine_map():
    stack = LinearStack(5)
    with torch.no_grad():
        a, b = torch.randn(2, 1, 5, generator=torch.Generator().manual_seed(0))
        middle = (stack(a) + stack(b)) / 2
        assert torch.allclose(stack((a + b) / 2), middle, atol=1e-6)


def test_tokens_of_a_word_known_by_hand(tmp_path):
    tiny.clip_tokenizer(tmp_path)
    ids, mask = ClipTokenizer(tmp_path, unescape=True)(["the", "the &amp;"])
    the = 512 + 1  # merge number 1, "th e</w>", after 256 letters and 256 letters that end a word
    start, end = tiny.VOCABULARY - 2, tiny.VOCABULARY - 1
    ampersand = 256 + ord("&") - ord("!")
    assert ids.tolist() == [[start, the, end, end], [start, the, ampersand, end]]
    assert mask.tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]


def test_long_prompts_keep_the_end_token(tmp_path):
    tiny.clip_tokenizer(tmp_path)
    ids, _ = ClipTokenizer(tmp_path, unescape=True)(["the " * 100])
    assert ids.shape == (1, 77)
    assert ids[0, -1] == tiny.VOCABULARY - 1


def test_bert_tokens_are_padded_to_their_length(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(tiny.BERT) + "\n")
    ids, mask = BertTokenizer(tmp_path, 6)(["Two DOGS"])
    names = [tiny.BERT[i] for i in ids[0].tolist()]
    assert names == ["[CLS]", "two", "dog", "##s", "[SEP]", "[PAD]"]
    assert mask.tolist() == [[1, 1, 1, 1, 1, 0]]


def test_folders_without_a_tokenizer_are_one_line(tmp_path):
    with pytest.raises(MargrpoError, match=r"no CLIP tokenizer; allowed: a folder with tokenizer\.json"):
        ClipTokenizer(tmp_path, unescape=True)
    with pytest.raises(MargrpoError, match="no BERT tokenizer"):
        BertTokenizer(tmp_path, 35)


def test_a_configuration_that_is_none_is_one_line(tmp_path):
    folder = tiny.clip_hf(tmp_path, seed=1)
    (folder / "config.json").write_text(json.dumps({"vision_config": {"hidden_size": "wide"}}))
    with pytest.raises(MargrpoError, match="no CLIPConfig") as error:
        build("pickscore", folder)
    one_line(error)


def test_the_weights_have_one_hash_wherever_they_lie(tmp_path: Path):
    def served(folder: Path) -> tuple[str, list[str]]:
        with weights.recorded_files() as files:
            base.entry("hpsv2.1").build(RewardOptions(path=str(folder)))
        return weights.recorded_sha256(files), sorted(file.name for file in files)

    first, names = served(tiny.hps(tmp_path / "one"))
    assert names == sorted([tiny.HPS_FILE, "config.json", "bpe_simple_vocab_16e6.txt.gz"])
    other = tiny.hps(tmp_path / "two")
    assert served(other)[0] == first
    state = torch.load(other / tiny.HPS_FILE, weights_only=True)
    state["state_dict"]["logit_scale"] += 1
    torch.save(state, other / tiny.HPS_FILE)
    assert served(other)[0] != first
