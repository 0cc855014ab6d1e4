"""Where base policy, prompts and benchmarks come from: sections of params.yaml."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Annotated, Literal

from pydantic import Field, model_validator

from margrpo.switches import Section

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Checkpoint(Section):
    """Where the base policy comes from."""

    source: Literal["shipped", "pretrain", "path", "hub"] = Field(
        "shipped", description="origin of the base policy"
    )
    path: str | None = Field(
        None,
        min_length=1,
        description="with source path: a checkpoint file of margrpo, or the folder of a released checkpoint",
    )
    id: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$",
        max_length=96,
        description="with source hub: repository, owner/name",
    )
    revision: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][\w./-]*$",
        max_length=100,
        description="with source hub: commit (best: it never moves), tag or branch",
    )
    sha256: Sha256 | None = Field(
        None,
        description="expected hash of the file at path, or of a folder: of the list of its files' hashes",
    )
    files: dict[str, Sha256 | None] | None = Field(
        None,
        min_length=1,
        description="the only files to use of a folder or repository, each with its hash or null; null = what "
        "NOVA, Harmon and MAR need",
    )

    @model_validator(mode="after")
    def keys_match_source(self) -> Checkpoint:
        """Every key belongs to the source that reads it."""
        if self.source == "path" and self.path is None:
            raise ValueError("path\0None\0a checkpoint file or folder with source path")
        if self.source != "path" and self.path is not None:
            raise ValueError(f"path\0{self.path}\0null unless source is path")
        for key in ("id", "revision"):
            value = getattr(self, key)
            if (value is None) == (self.source == "hub"):
                allowed = "a value with source hub" if value is None else "null unless source is hub"
                raise ValueError(f"{key}\0{value}\0{allowed}")
        if self.files is not None and self.source not in ("path", "hub"):
            raise ValueError(f"files\0{list(self.files)}\0null unless source is path or hub")
        for name in self.files or ():
            parts = PurePosixPath(name).parts
            if not parts or name.startswith("/") or ".." in parts or "\\" in name or "*" in name:
                raise ValueError(f"files\0{name}\0relative names such as transformer/config.json")
        return self


class Architecture(Section):
    """Size of the embedded tiny policy."""

    width: int = Field(96, ge=8, le=1024, multiple_of=4, description="D of the backbone")
    depth: int = Field(3, ge=1, le=32, description="backbone blocks")
    heads: int = Field(4, ge=1, le=32, description="attention heads; divides width")
    head_width: int = Field(96, ge=8, le=1024, description="width of the diffusion head")
    head_depth: int = Field(2, ge=1, le=16, description="AdaLN blocks of the head")
    channels: int = Field(16, ge=1, le=192, description="C: PCA dimensions of an 8x8x3 patch")

    @model_validator(mode="after")
    def heads_divide_width(self) -> Architecture:
        """Refuse a width that the heads do not divide."""
        if self.width % self.heads:
            raise ValueError(f"heads\0{self.heads}\0a divisor of width {self.width}")
        return self


class Pretrain(Section):
    """Pretraining of the tiny policy (deterministic; used by checkpoint.source pretrain)."""

    images: int = Field(24000, ge=64, le=1_000_000, description="rendered training scenes")
    steps: int = Field(2400, ge=1, le=1_000_000, description="optimizer steps")
    batch_size: int = Field(64, ge=1, le=4096, description="images per step")
    learning_rate: float = Field(2.0e-3, gt=0.0, le=1.0, description="peak rate, cosine to a tenth")
    ema: float = Field(0.995, ge=0.0, lt=1.0, description="decay of the averaged weights that are kept")
    null_prompt: float = Field(0.1, ge=0.0, lt=1.0, description="share of prompts dropped for guidance")
    seed: int = Field(0, ge=0, le=2**31 - 1, description="seed of scenes, weights and batches")
    architecture: Architecture = Architecture()


class Prompts(Section):
    """Where the prompts of training, validation and test come from."""

    source: Literal["scenes", "path"] = Field("scenes", description="the embedded benchmark, or a folder")
    path: str | None = Field(
        None,
        min_length=1,
        description="with source path: a folder with train, validation and test, each .txt (a prompt per line) "
        "or .jsonl",
    )
    sha256: Sha256 | None = Field(
        None, description="expected hash of the folder: of the list of its files' hashes"
    )

    @model_validator(mode="after")
    def path_matches_source(self) -> Prompts:
        """A path belongs to source `path` and to nothing else."""
        if (self.path is None) == (self.source == "path"):
            allowed = "a folder with source path" if self.path is None else "null unless source is path"
            raise ValueError(f"path\0{self.path}\0{allowed}")
        if self.sha256 is not None and self.source != "path":
            raise ValueError(f"sha256\0{self.sha256}\0null unless source is path")
        return self


class Benchmark(Section):
    """A published benchmark, or own prompts, that every evaluated policy is tested on."""

    prompts: Literal[
        "hpsv2", "drawbench", "partiprompts", "geneval", "image_reward", "ocr", "t2i_compbench", "file"
    ] = Field(description="whose prompts; file = own ones")
    path: str | None = Field(
        None,
        min_length=1,
        description="folder with the benchmark's own files; of prompts file: a .txt (a prompt per line) or .jsonl",
    )
    id: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$",
        max_length=96,
        description="instead of a path: repository on the hub, owner/name",
    )
    revision: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][\w./-]*$",
        max_length=100,
        description="with id: commit (best: it never moves), tag or branch",
    )
    repository: Literal["dataset", "model"] = Field("dataset", description="with id: kind of repository")
    sha256: Sha256 | None = Field(None, description="expected hash of the prompts as they are read")
    categories: list[str] | None = Field(
        None, min_length=1, description="the only categories (styles, tags) to use; null = all"
    )
    limit: int | None = Field(None, ge=1, description="first n prompts of each category; null = all")
    images_per_prompt: int | None = Field(
        None, ge=1, le=1000, description="images of a prompt; null = as many as the benchmark has"
    )
    sampler: Literal["ode", "sde"] = Field("ode", description="how images are drawn")
    guidance: float | None = Field(None, ge=1.0, le=50.0, description="CFG scale; null = evaluation.guidance")
    precision: Literal["float32", "bf16"] = Field("float32", description="of matrix products when sampling")
    scores: list[str] = Field([], description="registered rewards that score its images")
    keep_images: bool = Field(False, description="keep the images after they are scored")

    @model_validator(mode="after")
    def source_is_one(self) -> Benchmark:
        """There is a path or a repository with its revision; own prompts are a file."""
        if (self.path is None) == (self.id is None):
            raise ValueError(f"path\0{self.path}\0a folder or file, or else id with revision")
        if (self.revision is None) != (self.id is None):
            allowed = "null without id" if self.id is None else "a commit, tag or branch with id"
            raise ValueError(f"revision\0{self.revision}\0{allowed}")
        if self.prompts == "file" and self.path is None:
            raise ValueError(f"id\0{self.id}\0null with prompts file (give its path)")
        if len(set(self.scores)) != len(self.scores) or not (self.scores or self.keep_images):
            raise ValueError(
                f"scores\0{self.scores}\0names of rewards, each once; none only with keep_images"
            )
        return self
