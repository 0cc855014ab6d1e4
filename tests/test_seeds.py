from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from margrpo import seeds


def test_seed_is_the_upper_63_bits_of_sha256_of_the_json_list():
    digest = hashlib.sha256(b'["rollout", 3]').hexdigest()
    assert seeds.derive("rollout", 3) == int(digest[:16], 16) // 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1,), ("1",)),
        (("ab",), ("a", "b")),
        (("a", "bc"), ("ab", "c")),
        (("a",), ("a", "")),
        ((1, 2), (12,)),
        (('a", "b',), ("a", "b")),
        ((), ("",)),
    ],
)
def test_different_parts_give_different_seeds(one, other):
    assert seeds.derive(*one) != seeds.derive(*other)


def test_range_and_numpy_integers():
    values = [seeds.derive("x", index) for index in range(200)]
    assert len(set(values)) == 200
    assert all(0 <= value < 2**63 for value in values)
    assert max(values) > 2**62  # the upper half is used
    assert seeds.derive(np.int64(5)) == seeds.derive(5)


def test_parts_that_are_no_names_are_refused():
    with pytest.raises(TypeError):
        seeds.derive(0.5)  # type: ignore[arg-type]


def test_generator_draws_what_its_seed_draws_and_leaves_the_global_one_alone():
    before = torch.get_rng_state()
    drawn = torch.randn(4, generator=seeds.generator("noise", 7))
    expected = torch.randn(4, generator=torch.Generator().manual_seed(seeds.derive("noise", 7)))
    assert torch.equal(drawn, expected)
    assert torch.equal(before, torch.get_rng_state())
