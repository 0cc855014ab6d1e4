"""The typed form of params.yaml: every key described, bounded and defaulted; unknown keys are errors."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from margrpo.scoring import Evaluation, Reward, RewardOptions
from margrpo.sources import Architecture, Checkpoint, Pretrain, Prompts
from margrpo.switches import Guidance, Name, Objective, Section

__all__ = [
    "Architecture",
    "Config",
    "Evaluation",
    "Guidance",
    "Name",
    "Objective",
    "Pretrain",
    "Reward",
    "RewardOptions",
    "Sampler",
    "Section",
]


class Sampler(Section):
    """The K x T generation of an image."""

    ar_steps: int = Field(6, ge=1, le=1024, description="K: backbone passes per image")
    denoising_steps: int = Field(8, ge=2, le=1000, description="T: head passes per token")
    eta: float = Field(0.7, gt=0.0, le=2.0, description="noise of the flow SDE")
    final_step: Literal["deterministic", "stochastic"] = Field(
        "deterministic",
        description="last denoising step: noiseless and unscored, or with noise (released flow code)",
    )
    temperature: float = Field(1.0, gt=0.0, le=2.0, description="factor on the noise of a DDPM; 1 for a flow")
    guidance_schedule: Literal["constant", "linear"] = Field(
        "constant",
        description="CFG scale over AR steps, also in rollouts: linear grows from 1 with the known tokens (MAR)",
    )


class Lora(Section):
    """Low-rank adapters on the linear layers that learn, instead of the layers themselves."""

    rank: int = Field(32, ge=1, le=4096, description="rank of an adapter")
    alpha: int = Field(64, ge=1, le=1_000_000, description="an adapter counts alpha / rank")
    targets: list[str] | None = Field(
        None, min_length=1, description="ends of the names of layers that get one; null = every linear layer"
    )


class Train(Section):
    """The update loop; shared by all variants so that they compare fairly."""

    updates: int = Field(50, ge=1, le=1_000_000, description="rollout + update rounds")
    prompts_per_update: int = Field(12, ge=1, le=4096, description="P: prompt slots, each one group")
    images_per_prompt: int = Field(8, ge=2, le=1024, description="G: images of a group")
    ar_steps: int = Field(
        3, ge=1, le=1024, description="AR steps scored per update, drawn once for all images"
    )
    denoising_steps: int = Field(
        4, ge=1, le=1000, description="denoising steps scored per update, drawn once"
    )
    learning_rate: float = Field(4.0e-4, gt=0.0, le=1.0, description="AdamW")
    weight_decay: float = Field(0.0, ge=0.0, le=1.0, description="AdamW")
    max_grad_norm: float = Field(1.0, gt=0.0, le=1.0e6, description="gradient norm clipping")
    micro_batch: int | None = Field(
        None, ge=1, description="images of a process in one rollout and backward pass; null = all"
    )
    device: Literal["cpu", "cuda"] = Field("cpu", description="where the policy is trained")
    precision: Literal["float32", "bf16"] = Field(
        "float32", description="of matrix products; weights, transitions and log-probs are float32"
    )
    gradient_checkpointing: bool = Field(
        False, description="recompute blocks in the backward pass: less memory, the same gradient"
    )
    offload_reference: bool = Field(
        False, description="keep the reference on the CPU while it is not needed; not with lora"
    )
    lora: Lora | None = Field(None, description="train adapters; the reference is the policy without them")
    ema: float | None = Field(
        None,
        gt=0.0,
        lt=1.0,
        description="decay of averaged weights, which are then validated, saved and evaluated; null = none",
    )
    validation_every: int = Field(10, ge=1, le=1_000_000, description="updates between validations")
    validation_images: int = Field(128, ge=2, le=100_000, description="images of one validation (SDE)")
    checkpoint_every: int = Field(10, ge=1, le=1_000_000, description="updates between resume states")
    milestone: int | None = Field(
        None, ge=1, description="extra checkpoint after this update, for equal-cost tests"
    )

    @model_validator(mode="after")
    def settings_have_an_effect(self) -> Train:
        """Refuse a milestone after the last update, and offloading a reference that LoRA does without."""
        if self.offload_reference and self.lora is not None:
            raise ValueError("offload_reference\0True\0false with lora (there is no second copy)")
        if self.milestone is not None and self.milestone > self.updates:
            raise ValueError(f"milestone\0{self.milestone}\0null or 1..updates ({self.updates})")
        return self


class Diagnose(Section):
    """What the stage `diagnose` measures at the base policy for the report."""

    gradients: int | None = Field(
        6, ge=2, le=10_000, description="gradients per variant, all in memory; null = none (large policies)"
    )
    images: int = Field(4, ge=0, le=16, description="validation prompts whose token maps are drawn")
    seed: int = Field(0, ge=0, le=2**31 - 1, description="seed of prompts and noise")


class Run(Section):
    """One cell of the study."""

    variant: Name = Field(description="a key of variants")
    seed: int = Field(0, ge=0, le=2**31 - 1, description="training seed")


class Study(Section):
    """Which runs `dvc repro` makes."""

    name: Name = Field("mar_grpo_ablation", description="name of the parent run in MLflow")
    runs: dict[str, Run] = Field(min_length=1, description="run name `<variant>-<seed>` -> variant and seed")


class Report(Section):
    """What the report compares."""

    level: float = Field(0.95, gt=0.5, lt=1.0, description="confidence level of all intervals")
    resamples: int = Field(10_000, ge=100, le=1_000_000, description="bootstrap resamples over prompts")
    comparisons: list[list[Name]] = Field(
        [], description="pairs [a, b]: is a better than b over the common seeds?"
    )

    @model_validator(mode="after")
    def comparisons_are_pairs(self) -> Report:
        """Every comparison names two different variants."""
        for index, pair in enumerate(self.comparisons):
            if len(pair) != 2 or pair[0] == pair[1]:
                raise ValueError(f"comparisons.{index}\0{pair}\0two different variants")
        return self


class Tracking(Section):
    """MLflow."""

    uri: str | None = Field(
        None, min_length=1, description="tracking server; null = sqlite file mlflow.db here"
    )
    experiment: str = Field("margrpo", min_length=1, max_length=200, description="MLflow experiment")


class Config(Section):
    """The whole of params.yaml."""

    study: Study
    checkpoint: Checkpoint = Checkpoint()
    prompts: Prompts = Prompts()
    pretrain: Pretrain = Pretrain()
    sampler: Sampler = Sampler()
    train: Train = Train()
    reward: Reward = Reward()
    objective: Objective = Objective()
    variants: dict[Name, dict[str, Any]] = Field(
        min_length=1, description="name -> objective switches it changes"
    )
    evaluation: Evaluation = Evaluation()
    diagnose: Diagnose = Diagnose()
    report: Report = Report()
    tracking: Tracking = Tracking()
    profiles: dict[Name, dict[str, Any]] = Field({}, description="name -> overlay on this file")

    @model_validator(mode="after")
    def names_are_known(self) -> Config:
        """Runs and comparisons name existing variants; scored steps exist."""
        known = ", ".join(self.variants)
        for name, run in self.study.runs.items():
            if run.variant not in self.variants:
                raise ValueError(f"study.runs.{name}.variant\0{run.variant}\0one of {known}")
            if name != f"{run.variant}-{run.seed}":
                raise ValueError(f"study.runs.{name}\0{name}\0the name {run.variant}-{run.seed}")
        for index, pair in enumerate(self.report.comparisons):
            for variant in pair:
                if variant not in self.variants and variant != "base":
                    raise ValueError(f"report.comparisons.{index}\0{variant}\0base or one of {known}")
        if self.train.ar_steps > self.sampler.ar_steps:
            raise ValueError(
                f"train.ar_steps\0{self.train.ar_steps}\0"  # then a new literal: \01 is another escape
                f"1..sampler.ar_steps ({self.sampler.ar_steps})"
            )
        if self.evaluation.tuned and self.sampler.guidance_schedule != "constant":
            raise ValueError(
                "sampler.guidance_schedule\0linear\0constant with evaluation.guidance_renorm or guidance_trunc"
            )
        scored = self.sampler.denoising_steps - (self.sampler.final_step == "deterministic")
        if self.train.denoising_steps > scored:
            raise ValueError(
                f"train.denoising_steps\0{self.train.denoising_steps}\0"
                f"1..{scored} (a deterministic final step has no log-prob)"
            )
        return self

    def objective_of(self, variant: str) -> Objective:
        """Return the objective of a variant: the defaults with the variant's switches on top."""
        from margrpo.params import build_objective  # params imports this module

        return build_objective(self, variant)
