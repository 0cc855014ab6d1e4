"""Calls into diffusers and transformers without their progress bars and reports."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Let only errors of diffusers and transformers through.

    Both announce things that are as they should be: a language model's output layer that is not used, or keys
    of another version in a config.
    """
    from diffusers.utils import logging as diffusers
    from transformers.utils import logging as transformers

    levels = diffusers.get_verbosity(), transformers.get_verbosity()
    bars = transformers.is_progress_bar_enabled()
    diffusers.set_verbosity(logging.ERROR)
    transformers.set_verbosity(logging.ERROR)
    transformers.disable_progress_bar()
    try:
        yield
    finally:
        diffusers.set_verbosity(levels[0])
        transformers.set_verbosity(levels[1])
        if bars:
            transformers.enable_progress_bar()
