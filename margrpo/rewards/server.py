"""The server of one reward: `margrpo serve-reward NAME`.

GET /health says what it scores with; POST /score takes a `wire.Request` and returns a `wire.Answer`. Batches are
scored one after the other, each as it was sent, so that scores do not depend on who else asks. There is no
authentication: it listens on loopback unless told otherwise.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from margrpo import __version__
from margrpo.config import RewardOptions
from margrpo.errors import ConfigError
from margrpo.rewards import base, wire
from margrpo.rewards.runner import Runner
from margrpo.rewards.weights import recorded_files, recorded_sha256

BODY_S = 60.0
"""How long a request's body may take to arrive."""
_RETRY_AFTER_S = 1
_CLOSED = 499  # for the log alone: nobody is there to read it

_log = logging.getLogger("margrpo.rewards")


class RewardServer:
    """Answers requests with the scores of one reward.

    Args:
        runner: the reward. identity: what /health says of it. queue: requests that may wait or be scored at a
            time. max_bytes: of a request's body.
    """

    def __init__(self, runner: Runner, identity: wire.Identity, queue: int, max_bytes: int) -> None:
        self.runner, self.identity, self.queue, self.max_bytes = runner, identity, queue, max_bytes
        self._waiting = 0
        self._turn = asyncio.Lock()
        self.app = Starlette(
            routes=[
                Route("/health", self.health, methods=["GET"]),
                Route("/score", self.score, methods=["POST"]),
            ]
        )

    async def health(self, request: Request) -> Response:
        """Return the identity; also while a batch is scored."""
        return JSONResponse(self.identity.model_dump())

    async def score(self, request: Request) -> Response:
        """Return the scores of a batch, 4xx for a request that nobody could answer, 503 when the queue is full."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip()
        if kind != "application/json":  # a web page cannot send this type to another origin unasked
            return _error(415, f"content-type {kind or 'missing'}; allowed: application/json")
        if self._waiting >= self.queue:
            busy = _error(503, f"{self._waiting} requests wait; allowed: {self.queue}")
            busy.headers["retry-after"] = str(_RETRY_AFTER_S)
            return busy
        self._waiting += 1
        try:
            return await self._answer(request)
        finally:
            self._waiting -= 1

    async def _answer(self, request: Request) -> Response:
        try:
            body = await asyncio.wait_for(self._read(request), BODY_S)
            if body is None:
                return _error(413, f"body too large; allowed: {self.max_bytes} bytes (send smaller batches)")
            images, prompts, specs = await run_in_threadpool(wire.decode, body)
            async with self._turn:
                if await request.is_disconnected():  # it gave up waiting
                    return Response(status_code=_CLOSED)
                scores, reasons = await run_in_threadpool(self.runner.score, images, prompts, specs)
        except TimeoutError:
            return _error(408, f"the body did not arrive within {BODY_S:g} s")
        except ClientDisconnect:
            return Response(status_code=_CLOSED)
        except wire.MalformedError as error:
            return _error(400, str(error))
        except Exception as error:  # whatever it is, the client learns of it and the server lives on
            _log.error("margrpo: reward %s: %s: %s", self.identity.name, type(error).__name__, error)
            return _error(500, f"{type(error).__name__}: {error}")
        values = [score if score == score else None for score in scores.tolist()]
        name, weights = self.identity.name, self.identity.weights
        answer = wire.Answer(name=name, weights=weights, scores=values, reasons=reasons)
        return JSONResponse(answer.model_dump())

    async def _read(self, request: Request) -> bytes | None:
        """Return the body, None if it is too large."""
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > self.max_bytes:
            return None
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self.max_bytes:
                return None
        return bytes(body)


def serve(name: str, options: RewardOptions, host: str, port: int, queue: int, max_bytes: int) -> None:
    """Load a reward and serve it until interrupted; port 0 takes a free one. Prints the address once it listens.

    Raises:
        ConfigError: unknown reward, a missing package or file, or an address that cannot be had.
        MargrpoError: weights that cannot be loaded.
    """
    base.check({name: 1.0}, {name: options})
    runner = Runner(base.entry(name), options)
    with recorded_files() as files:
        runner.prepare()
    info = runner.entry.info
    weights = recorded_sha256(files) if files else None
    identity = wire.Identity(
        name=name,
        version=__version__,
        weights=weights,
        license=info.license,
        low=wire.limit(info.low),
        high=wire.limit(info.high),
    )
    try:
        listening = socket.create_server((host, port), family=_family(host))
    except (OSError, OverflowError) as error:
        raise ConfigError.of(
            "serve-reward", f"{host}:{port} ({error})", "allowed: a free port here"
        ) from None
    app = RewardServer(runner, identity, queue, max_bytes).app
    settings = uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=5)
    shown = f"[{host}]" if ":" in host else host
    print(f"{name} http://{shown}:{listening.getsockname()[1]} weights {weights}", flush=True)
    if host not in ("127.0.0.1", "::1", "localhost"):
        print("margrpo: warning: anybody who reaches this address can use it", file=sys.stderr, flush=True)
    torch.set_grad_enabled(False)
    uvicorn.Server(settings).run(sockets=[listening])


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": " ".join(message.split())}, status)
