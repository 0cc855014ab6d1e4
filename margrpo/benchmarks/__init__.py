"""Benchmarks: prompt sets with the rules that score images of their prompts."""
