"""NOVA's frozen latent decoder: diffusers' AutoencoderKL."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from margrpo.errors import MargrpoError
from margrpo.policies.nova.libraries import quiet
from margrpo.policies.nova.parts import Parts
from margrpo.policies.released import open_weights, read_json


class LatentDecoder:
    """Images of latents; the VAE is read from `vae/` of the checkpoint at the first image.

    Args:
        parts: finds `vae/`. channels: of the latents, for a check. stride: pixels per latent pixel.
    """

    def __init__(self, parts: Parts, channels: int, stride: int) -> None:
        self.parts, self.channels, self.stride = parts, channels, stride
        self._vae: Any = None

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Return images [B, 3, H, W] in [0, 1] (float32) of scaled latents [B, C, h, w].

        Raises:
            MargrpoError: the folder lacks the VAE, or it does not fit the transformer.
        """
        if self._vae is None:
            self._load()
        vae = self._vae.to(latents.device)
        scaled = latents.float() / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
        # image by image: at 1024 pixels the activations of one already take gigabytes
        images = torch.cat([vae.decode(image[None]).sample for image in scaled])
        return (images / 2 + 0.5).clamp(0, 1)

    def _load(self) -> None:
        from diffusers import AutoencoderKL  # seconds to import

        folder = self.parts.folder("vae")
        config = read_json(folder / "config.json")
        if config.get("_class_name") != "AutoencoderKL":
            given = config.get("_class_name")
            raise MargrpoError(f"{folder}/config.json: _class_name {given}; allowed: AutoencoderKL")
        open_weights(folder / "diffusion_pytorch_model.safetensors")
        try:
            with quiet():
                loaded: Any = AutoencoderKL.from_pretrained(
                    folder,
                    local_files_only=True,
                    use_safetensors=True,
                    output_loading_info=True,
                    torch_dtype=torch.float32,  # in half precision the decoder of SDXL overflows
                )
        except Exception as error:  # what the library raises for damaged files is not one type
            raise MargrpoError(
                f"{folder}: not loadable ({' '.join(str(error).split())[:200]}); fetch the folder again"
            ) from error
        vae, report = loaded
        for label in ("missing", "unexpected", "mismatched"):
            names = sorted(map(str, report.get(f"{label}_keys", [])))
            if names:
                raise MargrpoError(
                    f"{folder}: {len(names)} tensors {label} ({', '.join(names[:3])}); check its config.json"
                )
        stride = 2 ** (len(vae.config.block_out_channels) - 1)
        if (vae.config.latent_channels, stride) != (self.channels, self.stride):
            given = f"{vae.config.latent_channels} channels at stride {stride}"
            raise MargrpoError(
                f"{folder}/config.json: {given}; allowed: {self.channels} at {self.stride}, "
                "as transformer/config.json says"
            )
        self._vae = vae.eval().requires_grad_(False)
