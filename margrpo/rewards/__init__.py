"""Rewards behind one protocol and registry (`base`); one file per reward; the weighted `mixture`."""

# imported because each registers itself; none loads its model or its packages before it is used
from margrpo.rewards import aesthetic as _aesthetic  # noqa: F401
from margrpo.rewards import blip_vqa as _blip_vqa  # noqa: F401
from margrpo.rewards import clipscore as _clipscore  # noqa: F401
from margrpo.rewards import depth as _depth  # noqa: F401
from margrpo.rewards import hps as _hps  # noqa: F401
from margrpo.rewards import image_reward as _image_reward  # noqa: F401
from margrpo.rewards import jpeg_size as _jpeg_size  # noqa: F401
from margrpo.rewards import mask2former as _mask2former  # noqa: F401
from margrpo.rewards import ocr as _ocr  # noqa: F401
from margrpo.rewards import owlv2 as _owlv2  # noqa: F401
from margrpo.rewards import pickscore as _pickscore  # noqa: F401
from margrpo.rewards import scenes as _scenes  # noqa: F401
from margrpo.rewards.base import Info, Reward, check, entry, missing, names, register
from margrpo.rewards.mixture import RewardBatch, columns, metrics, score, spreads

__all__ = [
    "Info",
    "Reward",
    "RewardBatch",
    "check",
    "columns",
    "entry",
    "metrics",
    "missing",
    "names",
    "register",
    "score",
    "spreads",
]
