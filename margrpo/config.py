"""The typed form of params.yaml: every key described, bounded and defaulted; unknown keys are errors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from margrpo.sources import Architecture, Benchmark, Checkpoint, Pretrain, Prompts, Sha256
from margrpo.switches import Guidance, Objective, Section

__all__ = ["Architecture", "Config", "Guidance", "Objective", "Pretrain", "Sampler", "Section"]

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.]*$", max_length=64)]


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
