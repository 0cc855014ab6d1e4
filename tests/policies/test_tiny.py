from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from diffusers.models.embeddings import get_timestep_embedding
from torch import nn

from margrpo.benchmarks.scenes import load_split, score
from margrpo.config import Architecture, Sampler
from margrpo.diffusion import FlowSDE
from margrpo.errors import ConfigError
from margrpo.policies.base import Condition
from margrpo.policies.layers import AdaLNHead, AttentionBlock, timestep_features
from margrpo.policies.tiny import NULL_WORD, PatchTokenizer, TinyPolicy
from margrpo.pretrain import render_scenes
from margrpo.scenes.grammar import VOCABULARY, parse

SMALL = Architecture(width=24, depth=2, heads=2, head_width=16, head_depth=2, channels=6)
PROMPTS = ["a red circle", "a red circle left of a blue square", "three green triangles", None]


def random_weights(module: nn.Module, seed: int) -> None:
    """Replace the zero-initialised layers by random ones, so that every input can matter."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data.normal_(std=0.3, generator=generator)


@pytest.fixture
def policy() -> TinyPolicy:
    policy = TinyPolicy(SMALL, seed=1)
    random_weights(policy, 2)
    return policy


def draw(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- the protocol


def test_default_sizes_are_those_of_the_prototype():
    policy = TinyPolicy()
    assert (policy.tokens, policy.channels) == (16, 16)
    # block: qkv, proj, two MLP layers, two norms; the rest by their shapes
    block = 96 * 288 + 288 + 96 * 96 + 96 + 2 * 96 * 384 + 384 + 96 + 4 * 96
    rest = (len(VOCABULARY) + 1 + 8 + 16 + 1) * 96 + 16 * 96 + 96 + 2 * 96
    assert sum(p.numel() for p in policy.backbone_parameters()) == 3 * block + rest
    head = 64 * 96 + 96 + 96 * 96 + 96 + 96 * 96 + 96 + 16 * 96 + 96
    head += 2 * (2 * 96 + 2 * (96 * 96 + 96) + 96 * 288 + 288) + 96 * 192 + 192 + 96 * 16 + 16
    assert sum(p.numel() for p in policy.head_parameters()) == head


def test_backbone_and_head_parameters_are_all_and_disjoint(policy):
    backbone, head = list(policy.backbone_parameters()), list(policy.head_parameters())
    assert {id(p) for p in backbone}.isdisjoint(id(p) for p in head)
    assert {id(p) for p in backbone + head} == {id(p) for p in policy.parameters()}


def test_every_backbone_parameter_reaches_z(policy):
    known = torch.arange(16).expand(4, 16) < 5
    z = policy.backbone(draw((4, 16, 6)), known, policy.encode(PROMPTS))
    (z * draw((4, 16, 24), 1)).sum().backward()
    for name, parameter in policy.transformer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_every_head_parameter_reaches_the_velocity(policy):
    policy.head(draw((5, 6)), torch.rand(5), draw((5, 24))).square().sum().backward()
    for name, parameter in policy.denoiser.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_shapes_and_types(policy):
    condition = policy.encode(PROMPTS)
    assert len(condition) == 4
    z = policy.backbone(draw((4, 16, 6)), torch.zeros(4, 16, dtype=torch.bool), policy.prefill(condition))
    assert z.shape == (4, 16, 24)
    v = policy.head(draw((7, 6)), torch.rand(7), draw((7, 24)))
    assert v.shape == (7, 6)
    images = policy.decode(draw((4, 16, 6)) * 3)
    assert images.shape == (4, 3, 32, 32)
    assert images.min() == 0.0
    assert images.max() == 1.0
    assert {z.dtype, v.dtype, images.dtype} == {torch.float32}


def test_same_seed_same_weights_and_no_global_draws():
    before = torch.get_rng_state()
    one, two, other = TinyPolicy(SMALL, seed=5), TinyPolicy(SMALL, seed=5), TinyPolicy(SMALL, seed=6)
    assert torch.equal(before, torch.get_rng_state())
    for name, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[name]), name
    assert not torch.equal(one.transformer.mask_token, other.transformer.mask_token)
    assert all(bool(value.isfinite().all()) for value in one.state_dict().values())


def test_new_head_predicts_zero():
    policy = TinyPolicy(SMALL, seed=0)
    assert torch.equal(policy.head(draw((3, 6)), torch.rand(3), draw((3, 24))), torch.zeros(3, 6))


# --- condition


def test_encode_by_hand(policy):
    words = policy.encode(["a  Red circle", None])["words"]
    red, circle = VOCABULARY.index("red"), VOCABULARY.index("circle")
    assert words.tolist() == [[VOCABULARY.index("a"), red, circle, 0, 0, 0, 0, 0], [NULL_WORD] + [0] * 7]
    assert NULL_WORD not in range(len(VOCABULARY))


def test_encode_refuses_unknown_words(policy):
    with pytest.raises(ConfigError, match="purple"):
        policy.encode(["a purple circle"])


def test_conditions_select_and_join(policy):
    condition = policy.encode(PROMPTS)
    joined = Condition.join([condition.select(slice(0, 1)), condition.select(torch.tensor([3, 1]))])
    assert torch.equal(joined["words"], condition["words"][[0, 3, 1]])


def test_prompt_changes_z(policy):
    tokens, known = draw((4, 16, 6))[:1].repeat(4, 1, 1), torch.zeros(4, 16, dtype=torch.bool)
    z = policy.backbone(tokens, known, policy.encode(PROMPTS))
    for first in range(4):
        for second in range(first):
            assert (z[first] - z[second]).abs().max() > 1e-3


def test_padding_has_no_effect(policy):
    tokens, known = draw((4, 16, 6)), torch.ones(4, 16, dtype=torch.bool)
    condition = policy.encode(PROMPTS)
    expected = policy.backbone(tokens, known, condition)
    policy.transformer.words.weight.data[0] = 100.0
    assert torch.equal(policy.backbone(tokens, known, condition), expected)
    # positions that hold padding for "a red circle" (3 words) may hold anything
    policy.transformer.word_positions.data[3:] = 50.0
    assert torch.equal(policy.backbone(tokens, known, condition)[0], expected[0])
    assert not torch.equal(policy.backbone(tokens, known, condition)[1], expected[1])


def test_text_without_words_is_finite(policy):
    condition = Condition({"words": torch.zeros(2, 8, dtype=torch.int64)})
    assert policy.backbone(draw((2, 16, 6)), torch.zeros(2, 16, dtype=torch.bool), condition).isfinite().all()


# --- known and unknown tokens


def test_content_of_unknown_tokens_cannot_matter(policy):
    condition, known = policy.encode(PROMPTS), draw((4, 16)) > 0
    tokens = draw((4, 16, 6))
    changed = torch.where(known[..., None], tokens, torch.full_like(tokens, float("nan")))
    z = policy.backbone(tokens, known, condition)
    assert torch.equal(policy.backbone(changed, known, condition), z)


def test_gradients_stay_finite_with_any_content_of_unknown_tokens(policy):
    known = torch.zeros(4, 16, dtype=torch.bool)
    policy.backbone(torch.full((4, 16, 6), float("nan")), known, policy.encode(PROMPTS)).sum().backward()
    assert all(p.grad.isfinite().all() for p in policy.backbone_parameters() if p.grad is not None)


def test_every_known_token_matters_everywhere(policy):
    condition, known = policy.encode(PROMPTS[:1]), torch.ones(1, 16, dtype=torch.bool)
    tokens = draw((1, 16, 6)).requires_grad_()
    z = policy.backbone(tokens, known, condition)
    for position in range(16):
        (gradient,) = torch.autograd.grad(z[0, position].square().sum(), tokens, retain_graph=True)
        assert (gradient[0].abs().sum(-1) > 0).all()


def test_known_differs_from_unknown(policy):
    condition, tokens = policy.encode(PROMPTS), torch.zeros(4, 16, 6)
    known = torch.zeros(4, 16, dtype=torch.bool)
    given = known.clone()
    given[:, 3] = True
    assert not torch.allclose(
        policy.backbone(tokens, known, condition), policy.backbone(tokens, given, condition)
    )


def test_permuting_the_batch_permutes_the_output(policy):
    order = torch.tensor([2, 0, 3, 1])
    condition, tokens, known = policy.encode(PROMPTS), draw((4, 16, 6)), draw((4, 16), 3) > 0
    z = policy.backbone(tokens, known, condition)
    permuted = policy.backbone(tokens[order], known[order], condition.select(order))
    torch.testing.assert_close(permuted, z[order], atol=1e-5, rtol=1e-5)


# --- head


def test_head_rows_are_independent(policy):
    x, t, z = draw((6, 6)), torch.rand(6), draw((6, 24))
    alone = torch.cat([policy.head(x[i : i + 1], t[i : i + 1], z[i : i + 1]) for i in range(6)])
    torch.testing.assert_close(policy.head(x, t, z), alone, atol=1e-5, rtol=1e-5)
    x_changed = x.clone()
    x_changed[2] += 1
    changed = (policy.head(x_changed, t, z) - policy.head(x, t, z)).abs().amax(-1) > 1e-4
    assert changed.tolist() == [False, False, True, False, False, False]


def test_head_follows_the_formula():
    """Two blocks by hand from the equations of MAR's head, on double precision weights."""
    head = AdaLNHead(channels=3, outputs=5, condition=4, width=8, depth=2, features=6).double()
    random_weights(head, 4)
    x, z, t = draw((2, 3)).double(), draw((2, 4), 1).double(), torch.tensor([0.0, 700.0]).double()

    def linear(name: str, value: torch.Tensor) -> torch.Tensor:
        return value @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def silu(value: torch.Tensor) -> torch.Tensor:
        return value / (1 + torch.exp(-value))

    def norm(value: torch.Tensor) -> torch.Tensor:
        centered = value - value.mean(-1, keepdim=True)
        return centered / (centered.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    weights = head.state_dict()
    frequencies = torch.tensor([10_000 ** (-i / 3) for i in range(3)], dtype=torch.float64)
    features = torch.cat([torch.cos(t[:, None] * frequencies), torch.sin(t[:, None] * frequencies)], -1)
    y = linear("time_embed.mlp.2", silu(linear("time_embed.mlp.0", features))) + linear("cond_embed", z)
    u = linear("input_proj", x)
    for block in ("res_blocks.0", "res_blocks.1"):
        shift, scale, gate = linear(f"{block}.adaLN_modulation.1", silu(y)).split(8, -1)
        affine = norm(u) * weights[f"{block}.in_ln.weight"] + weights[f"{block}.in_ln.bias"]
        u = u + gate * linear(f"{block}.mlp.2", silu(linear(f"{block}.mlp.0", affine * (1 + scale) + shift)))
    shift, scale = linear("final_layer.adaLN_modulation.1", silu(y)).split(8, -1)
    expected = linear("final_layer.linear", norm(u) * (1 + scale) + shift)
    torch.testing.assert_close(head(x, t, z), expected, atol=1e-5, rtol=1e-5)  # the frequencies are float32


def test_timestep_features_are_those_of_diffusers():
    t = torch.tensor([0.0, 0.5, 1.0, 499.0, 999.0])
    for dimension in (64, 256):
        expected = get_timestep_embedding(t, dimension, flip_sin_to_cos=True, downscale_freq_shift=0)
        torch.testing.assert_close(timestep_features(t, dimension), expected, atol=1e-5, rtol=0)


def test_attention_block_is_torch_s_pre_norm_layer():
    block = AttentionBlock(12, 3)
    random_weights(block, 6)
    layer = nn.TransformerEncoderLayer(
        12, 3, 48, dropout=0.0, activation="gelu", layer_norm_eps=1e-6, batch_first=True, norm_first=True
    )
    names = {
        "norm1": "norm1",
        "norm2": "norm2",
        "proj": "self_attn.out_proj",
        "mlp.0": "linear1",
        "mlp.2": "linear2",
    }
    state = {
        f"{there}.{kind}": block.state_dict()[f"{here}.{kind}"]
        for here, there in names.items()
        for kind in ("weight", "bias")
    }
    state["self_attn.in_proj_weight"], state["self_attn.in_proj_bias"] = block.qkv.weight, block.qkv.bias
    layer.load_state_dict(state, strict=True)
    x, padded = draw((2, 7, 12)), torch.tensor([[False] * 7, [False, False, True, True, False, False, False]])
    mask = torch.zeros(2, 1, 1, 7).masked_fill(padded[:, None, None], -math.inf)
    expected = layer(x, src_key_padding_mask=padded)
    torch.testing.assert_close(block(x, mask), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(block(x, mask, start=4), expected[:, 4:], atol=1e-5, rtol=1e-5)


# --- schedule and transition


@pytest.mark.parametrize(
    ("steps", "expected"),
    [(1, [16]), (2, [5, 11]), (3, [2, 6, 8]), (6, [1, 1, 3, 3, 4, 4]), (16, [1] * 8 + [2, 1, 2, 1, 2])],
)
def test_schedule_by_hand(steps, expected):
    schedule = TinyPolicy(SMALL).ar_schedule(steps)
    assert schedule == expected
    assert sum(schedule) == 16


@pytest.mark.parametrize("steps", [0, 17])
def test_schedule_refuses_other_lengths(steps):
    with pytest.raises(ConfigError, match=f"sampler.ar_steps: {steps}; 1..16"):
        TinyPolicy(SMALL).ar_schedule(steps)


def test_configure_sets_the_transition(policy):
    policy.configure(Sampler(denoising_steps=4, eta=0.5, final_step="stochastic"))
    assert isinstance(policy.transition, FlowSDE)
    assert policy.transition.steps == 4
    assert policy.transition.scored == [0, 1, 2, 3]
    torch.testing.assert_close(policy.transition.times, torch.tensor([1.0, 0.75, 0.5, 0.25]))
    policy.configure(Sampler(denoising_steps=2))
    assert policy.transition.scored == [0]


# --- tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PatchTokenizer:
    tokenizer = TinyPolicy().tokenizer
    tokenizer.fit(render_scenes(1500, seed=1)[1])
    return tokenizer


def test_patches_are_row_by_row():
    tokenizer = PatchTokenizer(3)
    tokenizer.set_orthonormal(torch.Generator().manual_seed(0))
    image = torch.full((1, 3, 32, 32), 0.5)
    base = tokenizer.encode(image)
    image[0, 1, 8, 31] = 1.0  # second row of patches, last column
    changed = (tokenizer.encode(image) != base).any(-1)
    assert changed.nonzero().tolist() == [[0, 7]]


def test_all_components_reconstruct_exactly():
    tokenizer = PatchTokenizer(192)
    images = torch.rand(50, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    tokenizer.fit(images)
    torch.testing.assert_close(tokenizer.decode(tokenizer.encode(images)), images, atol=2e-4, rtol=0)


def test_components_are_uncorrelated_and_half_whitened(tokenizer):
    images = render_scenes(1500, seed=1)[1]
    tokens = tokenizer.encode(images).flatten(0, 1).double()
    covariance = torch.cov(tokens.T)
    variances = covariance.diagonal()
    assert (covariance - variances.diag()).abs().max() < 1e-3
    assert variances.mean() == pytest.approx(1.0, abs=1e-3)
    assert (variances.diff() < 0).all()
    # plain PCA coefficients of the same patches, by numpy's SVD
    patches = images.reshape(-1, 3, 4, 8, 4, 8).permute(0, 2, 4, 1, 3, 5).reshape(-1, 192).double()
    singular = torch.from_numpy(np.linalg.svd((patches - patches.mean(0)).numpy(), False, False))
    plain = singular[:16].square() / (len(patches) - 1)
    ratio = (
        variances / plain.sqrt()
    )  # half-whitened: variance is proportional to the plain standard deviation
    assert ratio.std() / ratio.mean() < 1e-3


def test_reconstructed_scenes_score_like_the_originals(tokenizer):
    prompts, images = render_scenes(300, seed=2)
    specs = [parse(prompt).spec for prompt in prompts]
    assert score(images, specs).mean() >= 0.99
    assert score(tokenizer.decode(tokenizer.encode(images)), specs).mean() >= 0.99
    generator = torch.Generator().manual_seed(0)
    noisy = tokenizer.encode(images) + 0.2 * torch.randn((300, 16, 16), generator=generator)
    assert score(tokenizer.decode(noisy), specs).mean() >= 0.98


def test_prompts_of_all_splits_can_be_encoded():
    policy = TinyPolicy(SMALL)
    for split in ("train", "validation", "test"):
        prompts = [prompt.text for prompt in load_split(split)]
        assert policy.encode(prompts)["words"].shape == (len(prompts), 8)
