from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from margrpo.cli import app, run
from margrpo.errors import MargrpoError
from margrpo.golden.runner import replay, verify
from margrpo.golden.vectors import difference, guidance_scale, passed, temperature
from margrpo.policies.families import family_of
from tests.golden.plain_mar import write_folder

GOLDEN = Path(__file__).parent
SKIPPED = {
    "step/std_T1.0 (1 of 6 rows)",
    "step/std_T0.95 (1 of 6 rows)",
    "step/log_prob_T1.0 (1 of 6 rows)",
    "step/log_prob_T0.95 (1 of 6 rows)",
    "step_cfg/log_prob (2 of 12 rows)",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "mar", tmp_path / "mar"))


@pytest.mark.parametrize(("family", "skipped", "least"), [("mar", SKIPPED, 130), ("harmon", set(), 140)])
def test_every_reference_tensor_is_inside_its_tolerance(family: str, skipped: set[str], least: int) -> None:
    checks = replay(GOLDEN / family)
    assert [check for check in checks if not passed(check)] == []
    assert {check.name for check in checks if check.skipped is not None} == skipped
    assert sum(check.skipped is None for check in checks) >= least
    # no tolerance is wider than the manifests allow (2e-3 for the released KL alone, which cancels in float32)
    assert all(
        check.tolerance <= 2e-4 for check in checks if check.skipped is None and "kl_loss" not in check.name
    )
    assert all(check.relative for check in checks if "/grad" in check.name or "kl_loss" in check.name)


@pytest.mark.parametrize(
    ("changes", "spacing", "steps"),
    [
        # encoder and decoder of different width, depth and heads, patches of 2 x 2, a thin MLP
        (
            {"patch_size": 2, "img_size": 64, "mlp_ratio": 2, "num_sampling_steps": "3,2"},
            [0, 250, 499, 500, 999],
            3,
        ),
        # more AR steps than tokens: some commit nothing
        ({"img_size": 32, "buffer_size": 1, "num_sampling_steps": "4,1"}, [0, 166, 333, 499, 500], 7),
    ],
)
def test_folders_of_other_sizes_agree_with_a_plain_implementation(
    tmp_path: Path, changes: dict[str, object], spacing: list[int], steps: int
) -> None:
    config: dict[str, object] = {
        "img_size": 48,
        "vae_stride": 16,
        "patch_size": 1,
        "vae_embed_dim": 3,
        "encoder_embed_dim": 16,
        "encoder_depth": 1,
        "encoder_num_heads": 2,
        "decoder_embed_dim": 24,
        "decoder_depth": 3,
        "decoder_num_heads": 3,
        "mlp_ratio": 4,
        "class_num": 4,
        "buffer_size": 3,
        "diffloss_d": 1,
        "diffloss_w": 12,
        **changes,
    }
    write_folder(tmp_path, config, spacing, steps)
    checks = replay(tmp_path)
    assert [check for check in checks if not passed(check)] == []
    compared = {check.name for check in checks if check.skipped is None}
    assert {"enc/some/null/z", "head/out", "rollout/cfg2_linear_T0.8/latents"} <= compared


def test_gradients_of_both_kinds_are_among_the_checks() -> None:
    names = {check.name for family in ("mar", "harmon") for check in replay(GOLDEN / family)}
    assert {"loss/grad_z", "loss/grad_input_proj_weight", "loss/grad_final_linear_weight"} <= names
    for preset in ("plain", "mte_sim"):
        assert {f"train/{preset}/grad/{n}" for n in ("mask_token", "z_proj.weight", "fake_latent")} <= names


def test_the_command_prints_each_tensor_and_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["verify", "--golden", str(GOLDEN / "mar")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("head/out_cfg3 ") and "1e-05 relative" in line for line in lines)
    assert lines[-1] == "136 tensors compared, 0 outside their tolerance, 5 skipped"


def test_one_wrong_tensor_fails_and_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vectors = load_file(folder / "vectors.safetensors")
    vectors["head/out"][3, 2] *= 1.01
    save_file(vectors, folder / "vectors.safetensors")
    assert run(app, ["verify", "--golden", str(folder), "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert not result["passed"]
    assert [row["name"] for row in result["checks"] if not row["passed"]] == ["head/out"]


def test_wrong_weights_fail_almost_everywhere(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = load_file(folder / "model.safetensors")
    state["decoder_norm.bias"] += 1e-3
    save_file(state, folder / "model.safetensors")
    assert verify(folder) == 1
    assert capsys.readouterr().out.count("OUTSIDE") > 20


def test_shape_and_nan_mismatches_are_infinite_errors() -> None:
    assert difference(torch.zeros(2), torch.zeros(3), relative=True) == float("inf")
    assert difference(torch.tensor([torch.nan, 0.0]), torch.ones(2), relative=True) == float("inf")
    assert difference(torch.tensor([1.0, 2.1]), torch.tensor([1.0, 2.0]), relative=True) == pytest.approx(
        0.05
    )
    assert difference(torch.tensor([0.5]), torch.zeros(1), relative=True) == 0.5  # nothing to divide by


def test_unknown_tensors_are_listed_and_missing_inputs_are_an_error(folder: Path) -> None:
    vectors = load_file(folder / "vectors.safetensors")
    vectors["future/thing"] = torch.zeros(1)
    save_file(vectors, folder / "vectors.safetensors")
    unknown = [check for check in replay(folder) if check.name == "future/thing"]
    assert unknown[0].skipped == "not known to this version"
    del vectors["head/x_t"]
    save_file(vectors, folder / "vectors.safetensors")
    with pytest.raises(MargrpoError, match="no tensor head/x_t"):
        replay(folder)


def test_folders_of_no_family_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["verify", "--golden", str(tmp_path / "absent")]) == 2
    save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert run(app, ["verify", "--golden", str(tmp_path)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert "no such folder" in errors[0]
    assert "no known family; allowed: MAR, Harmon, NOVA" in errors[1]


def test_the_family_is_recognised_from_the_files(tmp_path: Path) -> None:
    assert family_of(GOLDEN / "mar") == "mar"
    assert family_of(GOLDEN / "harmon") == "harmon"
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_text("{}")
    assert family_of(tmp_path) == "nova"


def test_names_of_rollouts_give_guidance_and_temperature() -> None:
    assert temperature("cfg3_constant_T0.9") == 0.9
    assert temperature("cfg3_linear") == 1.0
    constant, linear = guidance_scale("cfg3_constant", 16, 14), guidance_scale("cfg3_linear", 16, 14)
    assert constant is not None
    assert linear is not None
    assert (float(constant), float(linear)) == (3.0, 1.25)
    assert guidance_scale("other", 16, 14) is None
