from __future__ import annotations

from pathlib import Path

import pytest
import torch

from margrpo.checkpoints import load_policy, save_policy
from margrpo.config import Config
from margrpo.errors import ConfigError
from margrpo.params import load_config
from margrpo.policies.nova import NovaPolicy, read_nova
from margrpo.prefills import Prefills
from margrpo.prompts import Prompt
from margrpo.rollout import generate
from margrpo.updater import Updater
from tests.policies.nova_support import TEXTS, folder, largest

PARAMS = Path(__file__).parents[2] / "params.yaml"
PRESETS = list(load_config(PARAMS).variants)


def settings(*overrides: str) -> Config:
    sizes = {
        "checkpoint.source": "path",
        "checkpoint.path": folder(),
        "reward.weights": "{jpeg_size: 1.0}",
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
        assert row["ratio_max_deviation"] < 5e-4
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert rows[1]["kl"] > 1e-6
    # a resume state is complete: every trainable parameter has its moments
    assert len(updater.optimizer.state) == len(updater.trainable())
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
    calls: list[int] = []
    for policy in (updater.policy, updater.reference):
        prefill = policy.prefill
        monkeypatch.setattr(policy, "prefill", lambda c, prefill=prefill: calls.append(len(c)) or prefill(c))
    _, pieces = updater.collect(1)
    assert (
        calls == [3] * 4
    )  # two micro-batches: the policy's rollout, then the reference; each has 3 AR steps
    updater.accumulate(pieces)
    assert calls == [3] * 6
    shared = {name: p.grad.clone() for name, p in updater.policy.named_parameters() if p.grad is not None}
    monkeypatch.setattr(Prefills, "get", lambda self, policy, condition: policy.prefill(condition))
    updater.accumulate(pieces)
    assert len(calls) == 6 + 6
    for name, parameter in updater.policy.named_parameters():
        if parameter.grad is not None:
            scale = float(parameter.grad.abs().max())
            assert largest(shared[name] - parameter.grad) <= 1e-5 * scale + 1e-9
    assert float(shared["transformer.text_embed.proj.weight"].abs().max()) > 0


def test_a_trained_policy_is_saved_and_comes_back(bases: dict[bool, Path], tmp_path: Path) -> None:
    policy = load_policy(bases[False])
    assert isinstance(policy, NovaPolicy)
    policy.locate(folder)
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
