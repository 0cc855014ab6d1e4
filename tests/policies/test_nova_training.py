from __future__ import annotations

import copy
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from margrpo.checkpoints import load_policy, save_policy
from margrpo.config import Config, Objective
from margrpo.errors import ConfigError
from margrpo.golden.nova_released import released_latents
from margrpo.objective import Totals, step_terms
from margrpo.params import load_config
from margrpo.policies.nova import NovaPolicy, read_nova
from margrpo.prefills import Prefills
from margrpo.prompts import Prompt
from margrpo.rewards import base as rewards
from margrpo.rollout import Recording, Rollout, generate
from margrpo.trajectories import Rows, build_rows, draw_fresh
from margrpo.updater import Updater
from tests.policies.nova_support import folder, largest, load

PARAMS = Path(__file__).parents[2] / "params.yaml"
PRESETS = list(load_config(PARAMS).variants)
TEXTS = ["a red cube", "two dogs", "a blue ball", "a bird left of a tree"]


def jpeg_size(images: Tensor, prompts: Sequence[str], specs: Sequence[Mapping[str, Any]]) -> Tensor:
    """Kilobytes of the image as JPEG: random weights vary it."""
    sizes = []
    for image in images:
        buffer = io.BytesIO()
        pixels = (image.permute(1, 2, 0) * 255).round().byte().numpy()
        Image.fromarray(pixels).save(buffer, "JPEG", quality=95)
        sizes.append(buffer.tell() / 1000)
    return torch.tensor(sizes)


@pytest.fixture(autouse=True)
def _reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rewards._REGISTRY, "jpeg", jpeg_size)


def settings(*overrides: str) -> Config:
    sizes = {
        "reward.weights": "{jpeg: 1.0}",
        "sampler.ar_steps": 4,
        "sampler.denoising_steps": 5,
        "train.updates": 2,
        "train.milestone": "null",
        "train.prompts_per_update": 2,
        "train.images_per_prompt": 3,
        "train.ar_steps": 3,
        "train.denoising_steps": 2,
    }
    return load_config(PARAMS, [f"{key}={value}" for key, value in sizes.items()] + list(overrides))


def record(
    policy: NovaPolicy, switches: Objective, ar_steps: Sequence[int] = (0, 2, 3), images: int = 4
) -> tuple[Rollout, list[Rows]]:
    denoising = tuple(policy.transition.scored)
    recording = Recording(frozenset(ar_steps), denoising, switches.token_mask == "unknown", False)
    prompts = (TEXTS * images)[:images]
    rollout = generate(
        policy, prompts, list(range(images)), 4, switches.guidance.rollout, recording=recording
    )
    fresh = draw_fresh(policy, rollout, switches, denoising)
    return rollout, [build_rows(policy, rollout, step, switches, fresh) for step in rollout.steps]


def score(
    policy: NovaPolicy,
    reference: NovaPolicy,
    switches: Objective,
    rollout: Rollout,
    rows: list[Rows],
    advantage: Tensor,
    old: list[Tensor] | None = None,
) -> tuple[Tensor, list[Any]]:
    """Return the loss over all recorded AR steps and the terms of each."""
    totals = Totals(sum(s.index.numel() for s in rollout.steps), sum(s.index.numel() for s in rollout.steps))
    terms = []
    for i, (step, part) in enumerate(zip(rollout.steps, rows, strict=True)):
        keep = torch.ones_like(step.index, dtype=torch.bool)
        fixed = None if old is None else old[i]
        terms.append(
            step_terms(policy, reference, switches, rollout, step, part, keep, advantage, totals, fixed)
        )
    return torch.stack([term.loss for term in terms]).sum(), terms


@pytest.mark.parametrize("ddpm", [False, True])
@pytest.mark.parametrize("guidance", [{}, {"rollout": 3.0, "logprob": "guided"}])
@pytest.mark.parametrize("name", ["abs", "rope"])
def test_scoring_repeats_the_rollout(name: str, guidance: dict[str, Any], ddpm: bool) -> None:
    policy = load(name, ddpm)
    switches = Objective.model_validate({"guidance": guidance, "beta": 0.0})
    rollout, rows = record(policy, switches, images=8)
    _, terms = score(policy, policy, switches, rollout, rows, torch.ones(8))
    assert max(term.ratio_deviation for term in terms) < 2e-3  # float32 rounding over the smallest std
    squares = []
    for term, part in zip(terms, rows, strict=True):
        std = policy.transition.kernel(part.step, part.state, torch.zeros_like(part.state)).std
        constant = policy.channels * (std[:, 0].log() + 0.5 * math.log(2 * math.pi))
        squares.append(-2 * (term.log_prob + constant))
    z2 = torch.cat(squares).sum() / (torch.cat(squares).numel() * policy.channels)
    error = math.sqrt(2 / (torch.cat(squares).numel() * policy.channels))
    assert float(z2) == pytest.approx(1.0, abs=3 * error)


def test_scoring_under_the_released_condition_describes_another_distribution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = load()
    switches = Objective.model_validate({"beta": 0.0})
    rollout, rows = record(policy, switches, ar_steps=(2,))
    monkeypatch.setattr(
        policy,
        "backbone",
        lambda tokens, known, condition: released_latents(policy, condition["text"], tokens, known),
    )
    _, terms = score(policy, policy, switches, rollout, rows, torch.ones(4))
    assert max(term.ratio_deviation for term in terms) > 0.1


PROBED = [
    "text_embed.proj.weight",
    "text_embed.norm.bias",
    "mask_embed.bos_token",
    "mask_embed.mask_token",
    "video_encoder.blocks.0.attn.qkv.weight",
    "image_encoder.patch_embed.proj.weight",
    "image_encoder.blocks.0.mlp.fc1.weight",
    "image_encoder.blocks.1.norm2.weight",
    "image_decoder.blocks.0.norm1.proj.weight",
    "image_decoder.time_cond_embed.condition_proj.fc1.weight",
]
OBJECTIVES: dict[str, dict[str, Any]] = {
    "rollout": {"trainable": "all", "beta": 5.0},
    "released_kl": {"trainable": "all", "beta": 50.0, "kl": "released"},
    "guided": {"trainable": "all", "beta": 1.0, "guidance": {"rollout": 2.0, "logprob": "guided"}},
    "resampled": {
        "trainable": "all",
        "trajectory_source": "resampled",
        "trajectories": 2,
        "resample_condition": "current",
        "include_rollout": True,
    },
    "bridged": {
        "trainable": "all",
        "token_mask": "committed",
        "trajectory_source": "bridged",
        "trajectories": 2,
        "rao_blackwell": True,
        "beta": 5.0,
    },
}


@pytest.mark.parametrize(
    ("name", "kind", "ddpm"),
    [("abs", kind, False) for kind in OBJECTIVES] + [("rope", "rollout", False), ("abs", "bridged", True)],
)
def test_gradient_is_that_of_finite_differences(name: str, kind: str, ddpm: bool) -> None:
    policy = load(name, ddpm)
    switches = Objective.model_validate(OBJECTIVES[kind])
    rollout, rows = record(policy, switches, ar_steps=(1, 3), images=2)
    policy = policy.double()
    reference = copy.deepcopy(policy).requires_grad_(False)
    for parameter in reference.parameters():
        parameter.mul_(0.98)
    advantage = torch.tensor([1.0, -0.7], dtype=torch.float64)
    loss, terms = score(policy, reference, switches, rollout, rows, advantage)
    loss.backward()
    # the ratio is 1 by construction: to differ, the old log-probs must stay where they are
    old = [term.log_prob for term in terms]
    parameters = dict(policy.transformer.named_parameters())
    checked = 0
    for key in PROBED:
        gradient = parameters[key].grad
        assert gradient is not None
        for place in (int(gradient.abs().argmax()), gradient.numel() // 3):
            flat = parameters[key].data.view(-1)
            values, before = [], float(flat[place])
            for shift in (1e-6, -1e-6):
                flat[place] = before + shift
                with torch.no_grad():
                    values.append(score(policy, reference, switches, rollout, rows, advantage, old)[0])
            flat[place] = before
            numeric = float(values[0] - values[1]) / 2e-6
            assert float(gradient.view(-1)[place]) == pytest.approx(numeric, rel=1e-5, abs=1e-7)
            checked += abs(numeric) > 1e-4
    assert checked >= len(PROBED)  # the comparison is not one of zeros


def test_a_large_beta_adds_beta_times_the_kl() -> None:
    policy = load()
    reference = copy.deepcopy(policy).requires_grad_(False)
    for parameter in reference.parameters():
        parameter.mul_(0.98)
    plain = Objective.model_validate({"beta": 0.0})
    rollout, rows = record(policy, plain, ar_steps=(2,))
    step, part, advantage = rollout.steps[0], rows[0], torch.tensor([1.0, -1.0, 0.5, 2.0])
    without, _ = score(policy, reference, plain, rollout, rows, advantage)
    heavy = Objective.model_validate({"beta": 100.0})
    with_kl, _ = score(policy, reference, heavy, rollout, rows, advantage)
    # by hand: (difference of velocities * factor)^2 / (2 s^2), summed over channels, averaged over tokens
    outputs = []
    for model in (policy, reference):
        with torch.no_grad():
            z = model.backbone(step.tokens, step.known, model.prefill(rollout.condition))
            z = z.take_along_dim(step.index[..., None], 1).flatten(0, 1)[part.token]
            outputs.append(model.head(part.state, model.transition.times[part.step], z))
    zero = torch.zeros_like(part.state)
    unit = policy.transition.kernel(part.step, zero, zero + 1)
    kl = 0.5 * ((outputs[0] - outputs[1]) * unit.mean / unit.std).square().sum()
    assert float((with_kl - without).detach()) == pytest.approx(
        100 * float(kl) / step.index.numel(), rel=1e-4
    )
    assert float(kl) > 0.1


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    made = {}
    for ddpm in (False, True):
        made[ddpm] = tmp_path_factory.mktemp("base") / "nova.safetensors"
        save_policy(read_nova(folder("abs", ddpm)), made[ddpm], {"source": "golden"})
    return made


@pytest.mark.parametrize(
    ("variant", "ddpm"),
    [(variant, False) for variant in PRESETS] + [("mar_grpo_bridged", True), ("mar_grpo_released", True)],
)
def test_two_updates_of_each_preset(variant: str, ddpm: bool, bases: dict[bool, Path]) -> None:
    prompts = [Prompt(text, "none", {}, True) for text in TEXTS]
    updater = Updater(settings(), variant, 0, bases[ddpm], prompts, prompts)
    assert isinstance(updater.policy, NovaPolicy)
    before = {name: value.clone() for name, value in updater.policy.state_dict().items()}
    rows = [updater.update(update, update == 2) for update in (1, 2)]
    changed = {
        name for name, value in updater.policy.state_dict().items() if not torch.equal(value, before[name])
    }
    names = {id(p): name for name, p in updater.policy.named_parameters()}
    backbone = {names[id(p)] for p in updater.policy.backbone_parameters()}
    head = {names[id(p)] for p in updater.policy.head_parameters()}
    trainable = updater.objective.trainable
    assert changed == backbone | head if trainable == "all" else changed == backbone
    untouched = before.keys() - backbone - head
    assert untouched == {
        "transformer.text_embed.weight",
        "transformer.video_encoder.patch_embed.proj.weight",
        "transformer.video_encoder.patch_embed.proj.bias",
    }
    assert all(torch.equal(value, before[name]) for name, value in updater.reference.state_dict().items())
    for row in rows:
        assert row["reward_std"] > 0
        assert row["grad_norm"] > 0
        assert row["ratio_max_deviation"] < 2e-3
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert rows[1]["kl"] > 1e-6
    # one policy encodes, the reference never does: no second text encoder or VAE in memory
    assert updater.reference.text.passes == 0
    assert updater.policy.text.passes <= len(TEXTS)


def test_updates_repeat_exactly_and_micro_batches_give_the_same_gradient(bases: dict[bool, Path]) -> None:
    prompts = [Prompt(text, "none", {}, True) for text in TEXTS]
    rows = []
    for overrides in ((), (), ("train.micro_batch=2",)):
        updater = Updater(settings(*overrides), "frozen_head", 0, bases[False], prompts, prompts)
        rows.append(updater.update(1, True))
    assert rows[0] == rows[1]
    for key in ("loss", "grad_norm", "reward"):
        assert rows[2][key] == pytest.approx(rows[0][key], rel=1e-4, abs=1e-7)


def test_the_condition_is_computed_once_per_micro_batch_with_the_same_gradient(
    bases: dict[bool, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [Prompt(text, "none", {}, True) for text in TEXTS]
    updater = Updater(settings("train.micro_batch=3"), "frozen_head", 0, bases[False], prompts, prompts)
    assert isinstance(updater.policy, NovaPolicy)
    for parameter in updater.reference.parameters():
        parameter.mul_(0.98)  # a KL with a gradient
    _, pieces = updater.collect(1)
    calls: list[int] = []
    for policy in (updater.policy, updater.reference):
        prefill = policy.prefill
        monkeypatch.setattr(policy, "prefill", lambda c, prefill=prefill: calls.append(len(c)) or prefill(c))
    updater.accumulate(pieces)
    assert calls == [3] * 4  # two micro-batches, policy and reference; each has 3 AR steps
    shared = {name: p.grad.clone() for name, p in updater.policy.named_parameters() if p.grad is not None}
    monkeypatch.setattr(Prefills, "get", lambda self, policy, condition: policy.prefill(condition))
    updater.accumulate(pieces)
    assert len(calls) == 4 + 12
    for name, parameter in updater.policy.named_parameters():
        if parameter.grad is not None:
            scale = float(parameter.grad.abs().max())
            assert largest(shared[name] - parameter.grad) <= 1e-5 * scale + 1e-9
    assert float(shared["transformer.text_embed.proj.weight"].abs().max()) > 0


def test_head_rows_are_those_of_tokens_in_the_loss(
    bases: dict[bool, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = load()
    switches = Objective.model_validate({"token_mask": "committed", "beta": 0.0})
    rollout, rows = record(policy, switches, ar_steps=(1,))
    committed = policy.ar_schedule(4)[1]
    counted: list[int] = []
    head = policy.transformer.image_decoder.forward
    monkeypatch.setattr(
        policy.transformer.image_decoder,
        "forward",
        lambda x, t, z: counted.append(len(x)) or head(x, t, z),
    )
    score(policy, policy, switches, rollout, rows, torch.ones(4))
    assert counted == [4 * committed * len(policy.transition.scored)]


def test_a_trained_policy_is_saved_and_comes_back(bases: dict[bool, Path], tmp_path: Path) -> None:
    policy = load_policy(bases[False])
    assert isinstance(policy, NovaPolicy)
    original = read_nova(folder())
    for name, value in original.state_dict().items():
        assert torch.equal(policy.state_dict()[name], value)
    first = generate(original.eval(), TEXTS[:2], [1, 2], 4)
    again = generate(policy.eval(), TEXTS[:2], [1, 2], 4)
    assert torch.equal(first.tokens, again.tokens)
    assert largest(policy.decode(first.tokens) - original.decode(first.tokens)) == 0
    # unused weights stay frozen after loading, so the optimizer has a state for every parameter it holds
    assert not any(p.requires_grad for p in policy.transformer.video_encoder.patch_embed.parameters())


def test_more_scored_steps_than_a_ddpm_has_are_refused(bases: dict[bool, Path]) -> None:
    prompts = [Prompt(text, "none", {}, True) for text in TEXTS]
    config = settings("sampler.final_step=stochastic", "train.denoising_steps=5")
    with pytest.raises(ConfigError, match=r"train\.denoising_steps: 5; allowed: 1\.\.4"):
        Updater(config, "frozen_head", 0, bases[True], prompts, prompts)
    assert Updater(config, "frozen_head", 0, bases[False], prompts, prompts).policy.transition.scored == [
        0,
        1,
        2,
        3,
        4,
    ]
