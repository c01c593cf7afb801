"""A small Hub on localhost: what `huggingface_hub` asks for to create, fill, list and read a model repository.

A real HTTP server, so that nothing in a client has to be replaced: clients are processes started with
`HubServer.environment`. Like the Hub it keeps every commit, and has its large files in a storage under another host
name, at signed addresses, where the token does not belong. Left out: Xet, uploads in parts, pull requests, data sets
and ranges.
"""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from support.hub_answers import ROUTES, Answer
from support.hub_state import Hub, Refusal

LONGEST_WAIT_SECONDS = 300


class HubServer(Hub):
    """The Hub as a context manager: serves from a free port until the block ends."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.lock = threading.Lock()

    def __enter__(self) -> "HubServer":
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.hub = self  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self.storage_endpoint = f"http://localhost:{self._server.server_port}"
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def environment(self, home: Path, token: str | None = None) -> dict[str, str]:
        """Variables for a client process: this Hub, its own cache, a token if given, where the tests' modules are."""
        ours = ("HF_", "HUGGING", "TRANSFORMERS_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        hub = {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
        hub |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        local = "127.0.0.1,localhost"
        hub |= {"NO_PROXY": local, "no_proxy": local, "PYTHONPATH": str(Path(__file__).parents[1])}
        return kept | hub | ({"HF_TOKEN": token} if token else {})

    def run(self, *command: str, home: Path, token: str | None = None, fails: bool = False) -> str:
        """What a Python process prints that is started with these arguments as a client; `fails`: it has to.

        Args:
            command (`str`): what follows `python`.
            home (`Path`): folder of the client's cache.
            token (`str`, *optional*): what the client has as `HF_TOKEN`.
            fails (`bool`): whether it has to end with an error; its last words are then returned.
        """
        environment = self.environment(home, token)
        done = subprocess.run(
            [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=LONGEST_WAIT_SECONDS
        )
        assert (done.returncode != 0) == fails, done.stdout[-1000:] + done.stderr[-6000:]
        return done.stderr[-6000:] if fails else done.stdout


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Headers and body leave in one piece; sent apart, each answer would wait for a delayed acknowledgement.
    wbufsize = -1

    def do_GET(self) -> None:
        hub: HubServer = self.server.hub  # type: ignore[attr-defined]
        body = self._read_body()
        sent = self.headers.get("Authorization")
        try:
            with hub.lock:
                answer = self._answer(hub, sent, body)
        except Refusal as refusal:
            answer = Answer(refusal.body, refusal.status, refusal.headers)
        except Exception as error:
            # Said to the client, whose failure then names it; without an answer it would only try again.
            answer = Answer({"error": f"the test's Hub failed: {error!r}"}, 500)
        content = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
        self.send_response(answer.status)
        for name, value in ({"Content-Length": str(len(content))} | answer.headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815

    def _answer(self, hub: HubServer, sent: str | None, body: bytes) -> Answer:
        url = urlsplit(self.path)
        if sent is not None and sent != f"Bearer {hub.token}":
            raise Refusal(401, "Invalid credentials in Authorization header")
        for method, pattern, needs_token, function in ROUTES:
            match = pattern.fullmatch(url.path)
            if match is None or method != self.command:
                continue
            if needs_token and sent is None:
                raise Refusal(401, "Invalid username or password.")
            parts = {name: unquote(value) for name, value in match.groupdict(default="").items()}
            if parts.get("name") in hub.repositories and hub.repositories[parts["name"]].private and sent is None:
                # As if it were not there, so that nobody learns of it.
                raise Refusal(404, "Repository not found", "RepoNotFound")
            return function(hub, method=method, body=body, query=parse_qs(url.query), **parts)
        raise Refusal(404, f"this Hub does not know {self.command} {url.path}")

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        pieces = []
        while length := int(self.rfile.readline(), 16):
            pieces.append(self.rfile.read(length))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Requests are not written to the screen."""
