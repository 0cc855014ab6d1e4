"""MAR base, large and huge (LTH14/mar): class-conditional generation in the latents of KL-16.

Prompts are class ids ("207") or, where the checkpoint's folder has a class_names.json, class names.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor, nn

from margrpo.errors import ConfigError, MargrpoError
from margrpo.params import explain
from margrpo.policies.base import Condition
from margrpo.policies.kl_vae import KlVae, VaeArchitecture
from margrpo.policies.masked import (
    CAUSES,
    TRAINING_KEYS,
    MaskedArchitecture,
    MaskedPolicy,
    known_index,
    own_name,
)
from margrpo.policies.released import Weights, load_strictly, open_weights, read_json

SIZES: dict[str, dict[str, Any]] = {
    name: {
        "encoder_embed_dim": width,
        "encoder_depth": depth,
        "encoder_num_heads": heads,
        "decoder_embed_dim": width,
        "decoder_depth": depth,
        "decoder_num_heads": heads,
        "diffloss_d": head_depth,
        "diffloss_w": head_width,
    }
    for name, width, depth, heads, head_depth, head_width in (
        ("mar_base", 768, 12, 12, 6, 1024),
        ("mar_large", 1024, 16, 16, 8, 1280),
        ("mar_huge", 1280, 20, 16, 12, 1536),
    )
}
"""The public 256x256 checkpoints; everything else is `MaskedArchitecture`'s default."""
VAE_SCALE = 0.2325
VAE_FILES = ("kl16.ckpt", "kl16.safetensors", "vae.safetensors")
_WEIGHT_FILES = ("model.safetensors.index.json", "model.safetensors", "checkpoint-last.pth")
_NULL = -1
M = TypeVar("M", bound=BaseModel)


class MarPolicy(MaskedPolicy):
    """Class-conditional MAR behind the policy protocol.

    Args:
        architecture: the sizes. vae: decoder of the latents, None if the checkpoint has none.
        class_names: name of each class id ("tench, Tinca tinca"); empty: prompts are ids.
    """

    kind = "mar"

    def __init__(
        self, architecture: MaskedArchitecture, vae: KlVae | None = None, class_names: Sequence[str] = ()
    ) -> None:
        super().__init__(architecture, (architecture.side, architecture.side), vae)
        self.class_names = list(class_names)

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> MarPolicy:
        """Return a policy of the sizes that `describe` gave, on the meta device."""
        architecture = parse(MaskedArchitecture, description["architecture"], "architecture")
        return cls(architecture, described_vae(description), description["class_names"])

    def describe(self) -> dict[str, Any]:
        """Return what a checkpoint stores beside the weights (JSON types)."""
        architecture = self.architecture.model_dump()
        return {"architecture": architecture, "class_names": self.class_names} | describe_vae(self.vae)

    def encode(self, prompts: Sequence[str | None]) -> Condition:
        """Return the condition: labels int64 [B], -1 for the null class; ConfigError for an unknown class."""
        labels = [_NULL if prompt is None else self.label(prompt) for prompt in prompts]
        return Condition({"labels": torch.tensor(labels, device=self.mar.fake_latent.device)})

    def label(self, prompt: str) -> int:
        """Return the class id of a prompt: an id, a name, or one of a name's comma-separated synonyms."""
        text, classes = prompt.strip(), self.architecture.class_num
        if text.isascii() and text.isdigit():
            if int(text) < classes:
                return int(text)
            raise ConfigError.of("prompt", prompt, f"allowed: class ids 0..{classes - 1}")
        if not self.class_names:
            allowed = f"allowed: class ids 0..{classes - 1}; names need a class_names.json in the checkpoint's folder"
            raise ConfigError.of("prompt", prompt, allowed)
        wanted = text.lower()
        full = [i for i, name in enumerate(self.class_names) if name.lower() == wanted]
        parts = [[part.strip().lower() for part in name.split(",")] for name in self.class_names]
        found = full or [i for i, names in enumerate(parts) if wanted in names]
        if len(found) == 1:
            return found[0]
        if found:
            listed = ", ".join(f"{i} ({self.class_names[i]})" for i in found)
            raise ConfigError.of(
                "prompt", prompt, f"several classes have this name; allowed: one of {listed}"
            )
        known = {part: i for i, names in enumerate(parts) for part in names}
        close = difflib.get_close_matches(wanted, known, n=1)
        hint = f"did you mean {close[0]!r} ({known[close[0]]})? " if close else ""
        raise ConfigError.of(
            "prompt", prompt, f"{hint}allowed: names of class_names.json or ids 0..{classes - 1}"
        )

    def backbone(self, tokens: Tensor, known: Tensor, condition: Condition) -> Tensor:
        """Return z [B, L, D]; see `Policy.backbone`."""
        index = known_index(known)
        return self.mar.decode(self.mar.encode(tokens, index, self.buffer(condition)), index)

    def buffer(self, condition: Condition) -> Tensor:
        """Return the class vectors [B, E] that fill the encoder's buffer rows."""
        labels = condition["labels"]
        classes = self.mar.class_emb(labels.clamp_min(0))
        return torch.where((labels == _NULL)[:, None], self.mar.fake_latent, classes)

    def backbone_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of encoder, decoder, class vectors and position tables."""
        return (value for name, value in self.mar.named_parameters() if not name.startswith("denoiser."))


def read_mar(path: Path, size: str | None = None) -> MarPolicy:
    """Return the policy of a released checkpoint: a folder, or its weight file with the others beside it.

    Without a config.json the size is recognised by the width of the weights.

    Args:
        size: mar_base | mar_large | mar_huge, instead of recognising it.

    Raises:
        MargrpoError: files are missing, damaged, hostile or do not fit the config; one line.
    """
    folder, weights = path if path.is_dir() else path.parent, open_weights(weight_file(path))
    config_file = folder / "config.json"
    config = read_json(config_file) if config_file.is_file() else {}
    architecture = _architecture(config, weights, size, config_file)
    names = _class_names(folder / "class_names.json", architecture.class_num)
    policy = MarPolicy(architecture, read_vae(folder, config), names)
    load_strictly(policy.mar, weights.rename(own_name), CAUSES)
    return policy


def weight_file(path: Path) -> Path:
    """Return the weight file of a folder (or the path itself); MargrpoError unless there is exactly one."""
    if not path.is_dir():
        return path
    found = [path / name for name in _WEIGHT_FILES if (path / name).is_file()][:1]
    found = found or sorted(
        file for pattern in ("*.pth", "mar-*.safetensors") for file in path.glob(pattern) if file.is_file()
    )
    if len(found) != 1:
        given = ", ".join(file.name for file in found) or "none"
        allowed = f"exactly one of {', '.join(_WEIGHT_FILES)}, *.pth, mar-*.safetensors"
        raise MargrpoError(f"{path}: weight files: {given}; allowed: {allowed}")
    return found[0]


def read_vae(folder: Path, config: Mapping[str, Any], encoder: bool = False) -> KlVae | None:
    """Return the autoencoder beside the weights, None if there is none.

    Args:
        config: the checkpoint's config, whose `vae` and `vae_scale` replace KL-16 and 0.2325.
        encoder: load the encoder too.
    """
    file = next((folder / name for name in VAE_FILES if (folder / name).is_file()), None)
    return None if file is None else load_vae(open_weights(file), config, encoder)


def load_vae(weights: Weights, config: Mapping[str, Any], encoder: bool = False) -> KlVae:
    """Return the autoencoder of these weights; see `read_vae`."""
    vae = KlVae(parse(VaeArchitecture, config.get("vae", {}), "config.json vae"), _scale(config), encoder)
    vae.load(weights)
    return vae


def describe_vae(vae: KlVae | None) -> dict[str, Any]:
    """Return the description of a policy's autoencoder (JSON types)."""
    if vae is None:
        return {"vae": None, "vae_scale": VAE_SCALE}
    return {"vae": vae.architecture.model_dump(), "vae_scale": vae.scale}


def described_vae(description: Mapping[str, Any]) -> KlVae | None:
    """Return the autoencoder of a description, on the meta device."""
    if description["vae"] is None:
        return None
    return KlVae(parse(VaeArchitecture, description["vae"], "vae"), _scale(description), encoder=False)


def parse(model: type[M], values: object, where: str) -> M:
    """Return a validated section of a config file; ConfigError in one line."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}: {values!r:.80}; allowed: an object")
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{where}: {explain(error, model)}") from None


def mar_architecture(values: Any, where: str) -> MaskedArchitecture:
    """Return the sizes of a released MAR config, where `type` names the size and pretraining keys are ignored."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}: {values!r:.80}; allowed: an object")
    given = {key: value for key, value in values.items() if key not in TRAINING_KEYS}
    size = given.pop("type", None)
    if size is not None and size not in list(SIZES):
        raise ConfigError(f"{where}: type {size!r}; allowed: {', '.join(SIZES)}")
    return parse(MaskedArchitecture, (SIZES[size] if size else {}) | given, where)


def _architecture(
    config: Mapping[str, Any], weights: Weights, size: str | None, file: Path
) -> MaskedArchitecture:
    if size is None and config:
        return mar_architecture(config.get("mar", config), f"{file}: mar")
    if size is None:
        width = weights.shapes.get("fake_latent", [0, 0])[-1]
        sizes = {values["encoder_embed_dim"]: name for name, values in SIZES.items()}
        if width not in sizes:
            widths = ", ".join(f"{w} ({name})" for w, name in sizes.items())
            raise MargrpoError(f"{weights.source}: width {width} and no config.json; allowed: {widths}")
        size = sizes[width]
    return mar_architecture({"type": size}, "size")


def _scale(config: Mapping[str, Any]) -> float:
    scale = config.get("vae_scale", VAE_SCALE)
    if not isinstance(scale, float | int) or isinstance(scale, bool) or not 0 < scale < 1e3:
        raise ConfigError.of("config.json vae_scale", scale, "allowed: a factor > 0")
    return float(scale)


def _class_names(file: Path, classes: int) -> list[str]:
    """Return the names of all classes from a JSON object {"0": "tench, Tinca tinca", ..}, [] without a file."""
    if not file.is_file():
        return []
    table = read_json(file)
    names = [table.get(str(i)) for i in range(classes)]
    if len(table) != classes or not all(isinstance(name, str) for name in names):
        raise MargrpoError(f"{file}: {len(table)} names; allowed: one text for each id 0..{classes - 1}")
    return [str(name) for name in names]
