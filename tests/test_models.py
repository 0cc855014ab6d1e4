"""LoRA, bf16, recomputed blocks and an offloaded reference: what they change and what they must not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from margrpo.checkpoints import load_policy, save_policy
from margrpo.errors import ConfigError
from margrpo.models import Models
from margrpo.pieces import Piece
from margrpo.policies.base import Policy
from margrpo.policies.harmon import HarmonPolicy
from margrpo.prompts import Prompt
from margrpo.rollout import generate
from margrpo.trainer import train
from margrpo.updater import Updater
from tests.policies import nova_support
from tests.policies.real import prompts_of, read, trainable_folder
from tests.support import make_config, make_policy, scene_prompts

FAMILIES = ("tiny", "mar", "harmon", "nova")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    made: dict[str, Policy] = {"tiny": make_policy(), "nova": nova_support.load()}
    for family in ("mar", "harmon"):
        made[family] = read(family, trainable_folder(family, folder / family))
    for family, policy in made.items():
        save_policy(policy, folder / f"{family}.safetensors", {})
    return {family: folder / f"{family}.safetensors" for family in made}


def prompts(family: str) -> list[Prompt]:
    if family == "tiny":
        return scene_prompts("train", 4)
    return [Prompt(text, "any", {}, True) for text in prompts_of(family)]


def checkpoint(family: str) -> dict[str, Any]:
    """Return the section that says where the frozen parts of a NOVA policy lie."""
    return {"source": "path", "path": str(nova_support.folder())} if family == "nova" else {}


def updater(family: str, bases: dict[str, Path], variant: str = "frozen_head", **settings: Any) -> Updater:
    config = make_config(
        checkpoint=checkpoint(family),
        sampler={"ar_steps": 4, "denoising_steps": 5},
        reward={"weights": {"jpeg_size": 1.0}},
        objective={"beta": 0.5},
        train=settings,
    )
    return Updater(config, variant, 0, bases[family], prompts(family), prompts(family))


def gradients(made: Updater, pieces: list[Piece] | None = None) -> dict[str, torch.Tensor]:
    made.accumulate(made.collect(1)[1] if pieces is None else pieces)
    return {n: p.grad.clone() for n, p in made.models.trainable().items() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_of_lora_is_the_base_bit_for_bit(family: str, bases: dict[str, Path]) -> None:
    made = updater(family, bases, lora={"rank": 2, "alpha": 4})
    other = updater(family, bases)  # with a copy as the reference
    assert made.reference is None
    assert all(".lora_" in name for name in made.models.trainable())
    with torch.no_grad():
        for name, parameter in made.models.trainable().items():
            if ".lora_B." in name:
                parameter.add_(0.3)  # far from the base
    _, pieces = made.collect(1)
    _, base_pieces = other.collect(1)
    assert not torch.equal(pieces[0].rollout.tokens, base_pieces[0].rollout.tokens)
    # the copy scores the states of the adapted policy
    expected = [piece.anchor for piece in pieces]
    with other.models.reference() as copy:
        from margrpo.pieces import add_anchors

        add_anchors(copy, pieces, other.objective)
    for one, piece in zip(expected, pieces, strict=True):
        assert one is not None
        assert piece.anchor is not None
        assert torch.equal(one.mean, piece.anchor.mean)
        assert torch.equal(
            one.expected_log_prob(piece.rows.target), piece.anchor.expected_log_prob(piece.rows.target)
        )
    metrics = made._step(1, made.accumulate(pieces))
    assert metrics["kl"] > 0
    assert metrics["grad_norm"] > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_lora_starts_as_the_base_and_its_checkpoint_is_a_plain_policy(
    family: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    config = make_config(
        checkpoint=checkpoint(family),
        sampler={"ar_steps": 4, "denoising_steps": 5},
        reward={"weights": {"jpeg_size": 1.0}},
        train={"updates": 2, "lora": {"rank": 2, "alpha": 4}, "learning_rate": 1e-2},
    )
    given = {"train": prompts(family), "validation": prompts(family)}
    models = Models(config, "grpo", 0, bases[family], CPU)
    before = load_policy(bases[family]).state_dict()
    assert models.export().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in models.export().items())
    train(config, "grpo", 0, bases[family], given, tmp_path / "out", tmp_path / "logs", progress=False)
    after = load_policy(tmp_path / "out" / "last.safetensors")  # strict
    changed = {name for name, value in after.state_dict().items() if not torch.equal(value, before[name])}
    assert changed
    assert all(name.endswith(".weight") and before[name].dim() == 2 for name in changed)
    if isinstance(after, HarmonPolicy):
        assert all(name.startswith("mar.") for name in changed)


def test_merged_weights_compute_what_the_adapters_compute(bases: dict[str, Path]) -> None:
    made = updater("tiny", bases, "grpo", lora={"rank": 3, "alpha": 2})
    with torch.no_grad():
        for parameter in made.trainable():
            parameter.add_(0.1)
    plain = load_policy(bases["tiny"]).eval()
    plain.configure(made.config.sampler)
    plain.load_state_dict(made.models.export())
    texts = [prompt.text for prompt in prompts("tiny")]
    with_adapters = generate(made.policy, texts, range(len(texts)), 4)
    merged = generate(plain, texts, range(len(texts)), 4)
    torch.testing.assert_close(with_adapters.tokens, merged.tokens, rtol=1e-4, atol=1e-4)
    # by hand: W + (alpha / rank) B A
    name = "transformer.blocks.0.qkv"
    layer = made.policy.get_submodule(name)
    update = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * (2 / 3)
    torch.testing.assert_close(made.models.export()[f"{name}.weight"], layer.base_layer.weight + update)


def test_targets_choose_layers_by_the_ends_of_their_names(bases: dict[str, Path]) -> None:
    names = updater("tiny", bases, lora={"rank": 1, "alpha": 1, "targets": ["qkv"]}).models.trainable()
    assert list(names) == [f"transformer.blocks.0.qkv.lora_{part}.default.weight" for part in "AB"]
    with pytest.raises(ConfigError, match=r"train.lora.targets: \['head'\]; allowed: ends of .*qkv"):
        updater("tiny", bases, lora={"rank": 1, "alpha": 1, "targets": ["head"]})


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_blocks_give_the_same_gradient(family: str, bases: dict[str, Path]) -> None:
    plain = gradients(updater(family, bases, "grpo"))
    recomputed = gradients(updater(family, bases, "grpo", gradient_checkpointing=True))
    assert plain.keys() == recomputed.keys()
    assert all(torch.equal(value, recomputed[name]) for name, value in plain.items())


def test_recomputed_blocks_keep_less(bases: dict[str, Path]) -> None:
    def kept(**settings: Any) -> int:
        made = updater("mar", bases, "grpo", **settings)
        _, pieces = made.collect(1)
        total = 0

        def count(value: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += value.numel()
            return value

        with torch.autograd.graph.saved_tensors_hooks(count, lambda value: value):
            made.accumulate(pieces[:1])
        return total

    assert kept(gradient_checkpointing=True) < 0.7 * kept()


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_passes_with_wide_transitions(family: str, bases: dict[str, Path]) -> None:
    exact = updater(family, bases, "grpo")
    made = updater(family, bases, "grpo", precision="bf16")
    _, pieces = made.collect(1)
    for piece in pieces:
        assert piece.rollout.tokens.dtype == piece.rows.state.dtype == torch.float32
        assert piece.rows.log_prob.dtype == torch.float32
        assert piece.anchor is not None
        assert piece.anchor.mean.dtype == piece.anchor.std.dtype == torch.float32
    assert all(parameter.dtype == torch.float32 for parameter in made.policy.parameters())
    rough, fine = gradients(made), gradients(exact)
    assert rough.keys() == fine.keys()
    assert all(value.dtype == torch.float32 for value in rough.values())
    metrics = made.update(1, False)
    assert metrics["kl"] == pytest.approx(0, abs=1e-6)  # policy and reference compute alike
    tokens = exact.collect(1)[1][0].rollout.tokens
    assert not torch.equal(pieces[0].rollout.tokens, tokens)
    assert float((pieces[0].rollout.tokens - tokens).abs().mean()) < 0.1 * float(tokens.abs().mean())


def test_an_offloaded_reference_is_on_the_device_only_while_it_scores(
    bases: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = updater("tiny", bases).update(1, True)
    made = updater("tiny", bases, offload_reference=True)
    moves: list[str] = []
    copy = made.reference
    assert copy is not None
    to = copy.to
    monkeypatch.setattr(copy, "to", lambda device: moves.append(str(device)) or to(device))
    monkeypatch.setattr(made.models, "device", torch.device("cpu", 0))
    assert made.update(1, True) == kept
    assert moves == ["cpu:0", "cpu"]
