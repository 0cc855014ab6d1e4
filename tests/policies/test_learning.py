"""MAR and Harmon through our own rollout, objective and updater, on tiny checkpoints under the real names."""

from __future__ import annotations

import copy
import dataclasses
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from margrpo.checkpoints import save_policy
from margrpo.config import Config, Objective, Sampler
from margrpo.ddpm import DDPM
from margrpo.objective import Totals, advantages, consistency_mask, step_terms
from margrpo.params import load_config
from margrpo.policies.masked import MaskedPolicy
from margrpo.prompts import Prompt
from margrpo.rewards import base as rewards
from margrpo.rollout import Recording, Rollout, generate, guided_head, take
from margrpo.trajectories import Rows, build_rows, draw_fresh
from margrpo.updater import Updater
from tests.policies.real import prompts_of, read, trainable_folder
from tests.support import objective

FAMILIES = ["mar", "harmon"]
K, T = 4, 9  # nine steps: the checkpoints' own spacing "8,1"
PARAMS = Path(__file__).parents[2] / "params.yaml"
PRESETS = list(load_config(PARAMS).variants)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def policy(family: str, tmp_path_factory: pytest.TempPathFactory) -> MaskedPolicy:
    policy = read(family, trainable_folder(family, tmp_path_factory.mktemp(family))).eval()
    policy.configure(Sampler(denoising_steps=T))
    return policy


def roll(
    policy: MaskedPolicy, family: str, images: int, recording: Recording, guidance: float = 1.0
) -> Rollout:
    prompts = (prompts_of(family) * images)[:images]
    return generate(policy, prompts, list(range(images)), K, guidance, recording=recording)


@torch.no_grad()
def test_noise_of_every_recorded_transition_is_standard_normal(policy: MaskedPolicy, family: str) -> None:
    """Mean z^2 = 1 within 3 standard errors, unguided and with guidance in rollout and scoring."""
    for guidance in (1.0, 3.0):
        recording = Recording(range(K), tuple(policy.transition.scored), unknown=True)
        rollout = roll(policy, family, 4, recording, guidance)
        squares = []
        for step in rollout.steps:
            conditions = [rollout.condition] + ([] if rollout.null is None else [rollout.null])
            zs = [take(policy.backbone(step.tokens, step.known, c), step.index) for c in conditions]
            flat = [z.flatten(0, 1) for z in zs]
            assert step.trajectories.states is not None
            assert step.trajectories.next_states is not None
            for t, state, following in zip(
                step.trajectories.steps, step.trajectories.states, step.trajectories.next_states, strict=True
            ):
                x = state.flatten(0, 1)
                output = guided_head(policy, x, t, flat[0], flat[1] if guidance != 1 else None, guidance)
                kernel = policy.transition.kernel(t, x, output)
                squares.append(((following.flatten(0, 1) - kernel.mean) / kernel.std).square().flatten())
        values = torch.cat(squares)
        assert len(values) > 10_000
        error = float(values.std() / len(values) ** 0.5)
        assert abs(float(values.mean()) - 1) < 3 * error


@pytest.mark.parametrize("switches", [{}, {"guidance": {"rollout": 3.0, "logprob": "guided"}}])
def test_the_first_inner_epoch_has_ratio_one(
    policy: MaskedPolicy, family: str, switches: Mapping[str, Any]
) -> None:
    wanted = objective(token_mask="unknown", **switches)
    recording = Recording(range(K), tuple(policy.transition.scored), unknown=True)
    rollout = roll(policy, family, 4, recording, wanted.guidance.rollout)
    for step in rollout.steps:
        rows = build_rows(policy, rollout, step, wanted, None)
        keep = torch.ones_like(step.index, dtype=torch.bool)
        totals = Totals(keep.numel() * T, keep.numel() * T)
        terms = step_terms(policy, policy, wanted, rollout, step, rows, keep, torch.ones(4), totals)
        # sums of log-densities around 10: float32 rounding of the same numbers in another batch shape
        assert terms.ratio_deviation < 2e-3
        assert terms.kl == pytest.approx(0.0, abs=1e-6)


def test_bridged_rows_follow_the_true_posterior(policy: MaskedPolicy, family: str) -> None:
    wanted = objective(
        token_mask="committed", trajectory_source="bridged", trajectories=2, rao_blackwell=True
    )
    steps = (0, 3, 7)
    rollout = roll(policy, family, 2, Recording([1], steps))
    step = rollout.steps[0]
    rows = build_rows(policy, rollout, step, wanted, None)
    ddpm = policy.transition
    assert isinstance(ddpm, DDPM)
    k = ddpm.steps - 1 - rows.step
    tables = ddpm.tables
    token = take(rollout.tokens, step.index).flatten(0, 1)[rows.token].double()
    mean = tables.x0_factor[k][:, None] * token + tables.x_factor[k][:, None] * rows.state.double()
    torch.testing.assert_close(rows.target.mean.double(), mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rows.target.std[:, 0].double(), tables.variance[k].sqrt(), rtol=1e-5, atol=0)
    # the states diffuse the committed token: their noise has unit variance
    signal = tables.alphas_cumprod[k].sqrt()[:, None] * token
    noise = (rows.state.double() - signal) / (1 - tables.alphas_cumprod[k]).sqrt()[:, None]
    assert noise.square().mean() == pytest.approx(1.0, abs=5 * (2 / noise.numel()) ** 0.5)


def to_double(value: Any) -> Any:
    """Return a record of a rollout in float64."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {f.name: to_double(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **changes)
    return [to_double(item) for item in value] if isinstance(value, list) else value


def double_policy(policy: MaskedPolicy) -> MaskedPolicy:
    """Return the policy in float64, also inside Qwen2's norms, which round to float32 whatever they are given."""
    exact = copy.deepcopy(policy).double()
    for name, module in list(exact.named_modules()):
        if isinstance(module, Qwen2RMSNorm):
            norm = nn.RMSNorm(module.weight.shape[0], eps=module.variance_epsilon, dtype=torch.float64)
            norm.weight = module.weight
            parent, leaf = name.rsplit(".", 1)
            setattr(exact.get_submodule(parent), leaf, norm)
    return exact


@pytest.mark.parametrize(
    "switches",
    [
        {"trainable": "all"},
        {
            "trainable": "all",
            "token_mask": "committed",
            "trajectory_source": "bridged",
            "trajectories": 2,
            "rao_blackwell": True,
        },
        {
            "trainable": "all",
            "trajectory_source": "resampled",
            "trajectories": 2,
            "resample_condition": "commit",
            "include_rollout": True,
            "guidance": {"rollout": 3.0, "logprob": "guided"},
        },
    ],
    ids=["grpo", "bridged", "resampled-guided"],
)
def test_gradients_are_finite_differences_in_float64(
    policy: MaskedPolicy, family: str, switches: Mapping[str, Any]
) -> None:
    """Old log-probs are fixed at the start, so the loss itself has the gradient; large beta: the KL counts."""
    wanted: Objective = objective(beta=0.5, **switches)
    scored = (1, 4, 7)
    recording = Recording([1], scored, unknown=wanted.token_mask == "unknown")
    rollout = roll(policy, family, 4, recording, wanted.guidance.rollout)
    fresh = draw_fresh(policy, rollout, wanted, scored)
    step = rollout.steps[0]
    rows: Rows = build_rows(policy, rollout, step, wanted, fresh)
    keep = consistency_mask(step, rollout.tokens, None)
    gain = advantages(torch.tensor([0.1, 0.7, 0.4, 0.2]), torch.zeros(4, dtype=torch.int64)).double()
    exact = double_policy(policy)
    reference = copy.deepcopy(exact)
    with torch.no_grad():
        for parameter in reference.mar.parameters():
            parameter.mul_(1.01)
    rollout, step, rows = to_double(rollout), to_double(step), to_double(rows)
    totals = Totals(keep.numel() * len(scored), keep.numel() * len(scored))

    def loss(old: Tensor | None) -> Any:
        return step_terms(exact, reference, wanted, rollout, step, rows, keep, gain, totals, old)

    old = loss(None).log_prob
    loss(old).loss.backward()
    names = ["mask_token", "encoder_blocks.0.qkv.weight", "decoder_norm.weight", "z_proj.weight"]
    names += ["denoiser.input_proj.weight", "denoiser.final_layer.linear.bias", "fake_latent"]
    parameters = dict(exact.mar.named_parameters())
    size = 1e-7  # transitions of the last steps have a spread of 6e-3: a log-prob curves within 1e-5
    for name in names:
        parameter = parameters[name]
        assert parameter.grad is not None
        if float(parameter.grad.abs().max()) == 0:
            assert name == "fake_latent"  # MAR without guidance does not use the null vector
            assert family == "mar"
            assert wanted.guidance.rollout == 1.0
            continue
        index = int(parameter.grad.abs().argmax())
        flat = parameter.data.view(-1)
        start = float(flat[index])
        values = []
        for shift in (size, -size):
            flat[index] = start + shift
            with torch.no_grad():
                values.append(float(loss(old).loss))
        flat[index] = start
        slope = (values[0] - values[1]) / (2 * size)
        assert float(parameter.grad.view(-1)[index]) == pytest.approx(slope, rel=1e-5), name


def jpeg_size(images: Tensor, prompts: Sequence[str], specs: Sequence[Mapping[str, Any]]) -> Tensor:
    """Kilobytes of each image as JPEG: any image has one, also those of random weights."""
    sizes = []
    for image in (images * 255).round().byte().permute(0, 2, 3, 1).numpy():
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, format="JPEG", quality=95)
        sizes.append(len(buffer.getvalue()) / 1000)
    return torch.tensor(sizes)


@pytest.fixture(scope="module")
def checkpoint(policy: MaskedPolicy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("base") / "base.safetensors"
    save_policy(policy, file, {})
    return file


def small_config() -> Config:
    config = load_config(PARAMS)
    sizes = {
        "updates": 2,
        "prompts_per_update": 2,
        "images_per_prompt": 3,
        "ar_steps": 2,
        "denoising_steps": 3,
    }
    return config.model_copy(
        update={
            "train": config.train.model_copy(update=sizes),
            "sampler": Sampler(ar_steps=K, denoising_steps=T),
            "reward": config.reward.model_copy(update={"weights": {"test_jpeg_size": 1.0}}),
        }
    )


@pytest.mark.parametrize("preset", PRESETS)
def test_two_updates_of_every_preset_change_what_learns_and_nothing_else(
    preset: str, family: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = rewards.Entry(rewards.Info("test_jpeg_size", "test", "none"), lambda options: jpeg_size)
    monkeypatch.setitem(rewards._REGISTRY, "test_jpeg_size", entry)
    prompts = [Prompt(text, "any", {}, True) for text in prompts_of(family)]
    updater = Updater(small_config(), preset, 0, checkpoint, prompts, prompts)
    before = {name: value.clone() for name, value in updater.policy.state_dict().items()}
    for update in (1, 2):
        row = updater.update(update, validated=False)
        assert row["reward_std"] > 0
        assert row["grad_norm"] > 0
        assert row["ratio_max_deviation"] < 5e-3
    changed = {n for n, v in updater.policy.state_dict().items() if not torch.equal(v, before[n])}
    learns = {name for name, p in updater.policy.named_parameters() if p.requires_grad}
    assert changed <= learns
    head = {name for name in changed if name.startswith("mar.denoiser.")}
    assert bool(head) == (updater.objective.trainable != "backbone")
    assert {"mar.mask_token", "mar.decoder_norm.weight", "mar.encoder_norm.weight"} <= changed
    assert ("mar.fake_latent" in changed) == (
        family == "harmon"
    )  # MAR: unguided, so the null class is not used
    for name, value in updater.reference.state_dict().items():
        assert torch.equal(value, before[name])
