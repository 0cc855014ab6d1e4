"""A local stand-in for the Hugging Face hub: one repository, counted requests, one broken transfer on demand."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """What was asked of the server.

    Attributes:
        url: its address. served: names of the files sent whole, in order.
        breaks: name of a file whose next transfer stops in the middle.
    """

    def __init__(self) -> None:
        self.url = ""
        self.served: list[str] = []
        self.breaks: str | None = None


@contextmanager
def serve(folder: Path, repository: str) -> Iterator[Hub]:
    """Serve a folder as the only revision `main` of a repository, of a model or a data set."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, body: bool) -> None:
            path = self.path.split("?")[0]
            if re.fullmatch(rf"/api/(?:models|datasets)/{repository}/revision/(main|{COMMIT})", path):
                names = [f.relative_to(folder).as_posix() for f in sorted(folder.rglob("*")) if f.is_file()]
                content = {"id": repository, "sha": COMMIT, "siblings": [{"rfilename": n} for n in names]}
                self._send(json.dumps(content).encode(), body, {"Content-Type": "application/json"})
                return
            if re.fullmatch(rf"/api/(?:models|datasets)/{repository}/tree/{COMMIT}", path):
                files = [f for f in sorted(folder.rglob("*")) if f.is_file()]
                entries = [
                    {
                        "type": "file",
                        "path": f.relative_to(folder).as_posix(),
                        "size": f.stat().st_size,
                        "oid": hashlib.sha1(f.read_bytes()).hexdigest(),
                    }
                    for f in files
                ]
                self._send(json.dumps(entries).encode(), body, {"Content-Type": "application/json"})
                return
            found = re.fullmatch(rf"/(?:datasets/)?{repository}/resolve/(?:main|{COMMIT})/(.+)", path)
            file = folder / found[1] if found else folder / "\0"
            if found is None or not file.is_file():
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound" if found is None else "EntryNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            data = file.read_bytes()
            headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
            self._send(data, body, headers, found[1])

        def _send(self, data: bytes, body: bool, headers: dict[str, str], name: str = "") -> None:
            self.send_response(200)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if not body:
                return
            if name and name == hub.breaks:
                hub.breaks = None
                self.wfile.write(data[: len(data) // 2])
                self.wfile.flush()
                self.connection.close()
                return
            if name:
                hub.served.append(name)
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
