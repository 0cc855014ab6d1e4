"""The commands around benchmarks, with the embedded policy."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
from PIL import Image
from ruamel.yaml import YAML

from margrpo.checkpoints import save_policy, sha256
from margrpo.cli import app, run
from tests.support import RUN, VARIANTS, make_policy, scene_prompts

TEXTS = [prompt.text for prompt in scene_prompts("test", 3)]


@pytest.fixture
def folder(in_folder: Path) -> Path:
    """Return a folder with params, a policy and a benchmark's prompts."""
    params = {**RUN, "variants": VARIANTS, "sampler": {"ar_steps": 3, "denoising_steps": 4}}
    with open("params.yaml", "w") as file:
        YAML().dump({**params, "train": {"ar_steps": 2, "denoising_steps": 2}}, file)
    save_policy(make_policy(), Path("policy.safetensors"), {})
    Path("own.txt").write_text("\n".join(TEXTS))
    Path("geneval").mkdir()
    tags = {
        "single_object": 80,
        "two_object": 99,
        "counting": 80,
        "colors": 94,
        "position": 100,
        "color_attr": 100,
    }
    lines = [
        {"tag": tag, "include": [], "prompt": TEXTS[0]} for tag, count in tags.items() for _ in range(count)
    ]
    Path("geneval/evaluation_metadata.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    Path("t2i").mkdir()
    for category in (
        "color",
        "shape",
        "texture",
        "spatial",
        "3d_spatial",
        "numeracy",
        "non_spatial",
        "complex",
    ):
        Path(f"t2i/{category}_val.txt").write_text("\n".join(TEXTS * 100))
    return in_folder


def bench(*arguments: str) -> int:
    return run(app, ["bench", *arguments])


def generate(out: str, *more: str) -> int:
    return bench(
        "generate", "file", "--path", "own.txt", "--checkpoint", "policy.safetensors", "--out", out, *more
    )


def hashes(folder: str) -> dict[str, str]:
    files = [file for file in Path(folder).rglob("*") if file.is_file()]
    return {str(file.relative_to(folder)): sha256(file) for file in files}


def test_a_killed_run_goes_on_to_the_same_images(folder, capsys):
    assert generate("whole", "--images", "2") == 0
    assert "whole: 6 images, 6 of them drawn now" in capsys.readouterr().out
    shutil.copytree("whole", "broken")
    for name in ("00000_00001.png", "00002_00000.png"):
        Path("broken", name).unlink()
    Path("broken/.00002_00000.png.77.tmp").write_bytes(b"half")
    assert generate("broken", "--images", "2", "--set", "evaluation.batch_size=1") == 0
    assert "broken: 6 images, 2 of them drawn now" in capsys.readouterr().out
    assert hashes("broken") == hashes("whole")


def test_the_record_says_how_the_images_were_made(folder, capsys):
    assert generate("images", "--limit", "1", "--set", "evaluation.guidance=2.0") == 0
    record = json.loads(Path("images/generation.json").read_text())
    listed = [json.dumps({"category": "prompts", "seen": False, "spec": {}, "text": t}) + "\n" for t in TEXTS]
    assert record == {
        "benchmark": "file",
        "policy_sha256": sha256(Path("policy.safetensors")),
        "prompts_sha256": hashlib.sha256("".join(listed).encode()).hexdigest(),
        "seeds": "sha256 of benchmark, prompt index and image index",
        "sampler": "ode",
        "ar_steps": 3,
        "denoising_steps": 4,
        "eta": 0.7,
        "final_step": "deterministic",
        "temperature": 1.0,
        "guidance_schedule": "constant",
        "guidance": 2.0,
        "precision": "float32",
        "images_per_prompt": 1,
        "prompts": 1,
        "images": 1,
    }
    # more prompts go into the same folder, other settings do not
    before = hashes("images")["00000_00000.png"]
    assert generate("images", "--set", "evaluation.guidance=2.0") == 0
    assert hashes("images")["00000_00000.png"] == before
    assert json.loads(Path("images/generation.json").read_text())["images"] == 3
    capsys.readouterr()
    assert generate("images", "--sampler", "sde", "--set", "evaluation.guidance=2.0") == 2
    error = capsys.readouterr().err
    assert "its images were made with sampler ode, now sde; allowed: the same settings" in error
    assert len(error.splitlines()) == 1


def test_layouts_of_geneval_and_t2i_compbench(folder):
    common = ["--checkpoint", "policy.safetensors", "--limit", "1"]
    assert bench("generate", "geneval", "--path", "geneval", "--out", "g", "--images", "2", *common) == 0
    samples = sorted(str(file.relative_to("g")) for file in Path("g").rglob("*.png"))
    places = [0, 80, 179, 259, 353, 453]  # the first of every task
    assert samples == [f"{place:05d}/samples/{image:05d}.png" for place in places for image in (0, 1)]
    assert json.loads(Path("g/00080/metadata.jsonl").read_text())["tag"] == "two_object"
    only = ["--set", "evaluation.benchmarks.t={prompts: t2i_compbench, path: t2i, categories: [color, 3d_spatial], "
            "scores: [jpeg_size]}"]  # fmt: skip
    assert bench("generate", "t", "--out", "t", *common, *only) == 0
    samples = sorted(str(file.relative_to("t")) for file in Path("t").rglob("*.png"))
    assert samples == [
        f"{category}/samples/{TEXTS[0]}_{number:06d}.png"
        for category in ("3d_spatial", "color")
        for number in range(10)
    ]
    assert (
        len(set(hashes("t").values())) == 21
    )  # no two images are alike: place and number decide on the noise


def test_scores_of_a_folder(folder, capsys):
    assert generate("images", "--images", "2") == 0
    assert bench("score", "file", "images", "--path", "own.txt", "--images", "2", "--score", "jpeg_size") == 0
    out = capsys.readouterr().out
    table = pd.read_csv("images/scores.csv")
    assert table["images"].tolist() == [2, 2, 2]
    assert table["mean"].between(-3, -0.5).all()
    assert f"all {table['mean'].mean():.6g}" in out
    assert "n_images 6, failed 0" in out
    assert "guidance: 1.0" in out
    # the file holds what an independent reading of the pictures gives
    with Image.open("images/00001_00001.png") as picture:
        assert picture.size == (32, 32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "coco", "--out", "x"], "benchmark: coco; allowed: hpsv2, drawbench"),
        (["generate", "file", "--out", "x"], "benchmark file.path: None; allowed: a folder or file"),
        (
            ["generate", "file", "--out", "x", "--path", "none.txt"],
            "allowed: a .txt (a prompt per line) or .jsonl",
        ),
        (["generate", "file", "--out", "x", "--path", "own.txt", "--sampler", "ddim"], "allowed: ode | sde"),
        (["score", "file", "x", "--path", "own.txt"], "--score: none"),
        (["score", "file", "x", "--path", "own.txt", "--score", "beauty"], "unknown reward"),
        (
            ["score", "file", "x", "--path", "own.txt", "--score", "jpeg_size"],
            "x/00000_00000.png: is missing",
        ),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(arguments, message, folder, capsys):
    assert bench(*arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert not Path("x").exists()


def test_the_list_names_sources_and_licences(capsys):
    assert bench("list") == 0
    out = capsys.readouterr().out
    assert "geneval: 553 prompts in 6 categories, 4 images each (MIT)\n  from djghosh13/geneval" in out
    assert "t2i_compbench: 2400 prompts in 8 categories, 10 images each" in out
