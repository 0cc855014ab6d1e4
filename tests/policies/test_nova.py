from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from margrpo import rollout as rollout_module
from margrpo.errors import ConfigError
from margrpo.policies.nova.policy import commit_counts
from margrpo.policies.nova.positions import (
    coordinates,
    patchify,
    rotate,
    rotation,
    space_embedding,
    time_features,
    unpatchify,
)
from margrpo.policies.nova.sampling import NovaGuidance, guide
from margrpo.rollout import generate
from tests.policies.nova_support import GOLDEN, folder, largest, load, random_policy

SMALL = {
    "image_dim": 3,
    "image_size": [64, 128],
    "image_stride": 16,
    "text_token_dim": 10,
    "text_token_len": 4,
    "image_base_size": [4, 8],
    "video_base_size": [1, 2, 4],
    "arch": ["vit_d1w16", "vit_d2w16", "mlp_d1w12"],
    "_test_num_heads": 2,
}


def test_patches_are_row_by_row_with_the_channel_fastest() -> None:
    # two channels of 2 x 4 pixels: channel 0 counts 0..7, channel 1 counts 100..107
    latents = torch.stack([torch.arange(8.0), 100 + torch.arange(8.0)]).view(1, 2, 2, 4)
    tokens = patchify(latents, 2)
    assert tokens[0, 0].tolist() == [0, 100, 1, 101, 4, 104, 5, 105]
    assert tokens[0, 1].tolist() == [2, 102, 3, 103, 6, 106, 7, 107]
    assert torch.equal(unpatchify(tokens, 2, (1, 2)), latents)


def test_patch_embedding_is_the_convolution() -> None:
    policy = load()
    latents = torch.randn(2, 4, 8, 12, generator=torch.Generator().manual_seed(0))
    for encoder, patch in ((policy.transformer.image_encoder, 2), (policy.transformer.video_encoder, 4)):
        conv = encoder.patch_embed.proj
        expected = functional.conv2d(latents, conv.weight, conv.bias, stride=patch).flatten(2).mT
        assert largest(encoder.patch_embed(patchify(latents, patch)) - expected) < 1e-5


def test_positions() -> None:
    assert coordinates((2, 3), 2)[[0, 1, 3, 6, 11]].tolist() == [
        [0, 0, 0],
        [0, 0, 1],
        [0, 1, 0],
        [1, 0, 0],
        [1, 1, 2],
    ]
    # width 8: q = 2, frequencies 1 and 1 / 100; token 5 of a 2 x 3 grid is row 1, column 2
    row, column = 1.0, 2.0
    expected = [
        f(v * w)
        for v, f in ((column, math.sin), (column, math.cos), (row, math.sin), (row, math.cos))
        for w in (1.0, 0.01)
    ]
    torch.testing.assert_close(space_embedding((2, 3), 8)[5], torch.tensor(expected))
    features = time_features(2, 4)  # frame 1 is at position 4 / 2
    assert features[0].tolist() == [0.0] * 128 + [1.0] * 128
    assert float(features[1, 0]) == pytest.approx(math.sin(2.0))
    assert float(features[1, 129]) == pytest.approx(math.cos(2.0 * 10_000 ** (-1 / 128)))


def test_rotation_turns_each_part_with_its_axis() -> None:
    places = torch.tensor([[3.0, 0.0, 0.0], [0.0, 5.0, 0.0], [0.0, 0.0, 7.0], [0.0, 0.0, 0.0]])
    cos, sin = rotation(places, (2, 4, 2))
    x = torch.tensor([1.0, 0.0] * 4).expand(4, 8)
    turned = rotate(x, cos, sin)
    assert turned[0].tolist() == pytest.approx([math.cos(3), math.sin(3), 1, 0, 1, 0, 1, 0])
    # the row part has 4 channels: its second pair turns 100 times slower
    slow = 5 / 100
    second = [1, 0, math.cos(5), math.sin(5), math.cos(slow), math.sin(slow), 1, 0]
    assert turned[1].tolist() == pytest.approx(second)
    assert turned[2].tolist() == pytest.approx([1, 0, 1, 0, 1, 0, math.cos(7), math.sin(7)])
    assert torch.equal(turned[3], x[3])


def test_commit_schedule() -> None:
    assert commit_counts(16, 8) == [0, 1, 2, 2, 2, 3, 3, 3]
    policy = random_policy({**SMALL, "image_stride": 8, "image_base_size": [4, 8]})
    assert policy.tokens == 32
    assert sum(policy.ar_schedule(8)) == 32
    assert len([n for n in commit_counts(1024, 64) if n]) == 63
    with pytest.raises(ConfigError, match=r"sampler\.ar_steps: 33; 1\.\.32"):
        policy.ar_schedule(33)


def condition_of(policy: Any, images: int) -> Any:
    generator = torch.Generator().manual_seed(1)
    width = policy.config.text_dim
    return policy.prefill(policy.pad([torch.randn(i + 1, width, generator=generator) for i in range(images)]))


@pytest.mark.parametrize("name", ["abs", "rope"])
@torch.no_grad()
def test_content_of_unknown_tokens_does_not_matter(name: str) -> None:
    policy = load(name)
    tokens = torch.randn(2, policy.tokens, policy.channels, generator=torch.Generator().manual_seed(0))
    known = torch.zeros(2, policy.tokens, dtype=torch.bool)
    known[:, [1, 7]] = True
    condition = condition_of(policy, 2)
    z = policy.backbone(tokens, known, condition)
    other = policy.backbone(tokens.masked_fill(~known[..., None], torch.nan), known, condition)
    assert torch.equal(z, other)
    moved = policy.backbone(tokens + 1, known, condition)
    assert largest(moved - z) > 0.1


@pytest.mark.parametrize("name", ["abs", "rope"])
@torch.no_grad()
def test_images_that_know_different_numbers_of_tokens_do_not_disturb_each_other(name: str) -> None:
    policy = load(name)
    tokens = torch.randn(3, policy.tokens, policy.channels, generator=torch.Generator().manual_seed(0))
    known = torch.zeros(3, policy.tokens, dtype=torch.bool)
    known[1, [0, 5, 9]] = True
    known[2] = True
    condition = condition_of(policy, 3)
    together = policy.backbone(tokens, known, condition)
    for i in range(3):
        part = slice(i, i + 1)
        alone = policy.backbone(tokens[part], known[part], condition.select(part))
        assert largest(together[part] - alone) < 1e-5


@torch.no_grad()
def test_the_first_half_of_the_blocks_skips_unknown_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load()  # 3 image blocks, 6 condition tokens, 24 tokens
    lengths: list[int] = []
    for block in policy.transformer.image_encoder.blocks:
        block.register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    known = torch.zeros(1, 24, dtype=torch.bool)
    known[0, :5] = True
    policy.backbone(torch.zeros(1, 24, 16), known, condition_of(policy, 1))
    assert lengths == [6 + 5, 6 + 24, 6 + 24]


@torch.no_grad()
def test_stride_16_has_tokens_of_one_latent_pixel() -> None:
    policy = random_policy(SMALL)
    assert (policy.tokens, policy.channels, policy.config.patch) == (32, 3, 1)
    known = torch.zeros(2, 32, dtype=torch.bool)
    known[:, :4] = True
    tokens = torch.randn(2, 32, 3, generator=torch.Generator().manual_seed(0))
    z = policy.backbone(tokens, known, condition_of(policy, 2))
    assert z.shape == (2, 32, 16)
    assert policy.head(tokens[0], torch.full((32,), 500.0), z[0]).shape == (32, 3)


@torch.no_grad()
def test_the_head_treats_tokens_alone() -> None:
    policy = load()
    generator = torch.Generator().manual_seed(0)
    x, z = torch.randn(9, 16, generator=generator), torch.randn(9, 48, generator=generator)
    t = torch.linspace(0, 1000, 9)
    some = torch.tensor([7, 2])
    assert largest(policy.head(x, t, z)[some] - policy.head(x[some], t[some], z[some])) < 1e-5


@torch.no_grad()
def test_half_precision_weights_give_transitions_in_single_precision() -> None:
    policy = load().to(torch.bfloat16)
    z = policy.backbone(torch.zeros(1, 24, 16), torch.zeros(1, 24, dtype=torch.bool), condition_of(policy, 1))
    assert z.dtype == torch.bfloat16
    assert policy.head(torch.zeros(3, 16), torch.zeros(3), z[0, :3]).dtype == torch.float32


def test_renorm_and_ramp_by_hand() -> None:
    conditional, null = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[0.0, 0.0]]])
    # guided = 2 * conditional: twice its norm, so renorm shrinks by max(0.5, renorm)
    assert guide(conditional, null, 2.0).tolist() == [[[6.0, 8.0]]]
    assert guide(conditional, null, 2.0, 0.8).flatten().tolist() == pytest.approx([4.8, 6.4])
    assert guide(conditional, null, 2.0, 0.1).flatten().tolist() == pytest.approx([3.0, 4.0])
    ramp = NovaGuidance(scale=5.0, minimum=1.0)
    assert [ramp.at(step, 4) for step in range(4)] == [2.0, 3.0, 4.0, 5.0]
    assert NovaGuidance(scale=5.0).at(0, 4) == 5.0


@pytest.mark.parametrize(("scale", "name"), [(1.0, "ode_g1"), (5.0, "ode_g5")])
def test_our_rollout_on_recorded_noise_is_the_reference_image(
    scale: float, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden = load_file(GOLDEN / "abs" / "golden.safetensors")
    policy = load()
    states = [golden["text.raw_0"], golden["text.raw_1"]]
    monkeypatch.setattr(
        policy,
        "encode",
        lambda prompts: policy.pad([torch.zeros(0, 0)] * 2 if prompts[0] is None else states),
    )
    start = [patchify(canvas, 2) for canvas in golden["noise.init"]]
    monkeypatch.setattr(rollout_module.noise, "orders", lambda seeds, tokens: golden["order"])
    monkeypatch.setattr(rollout_module.noise, "normal", lambda seeds, purpose, k, shape: start[k])
    result = generate(policy, ["a", "b"], [0, 1], 4, guidance=scale, stochastic=False)
    assert largest(unpatchify(result.tokens, 2, (4, 6)) - golden[f"{name}.x"]) < 1e-4


def test_condition_and_text_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load()
    calls: list[int] = []
    condition = policy.transformer.condition
    monkeypatch.setattr(
        policy.transformer, "condition", lambda text: calls.append(len(text)) or condition(text)
    )
    generate(policy, ["a red cube", "two dogs", "a red cube"], [1, 2, 3], 4, guidance=3.0)
    assert calls == [3, 3]  # prompts and null prompts
    assert policy.text.passes == 2  # distinct prompts; the null prompt needs none
    generate(policy, ["two dogs"], [1], 4)
    assert policy.text.passes == 2


def test_prompts_are_padded_with_the_table_and_cut() -> None:
    policy = load()  # 6 text tokens, a token per byte
    table = policy.transformer.text_embed.weight
    text = policy.encode([None, "", "abc", "abcdefghij", "abcdefzzzzzz"])["text"]
    assert text.shape == (5, 6, 24)
    assert torch.equal(text[0], table[:6])
    assert torch.equal(text[1], table[:6])
    assert torch.equal(text[2, 3:], table[3:6])
    assert largest(text[2, :3] - text[3, :3]) < 1e-6  # causal: later tokens do not matter
    assert not torch.equal(text[3], table[:6])
    assert torch.equal(text[3], text[4])  # only 6 tokens of the prompt are used


def test_text_states_are_those_of_transformers() -> None:
    from transformers import PhiForCausalLM

    policy = load()
    model = PhiForCausalLM.from_pretrained(folder() / "text_encoder").eval()
    tokenizer = policy.text
    states = tokenizer.states(["bcd", "b", "a longer one"], torch.device("cpu"))
    ids = tokenizer._tokenizer("bcd")["input_ids"]
    assert len(ids) == 3
    expected = model.model(torch.tensor([ids])).last_hidden_state[0]
    assert largest(states[0] - expected) < 1e-6
    assert largest(states[1] - model.model(torch.tensor([ids[:1]])).last_hidden_state[0]) < 1e-6


def test_images_are_those_of_diffusers() -> None:
    from diffusers import AutoencoderKL

    policy = load()
    vae = AutoencoderKL.from_pretrained(folder() / "vae").eval()
    tokens = torch.randn(2, 24, 16, generator=torch.Generator().manual_seed(0))
    images = policy.decode(tokens)
    assert images.shape == (2, 3, 64, 96)
    # token 7 is row 1, column 1 of the 4 x 6 grid; its first value is channel 0 of latent pixel (2, 2)
    latents = unpatchify(tokens, 2, (4, 6))
    assert float(latents[0, 0, 2, 2]) == float(tokens[0, 7, 0])
    with torch.no_grad():
        expected = vae.decode(latents / 0.5).sample
    assert largest(images - (expected / 2 + 0.5).clamp(0, 1)) < 1e-5
    assert float(images.std()) > 0.1
