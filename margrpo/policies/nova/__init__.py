"""NOVA (baaivision/NOVA, text to image): absolute and rotary positions, flow and DDPM checkpoints."""

from margrpo.policies.nova.policy import NovaPolicy, read_nova

__all__ = ["NovaPolicy", "read_nova"]
