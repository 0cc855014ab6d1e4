"""The switches of the one objective, and which of their combinations mean something."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.]*$", max_length=64)]
"""A name of a variant, a run, a benchmark."""


class Section(BaseModel):
    """Base of all sections: unknown keys, wrong types and non-finite numbers are refused."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, validate_default=True
    )


class Guidance(Section):
    """Classifier-free guidance in the rollout and in scoring."""

    rollout: float = Field(1.0, ge=1.0, le=50.0, description="CFG scale when sampling; 1 = off")
    logprob: Literal["conditional", "guided"] = Field(
        "conditional", description="score with the conditional head (released) or with the guided one"
    )


class Objective(Section):
    """The switches of the one objective (DESIGN section 3). `None` = does not apply to this source."""

    trainable: Literal["backbone", "all", "head"] = Field("backbone", description="which parameters learn")
    token_mask: Literal["unknown", "committed"] = Field(
        "unknown",
        description="all tokens not yet known at an AR step (released), or only those written there",
    )
    trajectory_source: Literal["rollout", "resampled", "bridged"] = Field(
        "rollout",
        description="the rollout's own trajectories, fresh ones of the same z, or bridges to the token",
    )
    trajectories: int = Field(
        1, ge=1, le=64, description="S: trajectories per token (released: 3 NOVA, 5 Harmon)"
    )
    uncertain_fraction: float = Field(
        1.0,
        gt=0.0,
        le=1.0,
        description="share of tokens per image, most uncertain first, with the S estimate",
    )
    resample_condition: Literal["commit", "current"] | None = Field(
        None, description="resampled, unknown mask: which AR step's z draws the fresh trajectories"
    )
    include_rollout: bool | None = Field(
        None,
        description="resampled: average S + 1 with the rollout's own trajectory (true) or replace it (false)",
    )
    rao_blackwell: bool | None = Field(
        None, description="bridged: take the expectation over the next state in closed form"
    )
    consistency: float | None = Field(
        None,
        ge=-2.0,
        le=2.0,
        description="tau: keep a token if its cosine to the final token rises by more; null = off",
    )
    kl: Literal["gaussian", "released", "k3"] = Field(
        "gaussian", description="exact, exp(d)-d-1 on means, or k3"
    )
    beta: float = Field(0.01, ge=0.0, le=100.0, description="weight of the KL term")
    inner_epochs: int = Field(1, ge=1, le=16, description="updates per rollout; more than 1 needs clip_range")
    clip_range: float | None = Field(
        None, gt=0.0, lt=1.0, description="PPO clipping of the ratio; null = none"
    )
    guidance: Guidance = Guidance()

    @model_validator(mode="after")
    def refuse_void_combinations(self) -> Objective:
        """Refuse switches that would silently change nothing."""
        source, unknown = self.trajectory_source, self.token_mask == "unknown"
        rules: list[tuple[bool, str, str]] = [
            (
                self.consistency is not None and not unknown,
                "consistency",
                "null under token_mask committed (a token committed now is always kept)",
            ),
            (
                source == "bridged" and unknown,
                "token_mask",
                "committed with trajectory_source bridged (a bridge ends at a committed token)",
            ),
            (
                source == "rollout" and self.trajectories > 1,
                "trajectories",
                "1 with trajectory_source rollout (the rollout has one trajectory)",
            ),
            (
                self.uncertain_fraction < 1.0 and source == "rollout",
                "uncertain_fraction",
                "1.0 with trajectory_source rollout (every token uses the rollout's own)",
            ),
            (
                self.uncertain_fraction < 1.0 and self.trajectories == 1,
                "uncertain_fraction",
                "1.0 with trajectories 1 (the std of one final latent is 0)",
            ),
            (
                source == "resampled" and unknown and self.resample_condition is None,
                "resample_condition",
                "commit | current with trajectory_source resampled",
            ),
            (
                self.resample_condition is not None and source != "resampled",
                "resample_condition",
                "null unless trajectory_source is resampled",
            ),
            (
                self.resample_condition is not None and not unknown,
                "resample_condition",
                "null under token_mask committed (the commit z is the current z)",
            ),
            (
                source == "resampled" and self.include_rollout is None,
                "include_rollout",
                "true | false with trajectory_source resampled",
            ),
            (
                self.include_rollout is not None and source != "resampled",
                "include_rollout",
                "null unless trajectory_source is resampled",
            ),
            (
                source == "bridged" and self.rao_blackwell is None,
                "rao_blackwell",
                "true | false with trajectory_source bridged",
            ),
            (
                self.rao_blackwell is not None and source != "bridged",
                "rao_blackwell",
                "null unless trajectory_source is bridged",
            ),
            (
                self.kl == "k3" and source == "bridged",
                "kl",
                "gaussian | released with trajectory_source bridged (k3 needs states of the rollout)",
            ),
            (
                self.inner_epochs > 1 and self.clip_range is None,
                "clip_range",
                "0 < clip_range < 1 with inner_epochs > 1",
            ),
            (
                self.inner_epochs == 1 and self.clip_range is not None,
                "clip_range",
                "null with inner_epochs 1 (the ratio is 1, nothing is clipped)",
            ),
            (
                self.guidance.logprob == "guided" and self.guidance.rollout == 1.0,
                "guidance.logprob",
                "conditional with guidance.rollout 1 (both are the same)",
            ),
        ]
        for void, key, allowed in rules:
            if void:
                value: Any = self
                for part in key.split("."):
                    value = getattr(value, part)
                raise ValueError(f"{key}\0{value}\0{allowed}")
        return self
