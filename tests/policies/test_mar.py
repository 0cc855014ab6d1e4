from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from margrpo.checkpoints import load_policy, save_policy
from margrpo.config import Sampler
from margrpo.errors import ConfigError, MargrpoError
from margrpo.policies.base import Condition
from margrpo.policies.kl_vae import KlVae, VaeArchitecture
from margrpo.policies.mar import SIZES, MarPolicy, mar_architecture, read_mar
from margrpo.policies.masked import MaskedArchitecture, MaskedPolicy, own_name
from tests.policies.real import GOLDEN, copy_folder, edit_config, randomize, trainable_folder

SMALL = {
    "img_size": 32,
    "vae_stride": 8,
    "encoder_embed_dim": 16,
    "encoder_depth": 1,
    "encoder_num_heads": 2,
    "decoder_embed_dim": 24,
    "decoder_depth": 2,
    "decoder_num_heads": 3,
    "vae_embed_dim": 3,
    "class_num": 5,
    "buffer_size": 2,
    "diffloss_d": 1,
    "diffloss_w": 8,
}


def small(**changes: object) -> MarPolicy:
    policy = MarPolicy(MaskedArchitecture.model_validate({**SMALL, **changes}))
    randomize(policy)
    return policy


@pytest.mark.parametrize(
    ("name", "parameters", "keys"),
    [("mar_base", 207_924_768, 364), ("mar_large", 478_326_304, 476), ("mar_huge", 942_403_104, 604)],
)
def test_public_sizes_have_the_parameters_of_the_released_files(
    name: str, parameters: int, keys: int
) -> None:
    policy = MarPolicy(mar_architecture({"type": name}, "test"))
    assert sum(p.numel() for p in policy.parameters()) == parameters
    assert len(policy.mar.state_dict()) == keys
    assert policy.tokens == 256
    assert policy.channels == 16


def test_kl16_has_the_parameters_of_the_released_file() -> None:
    vae = KlVae(VaeArchitecture(), 0.2325, encoder=True)
    assert sum(p.numel() for p in vae.parameters()) == 66_456_019
    assert len(vae.state_dict()) == 312


def test_channels_of_a_token_are_latent_channel_then_row_then_column() -> None:
    policy = small(patch_size=2)
    assert (policy.tokens, policy.channels) == (4, 12)
    latents = torch.arange(3 * 16.0).view(1, 3, 4, 4)
    tokens = policy.patches(latents)
    # token 1 = second patch of the first row: columns 2 and 3 of rows 0 and 1 of each channel
    assert tokens[0, 1].tolist() == [2, 3, 6, 7, 18, 19, 22, 23, 34, 35, 38, 39]
    assert torch.equal(policy.latents(tokens), latents)


def test_schedule_is_the_cosine_one_of_the_source() -> None:
    policy = small()  # 16 tokens
    # floor(16 cos(pi s / 8)) = 14, 11, 6 stay unknown after steps 1, 2, 3
    assert policy.ar_schedule(4) == [2, 3, 5, 6]
    assert policy.ar_schedule(1) == [16]
    assert policy.ar_schedule(16) == [1] * 8 + [1, 1, 1, 1, 1, 1, 1, 1]
    crowded = policy.ar_schedule(200)  # more steps than tokens: those without a token are dropped
    assert sum(crowded) == 16
    assert min(crowded) == 1
    with pytest.raises(ConfigError, match=r"sampler\.ar_steps"):
        policy.ar_schedule(0)


def test_256_steps_of_the_public_models_commit_every_token_once() -> None:
    policy = MarPolicy(mar_architecture({"type": "mar_base"}, "test"))
    for steps in (64, 256):
        counts = policy.ar_schedule(steps)
        assert sum(counts) == 256
        assert min(counts) >= 1
        unknown = 256
        for k, count in enumerate(counts[:-1], start=1):
            unknown -= count
            assert unknown == max(
                1, min(unknown + count - 1, math.floor(256 * math.cos(math.pi / 2 * k / steps)))
            )


def test_content_of_unknown_tokens_does_not_matter() -> None:
    policy = small()
    known = torch.zeros(2, 16, dtype=torch.bool)
    known[0, [1, 4]] = known[1, [0, 15]] = True
    tokens = torch.randn(2, 16, 3, generator=torch.Generator().manual_seed(0))
    condition = policy.encode(["1", None])
    z = policy.backbone(tokens, known, condition)
    assert z.shape == (2, 16, 24)
    spoiled = torch.where(known[..., None], tokens, torch.nan)
    assert torch.equal(policy.backbone(spoiled, known, condition), z)
    other = tokens.clone()
    other[0, 1] += 1
    assert not torch.equal(policy.backbone(other, known, condition)[0], z[0])
    assert torch.equal(policy.backbone(other, known, condition)[1], z[1])


def test_null_and_class_conditions_are_the_released_vectors() -> None:
    policy = small()
    buffer = policy.buffer(policy.encode(["4", None, " 0 "]))
    assert torch.equal(buffer[0], policy.mar.class_emb.weight[4])
    assert torch.equal(buffer[1], policy.mar.fake_latent[0])
    assert torch.equal(buffer[2], policy.mar.class_emb.weight[0])


def test_different_numbers_of_known_tokens_are_refused() -> None:
    policy = small()
    known = torch.zeros(2, 16, dtype=torch.bool)
    known[0, 0] = True
    with pytest.raises(ValueError, match="known tokens per image"):
        policy.backbone(torch.zeros(2, 16, 3), known, policy.encode(["0", "1"]))


def test_training_mode_scores_like_evaluation_mode() -> None:
    policy = small()
    known, condition = torch.zeros(1, 16, dtype=torch.bool), policy.encode(["0"])
    z = policy.eval().backbone(torch.zeros(1, 16, 3), known, condition)
    assert torch.equal(policy.train().backbone(torch.zeros(1, 16, 3), known, condition), z)


def test_backbone_and_head_parameters_are_all_parameters_but_the_autoencoder(tmp_path: Path) -> None:
    policy = read_mar(trainable_folder("mar", tmp_path))
    names = {id(p): n for n, p in policy.named_parameters()}
    backbone = {names[id(p)] for p in policy.backbone_parameters()}
    head = {names[id(p)] for p in policy.head_parameters()}
    assert not backbone & head
    assert all(name.startswith("mar.denoiser.") for name in head)
    assert {name for name, p in policy.named_parameters() if p.requires_grad} == backbone | head


def test_images_are_clamped_halves_of_the_autoencoder_output(tmp_path: Path) -> None:
    policy = read_mar(trainable_folder("mar", tmp_path))
    assert policy.vae is not None
    tokens = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(0))
    images = policy.decode(tokens)
    raw = policy.vae.decode(policy.latents(tokens) / 0.2325)
    torch.testing.assert_close(images, ((raw + 1) / 2).clamp(0, 1))
    assert 0 <= float(images.min()) <= float(images.max()) <= 1


def test_flow_switches_are_refused() -> None:
    policy = small()
    for key, value in (("eta", 0.5), ("final_step", "stochastic")):
        with pytest.raises(ConfigError, match=rf"sampler\.{key}"):
            policy.configure(Sampler.model_validate({key: value}))


def test_the_checkpoints_own_spacing_is_used_for_its_own_number_of_steps() -> None:
    policy = small(num_sampling_steps="8,1")
    policy.configure(Sampler(denoising_steps=9))
    assert policy.transition.times.tolist() == [500, 499, 428, 356, 285, 214, 143, 71, 0]
    policy.configure(Sampler(denoising_steps=3, temperature=0.5))
    assert policy.transition.times.tolist() == [999, 500, 0]


def write_names(folder: Path, names: list[str]) -> None:
    (folder / "class_names.json").write_text(json.dumps({str(i): name for i, name in enumerate(names)}))


def test_prompts_are_ids_or_names_of_the_checkpoints_folder(tmp_path: Path) -> None:
    folder = copy_folder("mar", tmp_path)
    write_names(folder, ["tench, Tinca tinca", "crane", "Crane", *"defghij"])
    policy = read_mar(folder)
    labels = policy.encode(["7", "Tinca tinca", "TENCH", None, "d"])["labels"].tolist()
    assert labels == [7, 0, 0, -1, 3]
    with pytest.raises(ConfigError, match=r"one of 1 \(crane\), 2 \(Crane\)"):
        policy.encode(["crane"])
    with pytest.raises(ConfigError, match=r"did you mean 'tench' \(0\)"):
        policy.encode(["tenchh"])
    for prompt in ("10", "-1", "²", ""):
        with pytest.raises(ConfigError, match="prompt"):
            policy.encode([prompt])
    assert load_policy_again(policy, tmp_path).encode(["tench"])["labels"].tolist() == [0]


def load_policy_again(policy: MaskedPolicy, folder: Path) -> MaskedPolicy:
    save_policy(policy, folder / "own.safetensors", {})
    loaded = load_policy(folder / "own.safetensors")
    assert isinstance(loaded, MaskedPolicy)
    return loaded


def test_a_released_folder_loads_where_a_checkpoint_does(tmp_path: Path) -> None:
    folder = copy_folder("mar", tmp_path)
    policy = load_policy(folder)
    assert isinstance(policy, MarPolicy)
    assert torch.equal(policy.mar.fake_latent, read_mar(folder).mar.fake_latent)
    (folder / "model.safetensors").unlink()
    with pytest.raises(MargrpoError, match="weight files: none"):
        load_policy(folder)


def test_without_names_the_error_says_how_to_have_them() -> None:
    with pytest.raises(ConfigError, match=r"class_names\.json"):
        small().encode(["tench"])


def test_a_names_table_of_another_size_is_refused(tmp_path: Path) -> None:
    folder = copy_folder("mar", tmp_path)
    write_names(folder, ["one", "two"])
    with pytest.raises(MargrpoError, match=r"class_names\.json.*0\.\.9"):
        read_mar(folder)


def test_a_saved_policy_is_the_same_policy(tmp_path: Path) -> None:
    policy = read_mar(trainable_folder("mar", tmp_path / "released"))
    loaded = load_policy_again(policy, tmp_path)
    tokens = torch.randn(1, 16, 8, generator=torch.Generator().manual_seed(0))
    known = torch.zeros(1, 16, dtype=torch.bool)
    assert torch.equal(
        loaded.backbone(tokens, known, loaded.encode(["2"])),
        policy.backbone(tokens, known, policy.encode(["2"])),
    )
    assert torch.equal(loaded.decode(tokens), policy.decode(tokens))
    assert {n: p.requires_grad for n, p in loaded.named_parameters()} == {
        n: p.requires_grad for n, p in policy.named_parameters()
    }


def test_ema_weights_of_a_training_checkpoint_are_preferred(tmp_path: Path) -> None:
    folder = copy_folder("mar", tmp_path)
    from safetensors.torch import load_file

    state: dict[str, Tensor] = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    raw = {name: value + 1 for name, value in state.items()}
    torch.save({"model": raw, "model_ema": state, "epoch": 3}, folder / "checkpoint-last.pth")
    assert torch.equal(read_mar(folder).mar.fake_latent, state["fake_latent"])
    torch.save({"model": raw}, folder / "checkpoint-last.pth")
    assert torch.equal(read_mar(folder).mar.fake_latent, raw["fake_latent"])


def test_16_bit_weights_become_float32(tmp_path: Path) -> None:
    folder = copy_folder("mar", tmp_path)
    from safetensors.torch import load_file, save_file

    state = {n: v.bfloat16() for n, v in load_file(folder / "model.safetensors").items()}
    save_file(state, folder / "model.safetensors")
    policy = read_mar(folder)
    assert {p.dtype for p in policy.mar.parameters()} == {torch.float32}
    assert torch.equal(policy.mar.fake_latent, state["fake_latent"].float())


def test_a_wrong_size_is_one_line_that_names_the_config_value(tmp_path: Path) -> None:
    cases = {
        "encoder_depth": (3, "encoder_depth"),
        "diffloss_w": (16, "diffloss_w"),
        "class_num": (11, "class_num"),
        "buffer_size": (7, "buffer_size"),
        "vae_embed_dim": (4, "vae_embed_dim"),
    }
    for key, (value, named) in cases.items():
        folder = copy_folder("mar", tmp_path / key)
        edit_config(folder, mar={key: value})
        with pytest.raises(MargrpoError, match=named) as error:
            read_mar(folder)
        assert "\n" not in str(error.value)


def test_config_typos_and_impossible_sizes_are_one_line(tmp_path: Path) -> None:
    cases = {
        "typo": ({"encoder_dept": 2}, "did you mean encoder_depth"),
        "type": ({"type": "mar_tiny"}, "mar_base, mar_large, mar_huge"),
        "heads": ({"encoder_num_heads": 5}, "divisor"),
        "huge": ({"encoder_depth": 10**9}, "<= 128"),
        "text": ({"class_num": "many"}, "class_num"),
        "spacing": ({"num_sampling_steps": "0"}, "num_sampling_steps"),
    }
    for name, (values, message) in cases.items():
        folder = copy_folder("mar", tmp_path / name)
        edit_config(folder, mar=values)
        with pytest.raises(MargrpoError, match=message) as error:
            read_mar(folder)
        assert "\n" not in str(error.value)


def test_without_a_config_only_public_widths_are_recognised(tmp_path: Path) -> None:
    folder = copy_folder("mar", tmp_path)
    (folder / "config.json").unlink()
    with pytest.raises(MargrpoError, match=r"width 48 and no config.json.*768 \(mar_base\)"):
        read_mar(folder)
    with pytest.raises(MargrpoError, match=r"encoder_blocks.*encoder_depth|instead of"):
        read_mar(folder, size="mar_base")


def test_names_map_onto_ours_one_to_one() -> None:
    released = json.loads((GOLDEN / "mar" / "config.json").read_text())["mar"]
    policy = MarPolicy(mar_architecture(released, "test"))
    from safetensors import safe_open

    with safe_open(GOLDEN / "mar" / "model.safetensors", framework="pt") as file:
        names = list(file.keys())
    assert len(names) == 92
    assert {own_name(name) for name in names} == set(policy.mar.state_dict())
    assert set(SIZES) == {"mar_base", "mar_large", "mar_huge"}


def test_position_tables_follow_the_grid_of_an_image_that_is_not_square() -> None:
    """Linear tables stay linear under bilinear interpolation (away from the clamped border)."""
    from margrpo.policies.masked import MaskedTransformer

    architecture = MaskedArchitecture.model_validate(SMALL)
    transformer = MaskedTransformer(architecture, (4, 8))
    rows, columns = torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij")
    image = torch.stack([rows, columns], dim=-1).view(1, 16, 2)
    buffer = torch.full((1, 2, 2), 99.0)
    table = transformer.positions(torch.cat([buffer, image], dim=1))
    assert table.shape == (1, 2 + 32, 2)
    assert torch.equal(table[:, :2], buffer)
    grid = table[0, 2:].view(4, 8, 2)
    assert torch.equal(grid[..., 0], torch.arange(4.0)[:, None].expand(4, 8))  # rows keep their coordinate
    # half as wide: pixel j lies at native (j + 0.5) / 2 - 0.5
    assert grid[0, 1:7, 1].tolist() == [0.25, 0.75, 1.25, 1.75, 2.25, 2.75]


def test_condition_moves_and_selects() -> None:
    condition = Condition({"labels": torch.tensor([1, 2, 3])})
    assert condition.to(torch.device("cpu")).select(slice(1, 3))["labels"].tolist() == [2, 3]
