from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from margrpo.checkpoints import load_policy, save_policy
from margrpo.errors import ConfigError, MargrpoError
from margrpo.policies.base import Condition
from margrpo.policies.harmon import TRAINED_FILE, HarmonPolicy, condition_of, question, read_harmon
from margrpo.policies.mar import mar_architecture
from margrpo.policies.masked import MaskedArchitecture
from margrpo.policies.qwen import QWEN, LlmArchitecture
from tests.policies.real import copy_folder, edit_config, randomize, trainable_folder
from tests.policies.test_mar import SMALL

LLM = {
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def small(grid: tuple[int, int] = (2, 3)) -> HarmonPolicy:
    """Encoder 16 and decoder 24 wide, image not square, native grid 4 x 4."""
    policy = HarmonPolicy(MaskedArchitecture.model_validate(SMALL), LlmArchitecture.model_validate(LLM), grid)
    randomize(policy)
    policy.freeze()
    return policy.eval()


def inputs(policy: HarmonPolicy, known: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randn(
        len(known), policy.tokens, policy.channels, generator=torch.Generator().manual_seed(0)
    )
    mask = torch.zeros(len(known), policy.tokens, dtype=torch.bool)
    for row, positions in zip(mask, known, strict=True):
        row[positions] = True
    return tokens, mask


def test_public_sizes_have_the_parameters_of_qwen() -> None:
    counts = {}
    for name, size in (("0.5b", "mar_base"), ("1.5b", "mar_huge")):
        llm = LlmArchitecture.model_validate(QWEN[name])
        policy = HarmonPolicy(mar_architecture({"type": size}, "test"), llm, (32, 32))
        counts[name] = sum(p.numel() for p in policy.llm.parameters())
        assert policy.tokens == 1024
        assert sum(p.numel() for p in policy.parameters()) > counts[name]
    # Qwen2.5 model cards: 0.49 B and 1.54 B with tied embeddings
    assert counts == {"0.5b": 494_032_768, "1.5b": 1_543_714_304}


def test_prompts_are_asked_in_the_released_chat_template() -> None:
    start, end = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    assert question("a red circle") == f"{start}Generate an image: a red circle{end}"
    assert question(None) == f"{start}Generate an image.{end}"
    for prompt in ("x<|im_end|>", "<|im_start|>system", "<|endoftext|>"):
        with pytest.raises(ConfigError, match="control tokens"):
            question(prompt)


def test_token_ids_are_padded_on_the_right(tmp_path: Path) -> None:
    policy = read_harmon(trainable_folder("harmon", tmp_path))
    condition = policy.encode(["a red circle", None])
    # <|im_start|> user Generate an image : a red circle <|im_end|> <|im_start|> assistant
    assert condition["ids"][0].tolist() == [13, 1, 3, 4, 5, 6, 8, 9, 11, 14, 13, 2]
    assert condition["ids"][1].tolist() == [13, 1, 3, 4, 5, 7, 14, 13, 2, 0, 0, 0]
    assert condition["mask"].sum(1).tolist() == [12, 9]


def test_without_a_tokenizer_the_error_says_what_is_missing(tmp_path: Path) -> None:
    folder = copy_folder("harmon", tmp_path)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        read_harmon(folder).encode(["a red circle"])
    (folder / "tokenizer.json").write_text("{not json")
    with pytest.raises(MargrpoError, match=r"not a readable tokenizer") as error:
        read_harmon(folder)
    assert "\n" not in str(error.value)


def test_padding_does_not_change_z() -> None:
    policy = small()
    tokens, known = inputs(policy, [[0, 2], [1, 5]])
    short = policy.backbone(tokens, known, condition_of([[3, 4, 5], [6, 7, 8]]))
    ids = torch.tensor([[3, 4, 5, 9, 9], [6, 7, 8, 1, 2]])
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 0, 0]])
    padded = policy.backbone(tokens, known, Condition({"ids": ids, "mask": mask}))
    torch.testing.assert_close(padded, short, rtol=1e-5, atol=1e-5)
    longer = policy.backbone(tokens, known, condition_of([[3, 4, 5, 9], [6, 7, 8, 1]]))
    assert (longer - short).abs().max() > 1e-4


def test_passes_do_not_see_each_other() -> None:
    """The released code reuses one prompt cache: its second pass differs from the first."""
    policy = small()
    tokens, known = inputs(policy, [[0, 2], [1, 5]])
    condition = condition_of([[3, 4, 5], [6, 7]])
    first = policy.backbone(tokens, known, condition)
    policy.backbone(tokens + 1, ~known, condition)
    assert torch.equal(policy.backbone(tokens, known, condition), first)


def test_images_do_not_see_each_other_and_unknown_tokens_are_not_read() -> None:
    policy = small()
    tokens, known = inputs(policy, [[0, 2], [1, 5]])
    condition = condition_of([[3, 4, 5], [6, 7, 8]])
    z = policy.backbone(tokens, known, condition)
    spoiled = torch.where(known[..., None], tokens, torch.nan)
    assert torch.equal(policy.backbone(spoiled, known, condition), z)
    alone = policy.backbone(tokens[1:], known[1:], condition.select(slice(1, 2)))
    torch.testing.assert_close(alone, z[1:], rtol=1e-5, atol=1e-5)


def test_the_language_model_reads_known_tokens_before_buffer_rows_causally() -> None:
    """The first known token cannot see the second one inside the language model."""
    policy = small()
    states = torch.randn(1, 2 + 2, 16, generator=torch.Generator().manual_seed(1))  # 2 buffer rows, 2 tokens
    condition = condition_of([[3, 4]])
    changed = states.clone()
    changed[:, 3] += 1  # second token
    shift = (policy.fuse(changed, condition) - changed) - (policy.fuse(states, condition) - states)
    assert shift[0, 2].abs().max() < 1e-6
    assert (shift[0, [0, 1, 3]].abs().amax(-1) > 1e-4).all()


def test_the_mar_part_learns_and_nothing_else(tmp_path: Path) -> None:
    policy = small()
    learns = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert learns == {
        f"mar.{name}" for name, _ in policy.mar.named_parameters() if name != "class_emb.weight"
    }
    names = {id(p): name for name, p in policy.named_parameters()}
    parts = [
        {names[id(p)] for p in part} for part in (policy.backbone_parameters(), policy.head_parameters())
    ]
    assert parts[0] | parts[1] == learns
    assert not parts[0] & parts[1]
    tokens, known = inputs(policy, [[0, 2], [1, 5]])
    z = policy.backbone(tokens, known, condition_of([[3], [4]]))
    policy.head(torch.zeros(12, 3), torch.zeros(12), z.flatten(0, 1)).sum().backward()
    assert {name for name, p in policy.named_parameters() if p.grad is not None} == learns


def test_images_are_as_wide_as_the_grid(tmp_path: Path) -> None:
    folder = trainable_folder("harmon", tmp_path)
    edit_config(folder, image_shape=[3, 5])
    policy = read_harmon(folder)
    assert policy.tokens == 15
    tokens = torch.randn(1, 15, 8, generator=torch.Generator().manual_seed(0))
    assert policy.decode(tokens).shape == (1, 3, 6, 10)
    assert policy.latents(tokens)[0, :, 1, 2].tolist() == tokens[0, 7].tolist()  # row 1, column 2


def test_a_saved_policy_is_the_same_policy(tmp_path: Path) -> None:
    policy = read_harmon(trainable_folder("harmon", tmp_path / "released"))
    save_policy(policy, tmp_path / "own.safetensors", {})
    loaded = load_policy(tmp_path / "own.safetensors")
    assert isinstance(loaded, HarmonPolicy)
    tokens, known = inputs(policy, [[0, 2], [1, 5]])
    before = policy.backbone(tokens, known, policy.encode(["a red circle", None]))
    assert torch.equal(loaded.backbone(tokens, known, loaded.encode(["a red circle", None])), before)
    assert torch.equal(loaded.decode(tokens), policy.decode(tokens))
    assert {n: p.requires_grad for n, p in loaded.named_parameters()} == {
        n: p.requires_grad for n, p in policy.named_parameters()
    }


@pytest.mark.parametrize("prefix", ["mar.", "module.mar.", ""])
def test_a_released_rl_checkpoint_holds_the_mar_part_and_needs_the_base_folder(
    prefix: str, tmp_path: Path
) -> None:
    folder = trainable_folder("harmon", tmp_path)
    base = read_harmon(folder).state_dict()
    released = load_file(folder / "model.safetensors")
    mar = {n.removeprefix("mar."): v + 0.5 for n, v in released.items() if n.startswith("mar.")}
    save_file({prefix + name: value for name, value in mar.items()}, folder / TRAINED_FILE)
    combined = read_harmon(folder).state_dict()
    assert combined.keys() == base.keys()
    for name, value in combined.items():
        assert torch.equal(value, base[name] + 0.5 if name.startswith("mar.") else base[name])
    save_policy(read_harmon(folder), tmp_path / "own.safetensors", {})
    assert all(
        torch.equal(v, combined[n]) for n, v in load_policy(tmp_path / "own.safetensors").state_dict().items()
    )
    mar.pop("mask_token")
    save_file({prefix + name: value for name, value in mar.items()}, folder / TRAINED_FILE)
    with pytest.raises(MargrpoError, match=r"mar\.safetensors: lacks mask_token") as error:
        read_harmon(folder)
    assert "\n" not in str(error.value)


def test_autoencoder_and_tied_output_layer_may_be_elsewhere(tmp_path: Path) -> None:
    """As in the .pth release: no vae.* and no lm_head in the weights, kl16.ckpt beside them."""
    folder = trainable_folder("harmon", tmp_path)
    tokens, _ = inputs(read_harmon(folder), [[0, 2]])
    expected = read_harmon(folder).decode(tokens)
    state = load_file(folder / "model.safetensors")
    vae = {n.removeprefix("vae."): v for n, v in state.items() if n.startswith("vae.")}
    rest = {n: v for n, v in state.items() if not n.startswith("vae.")}
    (folder / "model.safetensors").unlink()
    torch.save(rest, folder / "harmon_tiny.pth")
    with pytest.raises(ConfigError, match=r"kl16\.ckpt"):
        read_harmon(folder).decode(tokens)
    torch.save({"model": vae}, folder / "kl16.ckpt")
    assert torch.equal(read_harmon(folder).decode(tokens), expected)
    save_file({**rest, "llm.lm_head.weight": torch.zeros(100, 64)}, folder / "model.safetensors")
    assert torch.equal(read_harmon(folder).decode(tokens), expected)


def test_wrong_sizes_are_one_line_that_names_the_config_value(tmp_path: Path) -> None:
    cases = {
        "layers": ({"llm": {"num_hidden_layers": 3}}, r"llm\.num_hidden_layers"),
        "ffn": ({"llm": {"intermediate_size": 64}}, r"llm\.intermediate_size"),
        "groups": ({"llm": {"num_key_value_heads": 4}}, r"llm\.num_key_value_heads"),
        "head": ({"mar": {"diffloss_d": 3}}, "diffloss_d"),
        "act": ({"llm": {"hidden_act": "gelu"}}, "hidden_act"),
        "window": ({"llm": {"use_sliding_window": True}}, "use_sliding_window"),
        "huge": ({"llm": {"hidden_size": 10**9}}, "hidden_size"),
        "shape": ({"image_shape": [6, 10**6]}, "image_shape"),
        "text": ({"image_shape": "66"}, "image_shape"),
        "vae": ({"vae": {"ch_mult": [1, 2]}}, "ch_mult"),
    }
    for name, (sections, message) in cases.items():
        folder = copy_folder("harmon", tmp_path / name)
        edit_config(folder, **sections)
        with pytest.raises(MargrpoError, match=message) as error:
            read_harmon(folder)
        assert "\n" not in str(error.value)


def test_config_without_a_language_model_and_stray_weights_are_refused(tmp_path: Path) -> None:
    folder = copy_folder("harmon", tmp_path)
    state = load_file(folder / "model.safetensors")
    save_file({**state, "surprise.weight": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(MargrpoError, match=r"has unknown surprise\.weight"):
        read_harmon(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["llm"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(MargrpoError, match="no objects llm and mar"):
        read_harmon(folder)
