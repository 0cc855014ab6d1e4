"""Ablation sweeps: a form, the cells it stands for, each a DVC experiment of its own, and what came out."""
