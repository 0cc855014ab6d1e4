"""margrpo: reinforce hybrid (masked autoregressive + diffusion head) image generators with MAR-GRPO."""

__version__ = "0.1.0"
