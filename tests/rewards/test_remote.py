"""Rewards behind `margrpo serve-reward`: a real process, its faults, and what the client makes of them."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch

from margrpo import __version__, rewards
from margrpo.cli import app, run
from margrpo.config import RewardOptions
from margrpo.errors import ConfigError, RewardError
from margrpo.params import build_config
from margrpo.rewards import base, remote, wire
from tests.rewards.serving import ODD, Server
from tests.support import RUN, VARIANTS

IMAGES = torch.rand(6, 3, 8, 10, generator=torch.Generator().manual_seed(0))
ROUNDED = (IMAGES * 255).round() / 255
PROMPTS = ["ein großer Hund", "", "three\nlines", '"quoted"', "x" * 2000, "a"]


@pytest.fixture(autouse=True)
def _odd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(base._REGISTRY, "odd", ODD)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = Server("odd", "--queue", "2", "--max-mib", "1", "--batch-size", "4")
    yield server.wait()
    server.kill()


def score(url: str | None, specs: list[dict[str, Any]] | None = None, **options: Any) -> torch.Tensor:
    given = {"odd": RewardOptions(url=url, **options)}
    return rewards.score({"odd": 1.0}, IMAGES, PROMPTS, specs or [{}] * 6, given).parts["odd"]


def test_scores_are_those_of_the_images_rounded_to_8_bit(url):
    remotely = score(url)
    local = rewards.score({"odd": 1.0}, ROUNDED, PROMPTS, [{}] * 6).total
    assert torch.equal(remotely, local)
    assert 0 < (remotely - score(None)).abs().max() < 0.5 / 255


def test_health_says_what_is_served(url):
    assert httpx.get(f"{url}/health", timeout=120).json() == {
        "protocol": 1,
        "name": "odd",
        "version": __version__,
        "weights": None,
        "license": "none",
        "low": 0.0,
        "high": 1.0,
    }


def test_it_listens_on_loopback_alone(url):
    assert url.startswith("http://127.0.0.1:")
    with pytest.raises(OSError), socket.create_connection(("127.0.0.2", int(url.rsplit(":", 1)[1])), 1):  # noqa: PT011
        pass


def test_images_without_a_score_are_nan_and_the_reason_is_told(url, caplog):
    scores = score(url, [{}, {"nan": True}, {}, {"raise": True}, {}, {}])
    assert scores.isnan().tolist() == [False, True, False, True, False, False]
    assert "RuntimeError: bad picture" in caplog.text
    assert "reward odd: no score for 2 of 6 images" in caplog.text


def test_a_slow_server_is_a_time_out_and_no_score(url):
    score(url)
    with pytest.raises(RewardError, match=r"reward odd: no answer from http.* within 0.6 s \(time-out"):
        score(url, [{"sleep": 1.5}] * 6, timeout_s=0.3, wait_s=0.6)


def test_a_full_queue_answers_503_and_the_client_waits_for_its_turn(url):
    score(url)  # what others left in the queue is done
    body = wire.encode(IMAGES[:1], [""], [{"sleep": 4.0}])
    answers: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda: answers.append(post(url, body))) for _ in range(3)]
    for thread in threads:
        thread.start()
    waited = score(url)
    for thread in threads:
        thread.join()
    # the client asks at the same time: of the others' requests it may leave one or two in the queue
    answers.sort(key=lambda answer: answer.status_code)
    scored, refused = answers[0], answers[-1]
    assert (scored.status_code, refused.status_code) == (200, 503)
    assert refused.headers["retry-after"] == "1"
    assert refused.json() == {"error": "2 requests wait; allowed: 2"}
    assert scored.json()["scores"] == [pytest.approx(float(ROUNDED[0].mean()), abs=1e-6)]
    assert not waited.isnan().any()


def post(url: str, body: Any, kind: str = "application/json") -> httpx.Response:
    return httpx.post(f"{url}/score", content=body, headers={"content-type": kind}, timeout=120, verify=False)


def change(**fields: Any) -> bytes:
    return json.dumps({**json.loads(wire.encode(IMAGES[:2], ["", ""], [{}, {}])), **fields}).encode()


def png(mode: str, size: tuple[int, int]) -> str:
    import base64
    import io

    from PIL import Image

    buffer = io.BytesIO()
    Image.new(mode, size).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        (b"{", 400, "body: Invalid JSON"),
        (b"[" * 100_000, 400, "body: Invalid JSON"),
        (b"[]", 400, "body: Input should be an object"),
        (change(images=[]), 400, "images: List should have at least 1 item"),
        (change(extra=1), 400, "extra: Extra inputs are not permitted"),
        (change(prompts=["one"]), 400, "prompts: 1 of them for 2 images"),
        (change(specs=[1, 2]), 400, "specs.0: Input should be an object"),
        (change(images=["%%", "%%"]), 400, "images.0: not base64"),
        (change(images=["AAAA", "AAAA"]), 400, "images.0: not a PNG file"),
        (change(images=[png("L", (4, 4))] * 2), 400, "images.0: mode L; allowed: RGB"),
        (change(images=[png("RGB", (4, 4)), png("RGB", (5, 4))]), 400, "images: of several sizes"),
        (change(images=[png("RGB", (6000, 6000))] * 2), 400, "allowed: 67108864 pixels in all"),
        (b" " * (2**20 + 1), 413, "body too large; allowed: 1048576 bytes"),
    ],
)
def test_what_nobody_could_answer_is_refused_in_one_line(url, body, status, error):
    answer = post(url, body)
    assert answer.status_code == status
    assert answer.json()["error"].startswith(error) or error in answer.json()["error"]
    assert "\n" not in answer.json()["error"]
    assert not score(url).isnan().any()


def test_chunks_without_a_length_are_limited_too(url):
    answer = post(url, iter([b" " * 2**19] * 4))
    assert answer.status_code == 413


def test_a_web_page_cannot_post_to_it(url):
    answer = post(url, change(), "text/plain")
    assert answer.status_code == 415


def test_a_batch_that_is_too_large_is_one_line_for_the_client(url):
    noise = torch.rand(8, 3, 256, 256, generator=torch.Generator().manual_seed(0))
    given = {"odd": RewardOptions(url=url)}
    with pytest.raises(RewardError, match=r"reward odd: http.* answers 413: body too large.*smaller batches"):
        rewards.score({"odd": 1.0}, noise, [""] * 8, [{}] * 8, given)


def test_another_reward_at_the_address_is_a_mistake_in_the_params(url):
    allowed = "allowed: the address of `margrpo serve-reward jpeg_size`"
    with pytest.raises(ConfigError, match=rf"reward.options.jpeg_size.url: {url} serves odd; {allowed}"):
        rewards.prepare(["jpeg_size"], {"jpeg_size": RewardOptions(url=url)})
    with pytest.raises(ConfigError, match=r"odd.url: http.*/deeper is no reward server \(answers 404"):
        rewards.prepare(["odd"], {"odd": RewardOptions(url=f"{url}/deeper")})
    with pytest.raises(ConfigError, match=r"odd.sha256: 0+; allowed: None, served there"):
        rewards.prepare(["odd"], {"odd": RewardOptions(url=url, sha256="0" * 64)})


def test_nobody_at_the_address_is_one_line_after_the_wait():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        free = listening.getsockname()[1]
    options = {"odd": RewardOptions(url=f"http://127.0.0.1:{free}", wait_s=0.2)}
    with pytest.raises(
        RewardError, match=r"no answer from http.* within 0.2 s \(.*refused; start `margrpo serve"
    ):
        rewards.prepare(["odd"], options)


def test_other_weights_in_the_middle_of_a_run_are_no_scores(url, monkeypatch):
    reward = remote.RemoteReward("odd", RewardOptions(url=url))
    monkeypatch.setattr(reward, "_identity", reward._identity.model_copy(update={"weights": "0" * 64}))
    with pytest.raises(
        RewardError, match=r"scores with odd, weights None, since the run began with odd, weights 0"
    ):
        reward(IMAGES, PROMPTS, [{}] * 6)


def test_pauses_grow_are_jittered_and_obey_the_server(monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr("tenacity.nap.time.sleep", slept.append)
    reward = object.__new__(remote.RemoteReward)
    reward.name, reward.url, reward.options = "odd", "http://x", RewardOptions(url="http://x", wait_s=1000)
    reward._client = httpx.Client(transport=httpx.MockTransport(answers := Answers()))
    assert reward._ask("GET", "/health") == b"at last"
    assert answers.count == 8
    for pause, (low, high) in zip(
        slept, [(0.5, 1), (1, 1.5), (2, 2.5), (4, 4.5), (8, 8.5), (20, 20)], strict=False
    ):
        assert low <= pause <= high
    assert 30 <= slept[6] <= 30.5
    assert len({round(pause % 0.5, 9) for pause in slept[:5]}) > 1


class Answers:
    """A server that is away five times, busy twice, and then answers."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.count += 1
        if self.count <= 5:
            raise httpx.ConnectError("refused")
        busy = {6: "20", 7: "4000"}.get(self.count)
        return (
            httpx.Response(503, headers={"retry-after": busy})
            if busy
            else httpx.Response(200, content=b"at last")
        )


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"url": "ftp://there"}, "reward.options.scenes.url: ftp://there; allowed: "),
        ({"url": "http://a/?b"}, "reward.options.scenes.url: http://a/?b; allowed: "),
        ({"url": "http://a", "path": "w"}, "scenes.path: w; allowed: null with url"),
        ({"url": "http://a", "precision": "float16"}, "scenes.precision: float16; allowed: float32 with url"),
        ({"wait_s": 5.0}, "scenes.wait_s: 5.0; allowed: null without url"),
    ],
)
def test_settings_of_the_other_side_are_refused(options, error):
    with pytest.raises(ConfigError) as caught:
        build_config({**RUN, "variants": VARIANTS, "reward": {"options": {"scenes": options}}})
    assert error in str(caught.value)


def test_serve_reward_refuses_in_one_line(tmp_path, capsys):
    for arguments, error in [
        (["nothing"], "reward.weights.nothing: unknown reward"),
        (["hpsv2.1", "--path", str(tmp_path)], "has no HPS_v2.1_compressed.pt"),
        (["jpeg_size", "--precision", "int8"], "serve-reward: precision: int8; allowed: float32 | float16"),
        (["jpeg_size", "--host", "203.0.113.1"], "serve-reward: 203.0.113.1:8410"),
    ]:
        assert run(app, ["serve-reward", *arguments]) == 2
        captured = capsys.readouterr().err
        assert error in captured
        assert captured.count("\n") == 1


def test_8_bit_images_pass_the_wire_unchanged():
    images, prompts, specs = wire.decode(wire.encode(IMAGES, PROMPTS, [{"a": [1, 0.1]}] * 6))
    assert torch.equal(images, ROUNDED)
    assert (prompts, specs[0]) == (PROMPTS, {"a": [1, 0.1]})
    assert torch.equal(wire.decode(wire.encode(images, PROMPTS, [{}] * 6))[0], images)
