"""The weighted mixture that training maximises, and what is logged of its parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from margrpo.config import RewardOptions
from margrpo.rewards.base import Entry, Specs, check, entry
from margrpo.rewards.runner import Runner

_EMBEDDED = "scenes"
_DEFAULT = RewardOptions()
_RUNNERS: dict[tuple[Entry, RewardOptions], Runner] = {}


@dataclass(frozen=True)
class RewardBatch:
    """`total` [B] is the weighted sum of the parts; `parts` (name -> [B]) are the raw scores.

    NaN in a part says that the reward has no score for the image; the total is NaN there too.
    """

    total: Tensor
    parts: dict[str, Tensor]


@torch.no_grad()
def score(
    weights: Mapping[str, float],
    images: Tensor,
    prompts: Sequence[str],
    specs: Specs,
    options: Mapping[str, RewardOptions] | None = None,
    training: bool = False,
) -> RewardBatch:
    """Return every reward of the mixture and their weighted sum, float32 [B] on the CPU.

    Args:
        images: [B, 3, H, W] in [0, 1]. training: apply `normalize`, which depends on the other images of
            the batch; elsewhere the sum takes (score - shift) / scale alone, so that values compare.

    A reward of weight 0 is scored for the log and cannot spoil the sum.
    """
    check(weights, options)
    parts = {}
    terms = []
    for name, weight in weights.items():
        setting = (options or {}).get(name, _DEFAULT)
        parts[name] = _runner(name, setting)(images, prompts, specs)
        terms.append(weight * scaled(parts[name], setting, training) if weight else torch.zeros(len(images)))
    return RewardBatch(torch.stack(terms).sum(0), parts)


def prepare(weights: Iterable[str], options: Mapping[str, RewardOptions] | None = None) -> None:
    """Build the rewards, or reach their servers, before anything expensive starts.

    Raises MargrpoError for one that cannot be set up, RewardError for a server that stays away.
    """
    for name in weights:
        _runner(name, (options or {}).get(name, _DEFAULT)).prepare()


def scaled(scores: Tensor, options: RewardOptions, training: bool) -> Tensor:
    """Return scores [B] as they enter the mixture; NaN stays NaN and doesn't count in batch statistics."""
    if options.shift != 0.0 or options.scale != 1.0:
        scores = (scores - options.shift) / options.scale
    if not training or options.normalize == "none":
        return scores
    known = scores[~scores.isnan()]
    if not len(known) or float(known.max()) == float(known.min()):
        return torch.where(scores.isnan(), scores, 0.0)
    if options.normalize == "minmax":
        return (scores - known.min()) / (known.max() - known.min())
    return (scores - known.mean()) / known.std(correction=0)


def columns(weights: Sequence[str]) -> list[str]:
    """Return the names of the logged quantities of `metrics`: none beyond the means for `scenes` alone."""
    result = [f"rewards/{name}/mean" for name in weights]
    if list(weights) != [_EMBEDDED]:
        kinds = ("std", "frac_zero_std", "frac_below_step", "failed")
        result += [f"rewards/{name}/{kind}" for name in weights for kind in kinds]
    return result


def metrics(batch: RewardBatch, images_per_group: int) -> dict[str, float]:
    """Return what is logged of each part; images without a score are left out.

    mean: over the images. std: mean over the groups of their unbiased deviation. frac_zero_std: share of
    groups without spread. frac_below_step: share of those with less spread than the reward resolves.
    failed: number of images without a score.
    """
    result: dict[str, float] = {}
    for name, scores in batch.parts.items():
        known = ~scores.isnan()
        spread = spreads(scores, images_per_group)
        step = entry(name).info.step
        result[f"rewards/{name}/mean"] = float(scores.mean() if known.all() else scores.nanmean())
        result[f"rewards/{name}/std"] = float(spread.mean())
        result[f"rewards/{name}/frac_zero_std"] = float((spread < 1e-6).float().mean())
        result[f"rewards/{name}/frac_below_step"] = float((spread < step).float().mean())
        result[f"rewards/{name}/failed"] = float((~known).sum())
    wanted = columns(list(batch.parts))
    return {key: value for key, value in result.items() if key in wanted}


def spreads(scores: Tensor, images_per_group: int) -> Tensor:
    """Return the unbiased deviation of each group's known scores; 0 where fewer than two are known."""
    groups = scores.view(-1, images_per_group)
    if not groups.isnan().any():
        return groups.std(dim=1)
    known = [group[~group.isnan()] for group in groups]
    return torch.stack([group.std() if len(group) > 1 else group.new_zeros(()) for group in known])


def _runner(name: str, options: RewardOptions) -> Runner:
    key = (entry(name), options)
    if key not in _RUNNERS:
        _RUNNERS[key] = Runner(*key)
    return _RUNNERS[key]
