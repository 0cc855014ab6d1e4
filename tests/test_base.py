from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from margrpo import base, hub
from margrpo.checkpoints import load_policy, read_header
from margrpo.config import Config
from margrpo.errors import ConfigError, MargrpoError
from margrpo.policies.mar import read_mar
from tests.hub_server import COMMIT, serve
from tests.policies.real import trainable_folder
from tests.support import make_config

REPOSITORY = "somebody/tiny-mar"


def checkpoint(**keys: Any) -> Config:
    return make_config(checkpoint=keys)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = trainable_folder("mar", tmp_path_factory.mktemp("mar"))
    (made / "README.md").write_text("not needed")
    (made / "modeling.py").write_text("raise SystemExit('code of a checkpoint was run')")
    return made


def sums(folder: Path, *names: str) -> dict[str, str]:
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


FILES = ("config.json", "model.safetensors", "vae.safetensors")


def test_a_released_folder_becomes_the_base_policy(folder: Path, tmp_path: Path) -> None:
    config = checkpoint(source="path", path=str(folder))
    out = tmp_path / "policy.safetensors"
    digest = base.write_base(config, out)
    assert digest == hashlib.sha256(out.read_bytes()).hexdigest()
    assert read_header(out)["provenance"] == {"source": "path", "files": sums(folder, *FILES)}
    released, written = read_mar(folder), load_policy(out)
    assert all(torch.equal(v, written.state_dict()[n]) for n, v in released.state_dict().items())


@pytest.mark.parametrize(("revision", "warns"), [("main", True), ("v1", True), (COMMIT, False)])
def test_a_revision_that_can_move_is_a_warning(
    revision: str,
    warns: bool,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(hub, "fetch", lambda given: folder)
    monkeypatch.setattr(hub, "commit_of", lambda found: "c" * 40)
    assert base.find_base(checkpoint(source="hub", id=REPOSITORY, revision=revision)) == folder
    text = capsys.readouterr().err
    assert (f"checkpoint.revision {revision} can move" in text) == warns
    assert (f"pin the commit {'c' * 40}\n" in text) == warns


def test_the_hash_of_a_folder_is_that_of_sha256sum(folder: Path) -> None:
    config = checkpoint(source="path", path=str(folder))
    listed = subprocess.run(["sha256sum", *FILES], cwd=folder, capture_output=True, check=True).stdout
    digest = hashlib.sha256(listed).hexdigest()
    assert base.base_sha256(config, folder) == digest
    base.find_base(checkpoint(source="path", path=str(folder), sha256=digest))
    with pytest.raises(ConfigError, match=f"checkpoint.sha256: {'0' * 64}; allowed: .*{digest}"):
        base.find_base(checkpoint(source="path", path=str(folder), sha256="0" * 64))


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({"config.json": "0" * 64}, "checkpoint.files.config.json: 000"),
        (
            {"config.json": None, "model-2.safetensors": None},
            "checkpoint.files: model-2.safetensors; allowed",
        ),
    ],
)
def test_listed_files_are_checked(folder: Path, files: Mapping[str, str | None], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        base.find_base(checkpoint(source="path", path=str(folder), files=files))


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="allowed: the folder of a released"):
        base.find_base(checkpoint(source="path", path=str(tmp_path)))


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"source": "hub", "revision": "main"}, "checkpoint.id: None; allowed: a value"),
        ({"source": "hub", "id": "a/b"}, "checkpoint.revision: None; allowed: a value"),
        ({"source": "hub", "id": "../b", "revision": "main"}, "checkpoint.id: ../b"),
        ({"source": "hub", "id": "a/b", "revision": "../x"}, "checkpoint.revision: ../x"),
        ({"source": "hub", "id": "a/b", "revision": "main", "files": {"../x": None}}, "files: ../x"),
        ({"source": "path", "path": "x", "id": "a/b"}, "checkpoint.id: a/b; allowed: null unless"),
        ({"files": {"x": None}}, "files: .*null unless source is path or hub"),
    ],
)
def test_keys_that_do_not_fit_the_source(keys: Mapping[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        checkpoint(**keys)


# The client reads its address and its cache folder when it is imported: each call is a process of its own.
FETCH = """
import json, sys
from margrpo import base, hub
from margrpo.errors import MargrpoError
from tests.support import make_config
keys = json.loads(sys.argv[1])
try:
    config = make_config(checkpoint={"source": "hub", **keys})
    digest = base.write_base(config, __import__("pathlib").Path(sys.argv[2]))
    print("sha256", digest)
except MargrpoError as error:
    print("error", error)
"""


def fetch(url: str, cache: Path, out: Path, offline: bool = False, **keys: Any) -> str:
    environment = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"}
    environment |= {"HF_HUB_OFFLINE": "1" if offline else "0", "NO_PROXY": "127.0.0.1"}
    given = json.dumps({"id": REPOSITORY, "revision": "main", **keys})
    done = subprocess.run(
        [sys.executable, "-c", FETCH, given, str(out)],
        env=environment,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_repository_of_the_hub_becomes_the_base_policy(folder: Path, tmp_path: Path) -> None:
    out, cache = tmp_path / "policy.safetensors", tmp_path / "cache"
    with serve(folder, REPOSITORY) as server:
        server.breaks = "model.safetensors"
        first = fetch(server.url, cache, out)
        if first.startswith(
            "error"
        ):  # the client gave up on the broken transfer; the next call goes on from it
            assert "cannot be fetched" in first
            assert not out.exists()
            first = fetch(server.url, cache, out)
        assert first.startswith("sha256 ")
        assert server.breaks is None
        assert sorted(server.served) == sorted(FILES)  # each once, and neither README.md nor code
        provenance = read_header(out)["provenance"]
        assert provenance == {
            "source": "hub",
            "id": REPOSITORY,
            "revision": "main",
            "commit": COMMIT,
            "files": sums(folder, *FILES),
        }
        served = len(server.served)
        assert fetch(server.url, cache, out) == first
        assert len(server.served) == served  # nothing twice
    assert fetch("http://127.0.0.1:9", cache, out, offline=True) == first
    other = fetch("http://127.0.0.1:9", cache, out, offline=True, id="somebody/other")
    assert other.startswith("error checkpoint.id: somebody/other at revision main cannot be fetched (")
    assert "\n" not in other
    wrong = fetch("http://127.0.0.1:9", cache, out, offline=True, files={"config.json": "0" * 64})
    assert wrong.startswith("error checkpoint.files.config.json: 000")


def test_patterns_take_what_the_families_read_and_no_code(tmp_path: Path) -> None:
    wanted = [
        "config.json",
        "kl16.ckpt",
        "mar.pth",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "scheduler/scheduler_config.json",
        "text_encoder/config.json",
        "text_encoder/model.safetensors",
        "tokenizer/tokenizer.json",
        "transformer/config.json",
        "vae/diffusion_pytorch_model.safetensors",
    ]
    for name in [*wanted, "model.py", "transformer/code.py", "README.md", "model.bin", "flax_model.msgpack"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    assert hub.needed(tmp_path) == sorted(wanted)


def test_damaged_checkpoints_leave_nothing_behind(folder: Path, tmp_path: Path) -> None:
    broken = trainable_folder("mar", tmp_path / "broken")
    content = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(content[: len(content) // 2])
    out = tmp_path / "out" / "policy.safetensors"
    with pytest.raises(MargrpoError, match="not a readable weight file") as caught:
        base.write_base(checkpoint(source="path", path=str(broken)), out)
    assert "\n" not in str(caught.value)
    assert not out.parent.exists()
