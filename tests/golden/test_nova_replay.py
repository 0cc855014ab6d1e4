from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from margrpo.errors import MargrpoError
from margrpo.golden.manifest import Golden
from margrpo.golden.nova import replay
from margrpo.golden.runner import verify
from margrpo.golden.vectors import passed

GOLDEN = Path(__file__).parent / "nova"


@pytest.mark.parametrize("name", ["abs", "rope"])
def test_reference_numbers_are_reproduced(name: str) -> None:
    checks = replay(GOLDEN / name)
    assert [check for check in checks if not passed(check)] == []
    outputs = {
        key
        for key, entry in json.loads((GOLDEN / name / "manifest.json").read_text())["tensors"].items()
        if entry["kind"] == "output"
    }
    compared = {check.name for check in checks if check.skipped is None}
    assert outputs <= compared
    # rows of noiseless steps are the only ones that are not compared
    assert all("t = 0" in check.name for check in checks if check.skipped)


def copy(name: str, folder: Path) -> Path:
    shutil.copytree(GOLDEN / name, folder)
    return folder


def edit(folder: Path, key: str, part: str = "golden.safetensors") -> None:
    """Change one element of a tensor by 1 %."""
    tensors = load_file(folder / part)
    flat = tensors[key].flatten().clone()
    flat[flat.abs().argmax()] *= 1.01
    tensors[key] = flat.view_as(tensors[key])
    save_file(tensors, folder / part)


@pytest.mark.parametrize(
    "key", ["head.out", "sde_g1.x", "train.z.1", "grpo.plain.3.kl", "loss.flow", "pos.time_T2"]
)
def test_a_changed_reference_is_noticed(key: str, tmp_path: Path) -> None:
    folder = copy("abs", tmp_path / "golden")
    edit(folder, key)
    failed = {check.name for check in replay(folder) if not passed(check)}
    assert failed == {key}


def test_a_changed_weight_is_noticed_and_the_command_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy("rope", tmp_path / "golden")
    assert verify(folder) == 0
    edit(folder, "image_encoder.blocks.1.attn.proj.weight", "transformer/diffusion_pytorch_model.safetensors")
    assert verify(folder) == 1
    assert "OUTSIDE" in capsys.readouterr().out


def test_an_output_that_nothing_compares_is_listed(tmp_path: Path) -> None:
    folder = copy("rope", tmp_path / "golden")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["tensors"]["new.thing"] = {"kind": "output"}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    skipped = {check.name: check.skipped for check in replay(folder) if check.skipped}
    assert skipped["new.thing"] == "not known to this version of margrpo"


def test_missing_files_are_one_line(tmp_path: Path) -> None:
    folder = copy("rope", tmp_path / "golden")
    (folder / "golden.safetensors").write_bytes(b"123")
    with pytest.raises(MargrpoError, match=r"golden\.safetensors: not readable") as caught:
        replay(folder)
    assert "\n" not in str(caught.value)


def test_tolerances_are_what_numpy_allclose_means() -> None:
    golden = Golden(GOLDEN / "rope")
    reference = torch.tensor([0.0, 1.0, -100.0])
    for shift, inside in ((1.9e-5, True), (2.1e-5, False)):
        golden.compare("zero", reference + torch.tensor([shift, 0.0, 0.0]), reference, 2e-5, 1e-4)
        assert passed(golden.checks[-1]) is inside
    for shift, inside in ((1.001e-2, True), (1.01e-2, False)):
        golden.compare("large", reference + torch.tensor([0.0, 0.0, shift]), reference, 2e-5, 1e-4)
        assert passed(golden.checks[-1]) is inside
    golden.compare("nan", reference * float("nan"), reference, 2e-5, 1e-4)
    assert not passed(golden.checks[-1])
    golden.compare("shape", reference[:2], reference, 2e-5, 1e-4)
    assert not passed(golden.checks[-1])
