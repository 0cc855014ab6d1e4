"""A saved NOVA policy names no place: with the released folder's parts anywhere it is the same policy."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import pytest
import torch

from margrpo.base import released_folder
from margrpo.checkpoints import load_policy, read_header, save_policy
from margrpo.errors import MargrpoError
from margrpo.models import Models
from margrpo.policies.nova import NovaPolicy, read_nova
from margrpo.rollout import generate
from tests.policies.nova_support import folder
from tests.support import make_config


def saved(tmp_path: Path) -> Path:
    file = tmp_path / "here" / "policy.safetensors"
    save_policy(read_nova(folder()), file, {})
    return file


def test_shared_checkpoints_lie_in_the_folder_that_pytest_removes(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    assert folder().is_relative_to(tmp_path_factory.getbasetemp())
    ours = set(Path(tempfile.gettempdir()).glob("margrpo-nova-*"))
    read_nova(folder()).encode(["a"])
    assert set(Path(tempfile.gettempdir()).glob("margrpo-nova-*")) == ours


def test_the_file_holds_no_path_and_does_not_depend_on_the_place(tmp_path: Path) -> None:
    file = saved(tmp_path)
    text = json.dumps(read_header(file))
    assert str(tmp_path) not in text
    assert str(folder()) not in text
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(folder(), elsewhere)
    save_policy(read_nova(elsewhere), tmp_path / "other.safetensors", {})
    assert (tmp_path / "other.safetensors").read_bytes() == file.read_bytes()


def test_everything_moved_to_another_folder_is_the_same_policy(tmp_path: Path) -> None:
    file, original = saved(tmp_path), read_nova(folder())
    moved = tmp_path / "moved"
    shutil.copytree(folder(), moved / "released")
    shutil.move(file, moved / "run.safetensors")
    given = make_config(checkpoint={"source": "path", "path": str(moved / "released")})
    loaded = Models(given, "frozen_head", 0, moved / "run.safetensors", torch.device("cpu")).policy
    assert isinstance(loaded, NovaPolicy)
    assert loaded.state_dict().keys() == original.state_dict().keys()
    assert all(torch.equal(value, original.state_dict()[name]) for name, value in loaded.state_dict().items())
    original.configure(given.sampler)
    pair = [generate(policy.eval(), ["a red cube"], [3], 4).tokens for policy in (original, loaded)]
    assert torch.equal(*pair)
    assert torch.equal(original.decode(pair[0]), loaded.decode(pair[1]))
    # without params: the parts beside the file
    for name in ("text_encoder", "tokenizer", "vae"):
        shutil.copytree(folder() / name, moved / name)
    alone = load_policy(moved / "run.safetensors")
    alone.configure(given.sampler)
    assert torch.equal(generate(alone.eval(), ["a red cube"], [3], 4).tokens, pair[0])


def test_missing_and_foreign_parts_are_one_line(tmp_path: Path) -> None:
    file = saved(tmp_path)
    with pytest.raises(MargrpoError, match=r"no text_encoder; .*checkpoint\.path") as error:
        load_policy(file).encode(["a"])
    assert "\n" not in str(error.value)
    foreign = tmp_path / "foreign"
    shutil.copytree(folder(), foreign)
    config = json.loads((foreign / "vae" / "config.json").read_text())
    (foreign / "vae" / "config.json").write_text(json.dumps({**config, "scaling_factor": 0.1}))
    policy = load_policy(file)
    policy.locate(lambda: released_folder(make_config(checkpoint={"source": "path", "path": str(foreign)})))
    with pytest.raises(MargrpoError, match=r"vae/config\.json: is sha256 .*; allowed: sha256"):
        policy.encode(["a"])
