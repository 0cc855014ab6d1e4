from __future__ import annotations

import hashlib
import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from margrpo import checkpoints
from margrpo.config import Architecture
from margrpo.errors import MargrpoError
from margrpo.policies.base import Policy
from margrpo.policies.tiny import TinyPolicy

SMALL = Architecture(width=16, depth=1, heads=2, head_width=16, head_depth=1, channels=4)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "policy.safetensors"
    checkpoints.save_policy(TinyPolicy(SMALL, seed=3), path, {"origin": "test"})
    return path


def rewrite(path: Path, change) -> None:
    """Apply `change(tensors, header)` to a checkpoint with the public safetensors functions."""
    tensors = load_file(path)
    length = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(json.loads(path.read_bytes()[8 : 8 + length])["__metadata__"]["margrpo"])
    tensors, header = change(tensors, header) or (tensors, header)
    save_file(tensors, path, {"margrpo": json.dumps(header)})


def message(path: Path) -> str:
    with pytest.raises(MargrpoError) as caught:
        checkpoints.load_policy(path)
    text = str(caught.value)
    assert "\n" not in text
    assert str(path) in text
    return text


def test_round_trip_is_exact(saved):
    policy = TinyPolicy(SMALL, seed=3)
    loaded = checkpoints.load_policy(saved)
    assert isinstance(loaded, TinyPolicy)
    assert loaded.architecture == SMALL
    assert loaded.state_dict().keys() == policy.state_dict().keys()
    for name, value in policy.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name
    header = checkpoints.read_header(saved)
    assert header["kind"] == "tiny"
    assert header["provenance"] == {"origin": "test"}


def test_equal_contents_give_equal_bytes_and_the_returned_hash(saved, tmp_path):
    other = tmp_path / "other.safetensors"
    digest = checkpoints.save_policy(checkpoints.load_policy(saved), other, {"origin": "test"})
    assert other.read_bytes() == saved.read_bytes()
    assert digest == checkpoints.sha256(other) == hashlib.sha256(saved.read_bytes()).hexdigest()
    changed = checkpoints.save_policy(checkpoints.load_policy(saved), other, {"origin": "else"})
    assert changed != digest


def test_loading_does_not_touch_the_global_generator(saved):
    before = torch.get_rng_state()
    checkpoints.load_policy(saved)
    assert torch.equal(before, torch.get_rng_state())


def test_damaged_and_foreign_files_are_refused_in_one_line(saved, tmp_path):
    whole = saved.read_bytes()
    assert "no such file" in message(tmp_path / "absent.safetensors")
    for size in (0, 5, 200, len(whole) // 2, len(whole) - 1):
        saved.write_bytes(whole[:size])
        assert "not a readable safetensors file" in message(saved)
    saved.write_bytes(b"\xff" * 1000)
    assert "not a readable safetensors file" in message(saved)
    assert message(tmp_path)  # a folder
    save_file({"weight": torch.zeros(2)}, saved, {"format": "pt"})
    assert "not written by margrpo" in message(saved)
    save_file({"weight": torch.zeros(2)}, saved)
    assert "not written by margrpo" in message(saved)


def test_pickles_are_not_executed(tmp_path):
    marker = tmp_path / "executed"

    class Malicious:
        def __reduce__(self):
            return os.system, (f"touch {marker}",)

    path = tmp_path / "policy.safetensors"
    path.write_bytes(pickle.dumps(Malicious()))
    message(path)
    torch.save({"model": Malicious()}, path)
    message(path)
    assert not marker.exists()


def test_tensors_that_do_not_fit_are_named(saved):
    whole = saved.read_bytes()

    def drop(tensors, header):
        del tensors["transformer.mask_token"]

    def add(tensors, header):
        tensors["extra"] = torch.zeros(1)

    def reshape(tensors, header):
        tensors["transformer.mask_token"] = torch.zeros(17)

    def retype(tensors, header):
        tensors["transformer.mask_token"] = torch.zeros(16, dtype=torch.float16)

    def poison(tensors, header):
        tensors["transformer.mask_token"] = torch.full((16,), float("nan"))

    cases = [
        (drop, "lacks transformer.mask_token (1 in all)"),
        (add, "has unknown extra (1 in all)"),
        (reshape, "transformer.mask_token is torch.float32 [17]; allowed: torch.float32 [16]"),
        (retype, "torch.float16 [16]; allowed: torch.float32 [16]"),
        (poison, "transformer.mask_token holds NaN"),
    ]
    for change, expected in cases:
        saved.write_bytes(whole)
        rewrite(saved, change)
        assert expected in message(saved)


def test_headers_that_do_not_fit_are_named(saved):
    whole = saved.read_bytes()

    def edit(**values):
        def change(tensors, header):
            header["meta"].update(values)

        return change

    def newer(tensors, header):
        header["format"] = 2

    wrong = SMALL.model_dump() | {"heads": 3}
    cases = [
        (edit(kind="huge"), "policy kind 'huge'; allowed: tiny"),
        (
            edit(description={"architecture": SMALL.model_dump(), "vocabulary": ["<pad>"]}),
            "another vocabulary",
        ),
        (edit(description=TinyPolicy(SMALL).describe() | {"architecture": wrong}), "not usable"),
        (edit(description=None), "not usable"),
        (newer, "format 2; allowed: 1"),
    ]
    for change, expected in cases:
        saved.write_bytes(whole)
        rewrite(saved, change)
        assert expected in message(saved)


def test_other_policies_are_not_saved(tmp_path):
    with pytest.raises(MargrpoError, match="no checkpoint format; allowed: tiny"):
        checkpoints.save_policy(Policy(), tmp_path / "x", {})
    assert not list(tmp_path.iterdir())


def test_state_round_trip_with_views_ties_and_types(tmp_path):
    path = tmp_path / "state.safetensors"
    whole = torch.arange(6.0)
    tensors = {
        "whole": whole,
        "view": whole[2:4],
        "tied": whole,
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 2),
        "rng": torch.Generator().manual_seed(1).get_state(),
        "transposed": torch.arange(6).view(2, 3).T,
    }
    meta = {"update": 7, "best": None, "loss": 0.1}
    digest = checkpoints.save_state(path, tensors, meta)
    loaded, found = checkpoints.load_state(path)
    assert found == meta
    assert loaded.keys() == tensors.keys()
    for name, value in tensors.items():
        assert loaded[name].dtype == value.dtype
        assert torch.equal(loaded[name], value), name
    reordered = dict(reversed(tensors.items()))
    assert checkpoints.save_state(path, reordered, dict(reversed(meta.items()))) == digest
    with pytest.raises(MargrpoError, match="holds a state; allowed here: a policy"):
        checkpoints.load_policy(path)


def test_state_and_policy_are_told_apart(saved):
    with pytest.raises(MargrpoError, match="holds a policy; allowed here: a state"):
        checkpoints.load_state(saved)


def test_write_atomic_replaces_and_keeps_the_old_file_on_failure(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "file"
    checkpoints.write_atomic(path, b"old")
    checkpoints.write_atomic(path, b"new")
    assert path.read_bytes() == b"new"

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints.os, "replace", fail)
    with pytest.raises(MargrpoError, match="cannot be written \\(No space left on device\\)"):
        checkpoints.write_atomic(path, b"newest")
    assert path.read_bytes() == b"new"
    assert [file.name for file in path.parent.iterdir()] == ["file"]  # no temporary file stays


def test_unwritable_folder_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MargrpoError) as caught:
        checkpoints.write_atomic(tmp_path / "file" / "below", b"")
    assert "\n" not in str(caught.value)


def test_file_mode_follows_the_umask(tmp_path):
    before = os.umask(0o022)
    try:
        checkpoints.write_atomic(tmp_path / "file", b"")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644


def test_shipped_checkpoint_loads_and_matches_its_description():
    described = json.loads(checkpoints.SHIPPED.with_suffix(".json").read_text())
    assert checkpoints.sha256(checkpoints.SHIPPED) == described["sha256"]
    policy = checkpoints.load_policy(checkpoints.SHIPPED)
    assert (policy.tokens, policy.channels) == (16, 16)
    assert checkpoints.SHIPPED.stat().st_size < 2.1e6
