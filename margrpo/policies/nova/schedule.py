"""Transitions from the scheduler that a NOVA checkpoint names, with diffusers' own tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from margrpo.config import Sampler
from margrpo.ddpm import DDPM, Variance
from margrpo.diffusion import FlowSDE, Transition
from margrpo.errors import ConfigError
from margrpo.policies.nova.libraries import quiet

_WHERE = "scheduler/scheduler_config.json"
_VARIANCES: dict[str, Variance] = {
    "fixed_small": "fixed_small",
    "fixed_small_log": "fixed_small",
    "fixed_large": "fixed_large",
    "fixed_large_log": "fixed_large",
}


def check_scheduler(config: Mapping[str, Any]) -> None:
    """Refuse schedulers that the transitions do not express.

    Raises:
        ConfigError: another class, prediction type, variance, or clipping of the predicted token.
    """
    kind = config.get("_class_name")
    rules: list[tuple[str, object, tuple[object, ...]]]
    if kind == "FlowMatchEulerDiscreteScheduler":
        rules = [("use_dynamic_shifting", False, (False,)), ("stochastic_sampling", False, (False,))]
    elif kind == "DDPMScheduler":
        rules = [
            ("prediction_type", "epsilon", ("epsilon",)),
            ("clip_sample", True, (False,)),
            ("thresholding", False, (False,)),
            ("variance_type", "fixed_small", tuple(_VARIANCES)),
        ]
    else:
        allowed = "allowed: FlowMatchEulerDiscreteScheduler or DDPMScheduler"
        raise ConfigError.of(f"{_WHERE}: _class_name", kind, allowed)
    for key, default, allowed_values in rules:
        value = config.get(key, default)
        if value not in allowed_values:
            raise ConfigError.of(f"{_WHERE}: {key}", value, f"allowed: {', '.join(map(str, allowed_values))}")


def flow_tables(config: Mapping[str, Any], steps: int) -> tuple[Tensor, float]:
    """Return sigmas [steps + 1] (descending to 0, float32) and the time per unit of sigma."""
    scheduler = _scheduler(config)
    scheduler.set_timesteps(steps)
    return scheduler.sigmas, float(scheduler.config.num_train_timesteps)


def ddpm_tables(config: Mapping[str, Any], steps: int) -> tuple[Tensor, list[int]]:
    """Return the training process's cumulative alphas (float32) and the ascending timesteps to visit."""
    scheduler = _scheduler(config)
    if steps > scheduler.config.num_train_timesteps:
        allowed = f"allowed: 2..{scheduler.config.num_train_timesteps} (training steps of the scheduler)"
        raise ConfigError.of("sampler.denoising_steps", steps, allowed)
    scheduler.set_timesteps(steps)
    return scheduler.alphas_cumprod, sorted(scheduler.timesteps.tolist())


def transition(config: Mapping[str, Any], sampler: Sampler) -> Transition:
    """Return the transitions of a sampler's denoising steps under a checkpoint's scheduler.

    A DDPM has no eta and always ends with a deterministic step; diffusers would add noise there if the variance
    is `fixed_large` and the last timestep is not 0.

    Raises:
        ConfigError: see `check_scheduler`.
    """
    check_scheduler(config)
    if config["_class_name"] == "DDPMScheduler":
        alphas_cumprod, timesteps = ddpm_tables(config, sampler.denoising_steps)
        return DDPM(alphas_cumprod, timesteps, _VARIANCES[config.get("variance_type", "fixed_small")])
    sigmas, time_scale = flow_tables(config, sampler.denoising_steps)
    return FlowSDE(sigmas, sampler.eta, sampler.final_step, time_scale)


def _scheduler(config: Mapping[str, Any]) -> Any:
    import diffusers  # seconds to import, and needed by real checkpoints alone

    kind = getattr(diffusers, config["_class_name"])
    try:
        with quiet():
            return kind.from_config(dict(config))
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ConfigError.of(_WHERE, " ".join(str(error).split()), "allowed: what diffusers reads") from error
