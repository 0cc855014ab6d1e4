from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from margrpo.checkpoints import load_policy
from margrpo.config import Sampler
from margrpo.errors import MargrpoError
from margrpo.policies.nova import NovaPolicy, read_nova
from margrpo.policies.nova.config import NovaConfig
from margrpo.policies.nova.schedule import check_scheduler, transition
from margrpo.policies.nova.transformer import NovaTransformer
from tests.policies.nova_support import DDPM, GOLDEN, folder

WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
CONFIG = "transformer/config.json"
FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 1.0}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(folder(), tmp_path / "nova")
    return tmp_path / "nova"


def refusal(action: Callable[[], Any]) -> str:
    with pytest.raises(MargrpoError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def rewrite(path: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def test_half_precision_weights_are_widened(copy: Path) -> None:
    rewrite(copy / WEIGHTS, lambda t: t.update({k: v.to(torch.bfloat16) for k, v in t.items()}))
    original = read_nova(folder()).state_dict()
    for name, value in read_nova(copy).state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, original[name].to(torch.bfloat16).float())


def test_shards_equal_the_single_file(copy: Path) -> None:
    tensors = load_file(copy / WEIGHTS)
    (copy / WEIGHTS).unlink()
    names = sorted(tensors)
    placed = {name: f"part-{i % 3}.safetensors" for i, name in enumerate(names)}
    for shard in set(placed.values()):
        save_file(
            {name: tensors[name] for name in names if placed[name] == shard}, copy / "transformer" / shard
        )
    index = copy / f"{WEIGHTS}.index.json"
    index.write_text(json.dumps({"weight_map": placed}))
    for name, value in read_nova(copy).transformer.state_dict().items():
        assert torch.equal(value, tensors[name])
    (copy / "transformer" / "part-1.safetensors").unlink()
    assert "part-1.safetensors" in refusal(lambda: read_nova(copy))
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "../../secret.safetensors")}))
    assert "secret" in refusal(lambda: read_nova(copy))


def test_missing_and_unexpected_tensors_name_the_probable_cause(copy: Path) -> None:
    rewrite(copy / WEIGHTS, lambda t: [t.pop(k) for k in list(t) if k.startswith("video_pos_embed")])
    message = refusal(lambda: read_nova(copy))
    assert "video_pos_embed" in message
    assert "rotary_pos_embed" in message


def test_extra_layers_are_refused(copy: Path) -> None:
    change(copy / CONFIG, arch=["vit_d2w48", "vit_d2w48", "mlp_d2w40"])
    message = refusal(lambda: read_nova(copy))
    assert "image_encoder.blocks.2" in message
    assert "arch[1]" in message


def test_wrong_shapes_are_refused_before_anything_is_allocated(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(copy / CONFIG, arch=["vit_d2w48", "vit_d3w48", "mlp_d2w100000"])
    monkeypatch.setattr(torch.nn.Module, "load_state_dict", lambda *_, **__: pytest.fail("loaded"))
    message = refusal(lambda: read_nova(copy))
    assert "100000" in message
    assert "arch[2]" in message


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"arch": ["vit_d2w48", "vit_3w48", "mlp_d2w40"]}, "arch[1]: vit_3w48; allowed: three names like"),
        ({"arch": ["vit_d2w48", "vit_d3w48"]}, "arch: ['vit_d2w48', 'vit_d3w48']; allowed: three names"),
        ({"arch": ["vit_d2w44", "vit_d3w48", "mlp_d2w40"]}, "both transformers of one width"),
        ({"image_base_size": [4, 4]}, "image_base_size: [4, 4]; allowed: [4, 6]"),
        ({"video_base_size": [1, 2, 4]}, "video_base_size: [2, 4]; allowed: [2, 3]"),
        ({"image_size": [64, 100]}, "image_size: [64, 100]; allowed: multiples of 32"),
        ({"image_dim": "4"}, "image_dim: 4; allowed: an integer"),
        ({"image_stride": 0}, "image_stride: 0; allowed: an integer"),
        ({"text_token_len": 600}, "text_token_len: 600; allowed: an integer 1..512"),
        ({"video_mixer_rank": 24}, "video_mixer_rank: 24; allowed: null (video checkpoints"),
        ({"_class_name": "FluxTransformer2DModel"}, "_class_name: FluxTransformer2DModel; allowed: NOVA"),
        ({"flux_capacitor": True}, "flux_capacitor: True; allowed: image_dim"),
        ({"_test_num_heads": 5}, "arch width: 48; allowed: a multiple of 4 and of the 5 heads"),
        ({"_test_num_heads": None}, "arch width: 48; allowed: 768, 1024, 1536"),
    ],
)
def test_a_wrong_config_is_one_line_that_names_the_key(
    copy: Path, values: dict[str, Any], named: str
) -> None:
    change(copy / CONFIG, **values)
    assert named in refusal(lambda: read_nova(copy))


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS, "scheduler/scheduler_config.json"])
def test_missing_and_damaged_files(name: str, copy: Path) -> None:
    data = (copy / name).read_bytes()
    (copy / name).write_bytes(data[: len(data) // 2])
    assert Path(name).name in refusal(lambda: read_nova(copy))
    (copy / name).unlink()
    assert Path(name).name in refusal(lambda: read_nova(copy))


def test_a_folder_is_a_base_policy() -> None:
    policy = load_policy(folder())
    assert isinstance(policy, NovaPolicy)
    assert policy.tokens == 24


def test_nan_weights_are_refused(copy: Path) -> None:
    rewrite(copy / WEIGHTS, lambda t: t["mask_embed.bos_token"].fill_(torch.nan))
    assert "mask_embed.bos_token holds NaN" in refusal(lambda: read_nova(copy))


def test_text_encoder_and_decoder_problems_are_one_line(copy: Path) -> None:
    def encode() -> Any:
        return read_nova(copy).encode(["a"])

    def decode() -> Any:
        return read_nova(copy).decode(torch.zeros(1, 24, 16))

    encoder = copy / "text_encoder"
    rewrite(encoder / "model.safetensors", lambda t: t.pop("model.layers.0.mlp.fc1.weight"))
    assert "missing (" in refusal(encode)
    (encoder / "model.safetensors").write_bytes(b"damaged")
    assert "text_encoder: not loadable" in refusal(encode)
    change(encoder / "config.json", hidden_size=32)
    assert "hidden_size 32; allowed: 24" in refusal(encode)
    (copy / "tokenizer" / "tokenizer.json").unlink()
    assert "tokenizer.json" in refusal(encode)
    vae = copy / "vae"
    rewrite(vae / "diffusion_pytorch_model.safetensors", lambda t: t.pop("decoder.conv_in.weight"))
    assert "decoder.conv_in.weight" in refusal(decode)
    (vae / "diffusion_pytorch_model.safetensors").write_bytes(b"damaged")
    assert "diffusion_pytorch_model.safetensors" in refusal(decode)
    change(vae / "config.json", _class_name="AutoencoderKLOpenSora")
    assert "AutoencoderKLOpenSora; allowed: AutoencoderKL" in refusal(decode)
    for name in ("text_encoder", "vae"):
        shutil.rmtree(copy / name)
    assert f"{copy}: no text_encoder; a NOVA policy encodes prompts" in refusal(encode)
    assert f"{copy}: no vae; a NOVA policy encodes prompts" in refusal(decode)


def test_a_decoder_of_another_stride_is_refused(copy: Path) -> None:
    from margrpo.golden.companions import write_vae

    shutil.rmtree(copy / "vae")
    write_vae(copy / "vae", 4, 4, 0)
    message = refusal(lambda: read_nova(copy).decode(torch.zeros(1, 24, 16)))
    assert "4 channels at stride 4; allowed: 4 at 8" in message


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"_class_name": "DDIMScheduler"}, "_class_name: DDIMScheduler; allowed: FlowMatch"),
        ({**DDPM, "prediction_type": "v_prediction"}, "prediction_type: v_prediction; allowed: epsilon"),
        ({**DDPM, "clip_sample": True}, "clip_sample: True; allowed: False"),
        ({k: v for k, v in DDPM.items() if k != "clip_sample"}, "clip_sample: True; allowed: False"),
        ({**DDPM, "variance_type": "learned_range"}, "variance_type: learned_range; allowed: fixed_small"),
        ({**FLOW, "use_dynamic_shifting": True}, "use_dynamic_shifting: True; allowed: False"),
    ],
)
def test_schedulers_that_are_not_expressed_are_refused(config: dict[str, Any], named: str) -> None:
    assert named in refusal(lambda: check_scheduler(config))


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_flow_steps_are_those_of_diffusers(shift: float) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    ours = transition({**FLOW, "shift": shift}, Sampler(denoising_steps=7))
    theirs = FlowMatchEulerDiscreteScheduler.from_config({**FLOW, "shift": shift})
    theirs.set_timesteps(7)
    torch.testing.assert_close(ours.times, theirs.timesteps)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, generator=generator)
    for step, time in enumerate(theirs.timesteps):
        v = torch.randn(5, 3, generator=generator)
        expected = theirs.step(v, time, x).prev_sample
        torch.testing.assert_close(ours.ode(step, x, v), expected)
        x = expected
    if shift == 1.0:  # T values from 1 to 0.001, then 0
        assert ours.times.tolist() == pytest.approx([1000 - i * 999 / 6 for i in range(7)], abs=1e-3)


@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
@pytest.mark.parametrize("variance", ["fixed_small", "fixed_large"])
def test_ddpm_steps_are_those_of_diffusers(
    spacing: str, variance: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers import DDPMScheduler
    from diffusers.schedulers import scheduling_ddpm

    config = {
        **DDPM,
        "timestep_spacing": spacing,
        "variance_type": variance,
        "beta_schedule": "scaled_linear",
    }
    ours = transition(config, Sampler(denoising_steps=6))
    theirs = DDPMScheduler.from_config(config)
    theirs.set_timesteps(6)
    assert ours.times.tolist() == theirs.timesteps.tolist()
    generator = torch.Generator().manual_seed(0)
    x, epsilon, noise = torch.randn(3, 5, 3, generator=generator)
    monkeypatch.setattr(scheduling_ddpm, "randn_tensor", lambda *_, **__: noise)
    for step, time in enumerate(theirs.timesteps):
        expected = theirs.step(epsilon, time, x).prev_sample
        if step == 5 and int(time) > 0 and variance == "fixed_large":
            continue  # diffusers adds noise to the token itself; our last step is noiseless
        sample = ours.kernel(step, x, epsilon).sample(noise)
        torch.testing.assert_close(sample, expected, rtol=1e-4, atol=1e-4)
    assert ours.scored == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("width", "heads"), [(768, 12), (1024, 16), (1536, 16)])
def test_released_sizes(width: int, heads: int) -> None:
    config = NovaConfig.parse(
        {
            "image_dim": 4,
            "image_size": [1024, 1024],
            "image_stride": 8,
            "text_token_dim": 2560,
            "text_token_len": 256,
            "image_base_size": [64, 64],
            "video_base_size": [1, 32, 32],
            "video_mixer_rank": None,
            "arch": [f"vit_d16w{width}", f"vit_d32w{width}", f"mlp_d6w{width}"],
            "_class_name": "NOVATransformer3DModel",
            "_diffusers_version": "0.31.0",
        }
    )
    assert (config.heads, config.grid, config.video_grid, config.channels) == (heads, (64, 64), (32, 32), 16)
    with torch.device("meta"):
        shapes = {name: list(value.shape) for name, value in NovaTransformer(config).state_dict().items()}
    assert shapes["video_encoder.patch_embed.proj.weight"] == [width, 4, 4, 4]
    assert shapes["image_encoder.blocks.31.attn.qkv.weight"] == [3 * width, width]
    assert shapes["image_decoder.blocks.5.norm1.proj.weight"] == [3 * width, width]
    assert shapes["image_decoder.head.weight"] == [16, width]
    assert shapes["text_embed.weight"] == [512, 2560]


def test_state_dict_is_the_one_of_the_checkpoint() -> None:
    for name in ("abs", "rope"):
        stored = load_file(GOLDEN / name / WEIGHTS)
        shapes = read_nova(GOLDEN / name).transformer.state_dict()
        assert {key: value.shape for key, value in stored.items()} == {
            key: value.shape for key, value in shapes.items()
        }
