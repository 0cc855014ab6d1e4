from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from margrpo.errors import MargrpoError
from margrpo.policies.kl_vae import KlVae, VaeArchitecture, diffusers_name
from margrpo.policies.mar import read_mar
from margrpo.policies.released import Cause, load_strictly, open_weights
from tests.policies.real import copy_folder, read


class Hostile:
    """Unpickling it would run a shell command."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.marker}",)


def one_line(path: Path, match: str) -> str:
    with pytest.raises(MargrpoError, match=match) as error:
        open_weights(path)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_code_in_a_pickle_is_not_run_and_not_recommended(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    torch.save({"model": {"w": torch.zeros(1), "x": Hostile(marker)}}, tmp_path / "checkpoint-last.pth")
    (tmp_path / "bare.pth").write_bytes(pickle.dumps(Hostile(marker)))
    for name in ("checkpoint-last.pth", "bare.pth"):
        assert "weights_only" not in one_line(tmp_path / name, "nothing in it was executed")
    assert not marker.exists()


def test_damaged_files_are_one_line(tmp_path: Path) -> None:
    folder = copy_folder("mar", tmp_path)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    one_line(folder / "model.safetensors", "not a readable weight file")
    torch.save(load_safe(whole, tmp_path), tmp_path / "whole.pth")
    content = (tmp_path / "whole.pth").read_bytes()
    (tmp_path / "cut.pth").write_bytes(content[: len(content) // 2])
    one_line(tmp_path / "cut.pth", "cut.pth")
    (tmp_path / "empty.pth").write_bytes(b"")
    one_line(tmp_path / "empty.pth", "empty.pth")
    one_line(tmp_path / "absent.pth", "no such file")
    torch.save([torch.zeros(1)], tmp_path / "list.pth")
    one_line(tmp_path / "list.pth", "not a state dict")


def load_safe(content: bytes, folder: Path) -> dict[str, torch.Tensor]:
    (folder / "copy.safetensors").write_bytes(content)
    return load_file(folder / "copy.safetensors")


def test_shards_load_as_one_file_and_must_all_be_there(tmp_path: Path) -> None:
    folder = copy_folder("mar", tmp_path)
    state = load_file(folder / "model.safetensors")
    expected = read_mar(folder).state_dict()
    (folder / "model.safetensors").unlink()
    names = sorted(state)
    parts = {"a.safetensors": names[:40], "b.safetensors": names[40:]}
    for file, members in parts.items():
        save_file({name: state[name] for name in members}, folder / file)
    index = {"weight_map": {name: file for file, members in parts.items() for name in members}}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    loaded = read_mar(folder).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())
    (folder / "b.safetensors").unlink()
    one_line(path, r"b\.safetensors: no such file")
    path.write_text(json.dumps({"weight_map": {"w": "../model.safetensors"}}))
    one_line(path, "files beside the index")
    path.write_text(json.dumps({"weight_map": {"nothing": "a.safetensors"}}))
    one_line(path, r"nothing is not in a\.safetensors")
    path.write_text("{")
    one_line(path, "not a readable JSON file")


def test_names_and_shapes_are_checked_before_a_tensor_is_read(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(3, 2), "extra": torch.zeros(1)}, tmp_path / "w.safetensors")
    with torch.device("meta"):
        module = nn.Linear(2, 4)
    with pytest.raises(MargrpoError) as error:
        load_strictly(module, open_weights(tmp_path / "w.safetensors"), [Cause("weight", "other", "the_key")])
    message = str(error.value)
    assert "lacks bias" in message
    assert "has unknown extra" in message
    assert "weight is [3, 2] instead of [4, 2]" in message
    assert "check the_key in config.json" in message
    assert module.weight.is_meta


def test_numbers_that_are_not_weights_are_refused(tmp_path: Path) -> None:
    with torch.device("meta"):
        module = nn.Linear(1, 1, bias=False)
    save_file({"weight": torch.full((1, 1), torch.nan)}, tmp_path / "nan.safetensors")
    with pytest.raises(MargrpoError, match="NaN or infinity"):
        load_strictly(module, open_weights(tmp_path / "nan.safetensors"))
    save_file({"weight": torch.ones(1, 1, dtype=torch.int64)}, tmp_path / "int.safetensors")
    with pytest.raises(MargrpoError, match="floating point"):
        load_strictly(module, open_weights(tmp_path / "int.safetensors"))


def test_a_folder_needs_exactly_one_weight_file(tmp_path: Path) -> None:
    with pytest.raises(MargrpoError, match="weight files: none"):
        read_mar(tmp_path)
    for name in ("a.pth", "b.pth"):
        torch.save({}, tmp_path / name)
    with pytest.raises(MargrpoError, match=r"weight files: a\.pth, b\.pth"):
        read_mar(tmp_path)


def released_vae_names(mult: list[int], blocks: int, attention: set[int]) -> set[str]:
    """Parameter names of the LDM autoencoder, without .weight / .bias, from its description in the paper's code."""
    names = {"quant_conv", "post_quant_conv"}
    for part in ("encoder", "decoder"):
        names |= {f"{part}.conv_in", f"{part}.norm_out", f"{part}.conv_out"}
        names |= {f"{part}.mid.attn_1.{leaf}" for leaf in ("norm", "q", "k", "v", "proj_out")}
        for block in ("mid.block_1", "mid.block_2"):
            names |= {f"{part}.{block}.{leaf}" for leaf in ("norm1", "conv1", "norm2", "conv2")}
    levels = len(mult)
    width_in = 1
    for i, width in enumerate(mult):
        for j in range(blocks):
            at = f"encoder.down.{i}.block.{j}"
            names |= {f"{at}.{leaf}" for leaf in ("norm1", "conv1", "norm2", "conv2")}
            names |= {f"{at}.nin_shortcut"} if j == 0 and width != width_in else set()
            if i in attention:
                names |= {f"encoder.down.{i}.attn.{j}.{leaf}" for leaf in ("norm", "q", "k", "v", "proj_out")}
        width_in = width
        names |= {f"encoder.down.{i}.downsample.conv"} if i < levels - 1 else set()
    for i in reversed(range(levels)):
        for j in range(blocks + 1):
            at = f"decoder.up.{i}.block.{j}"
            names |= {f"{at}.{leaf}" for leaf in ("norm1", "conv1", "norm2", "conv2")}
            names |= {f"{at}.nin_shortcut"} if j == 0 and mult[i] != width_in else set()
        width_in = mult[i]
        names |= {f"decoder.up.{i}.upsample.conv"} if i > 0 else set()
    return {f"{name}.{kind}" for name in names for kind in ("weight", "bias")}


@pytest.mark.parametrize(
    ("architecture", "attention"),
    [
        (VaeArchitecture(), {4}),
        (
            VaeArchitecture(
                ch=32, ch_mult=[2, 1], num_res_blocks=1, attn_resolutions=[8], resolution=16, z_channels=8
            ),
            {1},
        ),
    ],
)
def test_autoencoder_names_map_one_to_one(architecture: VaeArchitecture, attention: set[int]) -> None:
    released = released_vae_names(architecture.ch_mult, architecture.num_res_blocks, attention)
    model = KlVae(architecture, 1.0, encoder=True).model
    renamed = {diffusers_name(name, len(architecture.ch_mult)) for name in released}
    assert len(renamed) == len(released)
    assert renamed == set(model.state_dict())
    assert model.encoder.conv_in.weight.shape[0] == architecture.ch  # not the width of the first level


def test_decoder_only_weights_are_enough_for_a_policy() -> None:
    vae = KlVae(
        VaeArchitecture(ch=32, ch_mult=[1], num_res_blocks=1, attn_resolutions=[]), 1.0, encoder=False
    )
    assert not any(name.startswith(("model.encoder", "model.quant_conv")) for name in vae.state_dict())


@pytest.mark.parametrize(
    ("family", "section", "value"),
    [
        ("mar", "mar", 3),
        ("mar", "mar", []),
        ("mar", "mar", {"type": ["mar_base"]}),
        ("mar", "mar", {"type": None}),
        ("harmon", "mar", None),
        ("harmon", "llm", []),
        ("harmon", "mar_size", 3),
        ("harmon", "vae", []),
        ("harmon", "vae", {"ch_mult": ["a"]}),
        ("harmon", "vae", {"ch_mult": []}),
        ("harmon", "vae_scale", "x"),
        ("harmon", "vae_scale", 0),
        ("harmon", "vae_scale", True),
        ("harmon", "image_shape", None),
        ("harmon", "image_shape", [6.0, 6]),
        ("harmon", "llm", {"vocab_size": "100"}),
        ("harmon", "llm", {"rope_parameters": {"rope_theta": "x"}, "vocab_size": 100}),
    ],
)
def test_malformed_configs_are_one_line(tmp_path: Path, family: str, section: str, value: object) -> None:
    folder = copy_folder(family, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config[section] = value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(MargrpoError) as error:
        read(family, folder)
    assert "\n" not in str(error.value)
    assert section in str(error.value) or "llm" in str(error.value)
