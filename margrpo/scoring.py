"""Sections of params.yaml on what scores images: the rewards of training, the test and its benchmarks."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from margrpo.sources import Benchmark, Sha256
from margrpo.switches import Name, Section


class RewardOptions(Section):
    """Settings of one reward: its weights, how it runs, how its scores enter the mixture."""

    path: str | None = Field(
        None, description="folder with the weight files; null = from the hub, or none are needed"
    )
    files_sha256: Sha256 | None = Field(
        None, description="expected hash of the folder at path: of the list of its files' hashes"
    )
    batch_size: int | None = Field(
        None, ge=1, le=65_536, description="images scored together; null = the reward's own default"
    )
    device: str | None = Field(None, description="torch device of the reward; null = where the images are")
    precision: Literal["float32", "float16"] = Field(
        "float32", description="float16: autocast, as the originals run on a GPU"
    )
    shift: float = Field(0.0, description="the mixture takes (score - shift) / scale")
    scale: float = Field(1.0, gt=0.0, description="the mixture takes (score - shift) / scale")
    normalize: Literal["none", "minmax", "standard"] = Field(
        "none", description="in training, over the batch: to 0 .. 1, or to mean 0 and deviation 1"
    )
    on_failure: Literal["drop", "fail"] = Field(
        "drop", description="images without a score: leave them out of the policy term, or stop"
    )
    timeout_s: float | None = Field(
        None, gt=0.0, le=86_400.0, description="limit for one batch of images; null = none, 120 s with url"
    )
    url: str | None = Field(
        None,
        pattern=r"^https?://[^\s/?#@]+(/[^\s?#@]*)?$",
        description="address of `margrpo serve-reward <name>`; null = score in this process",
    )
    wait_s: float | None = Field(
        None,
        ge=0.0,
        le=1_000_000.0,
        description="with url: how long to retry before the run stops; null = 600 s",
    )
    sha256: str | None = Field(
        None, pattern=r"^[0-9a-f]{64}$", description="with url: weights that the server must have; null = any"
    )

    @model_validator(mode="after")
    def settings_are_of_this_side(self) -> RewardOptions:
        """Refuse settings that only the serving side, or only a client, can obey."""
        remote = self.url is not None
        for name in ("path", "device"):
            if remote and getattr(self, name) is not None:
                raise ValueError(f"{name}\0{getattr(self, name)}\0null with url (an option of serve-reward)")
        if remote and self.precision != "float32":
            raise ValueError(f"precision\0{self.precision}\0float32 with url (an option of serve-reward)")
        for name in ("wait_s", "sha256"):
            if not remote and getattr(self, name) is not None:
                raise ValueError(f"{name}\0{getattr(self, name)}\0null without url")
        return self


class Reward(Section):
    """The mixture that training maximises: name -> weight."""

    weights: dict[str, float] = Field(
        {"scenes": 1.0}, min_length=1, description="registered rewards and weights"
    )
    options: dict[str, RewardOptions] = Field({}, description="settings of single rewards, by name")

    @model_validator(mode="after")
    def options_are_of_used_rewards(self) -> Reward:
        """Refuse settings of a reward that the mixture doesn't have."""
        for name in self.options:
            if name not in self.weights:
                raise ValueError(f"options\0{name}\0a reward of weights: {', '.join(self.weights)}")
        return self


class Evaluation(Section):
    """The test of a trained policy on held-out prompts."""

    images_per_prompt: int = Field(
        8, ge=2, le=1000, description="images per test prompt; noise seeds are fixed"
    )
    prompts: int | None = Field(None, ge=2, description="first n test prompts (smoke runs); null = all")
    samplers: list[Literal["ode", "sde"]] = Field(
        ["ode", "sde"], min_length=1, description="how images are drawn"
    )
    guidance: float = Field(1.0, ge=1.0, le=50.0, description="CFG scale of validation and evaluation")
    guidance_renorm: float = Field(
        1.0,
        gt=0.0,
        le=1.0,
        description="NOVA, ode: least factor on guided outputs longer than conditional ones",
    )
    guidance_trunc: float = Field(
        0.0, ge=0.0, le=1000.0, description="NOVA, ode: no guidance at times below this (of 1000)"
    )
    device: Literal["cpu", "cuda"] = Field("cpu", description="where policies are evaluated")
    kl_prompts: int = Field(
        32, ge=1, le=10_000, description="prompts of the common state set for the KL to the base"
    )
    batch_size: int = Field(
        128, ge=1, le=65_536, description="images sampled together; does not change results"
    )
    grid_prompts: int = Field(8, ge=1, le=32, description="rows of the sample grid")
    benchmarks: dict[Name, Benchmark] = Field({}, description="name -> prompts and scores; see docs")
    options: dict[str, RewardOptions] = Field(
        {}, description="settings of scores of the benchmarks, by name; default those of reward.options"
    )

    @model_validator(mode="after")
    def options_are_of_used_scores(self) -> Evaluation:
        """Refuse settings of a score that no benchmark has."""
        used = sorted({score for benchmark in self.benchmarks.values() for score in benchmark.scores})
        for name in self.options:
            if name not in used:
                raise ValueError(f"options\0{name}\0a score of a benchmark: {', '.join(used) or 'none'}")
        return self

    @property
    def tuned(self) -> bool:
        """Whether images are drawn with the options of NOVA's own pipeline."""
        return self.guidance_renorm < 1.0 or self.guidance_trunc > 0.0

    @model_validator(mode="after")
    def options_are_applied(self) -> Evaluation:
        """Refuse options of NOVA's pipeline where they would change nothing or are not defined."""
        if self.tuned and self.guidance == 1.0:
            raise ValueError(f"guidance\0{self.guidance}\0above 1 with guidance_renorm or guidance_trunc")
        if self.tuned and self.samplers != ["ode"]:
            raise ValueError(
                f"samplers\0{self.samplers}\0[ode] with guidance_renorm or guidance_trunc (noiseless steps only)"
            )
        return self
