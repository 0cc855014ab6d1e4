"""Hybrid policies behind one protocol (`base.Policy`); the algorithm never asks which one it has."""
