"""An object store on this machine: moto's S3 server in a process of its own, with delays and failures on demand.

    with object_store() as store:
        store.upload(folder, "bucket/data")
        store.misbehave(delay=0.05, failing=0.01)

Failures are drawn by a seed and are of three kinds, each a third: an answer of 500 or 503, a connection that is dropped before the
answer, and one that is dropped in the middle of a body. `requests` and `failures` say what the server has met.
"""

import json
import logging
import os
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyarrow import fs

KEYS = {"AWS_ACCESS_KEY_ID": "key-of-a-test", "AWS_SECRET_ACCESS_KEY": "secret-of-a-test-do-not-print"}
ENVIRONMENT = KEYS | {"AWS_EC2_METADATA_DISABLED": "true", "AWS_REGION": "us-east-1"}
CONTROL = "/_control"


class ObjectStore:
    """A running server, and a client of it that meets no failures of its making."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self._files = fs.S3FileSystem(
            access_key=KEYS["AWS_ACCESS_KEY_ID"],
            secret_key=KEYS["AWS_SECRET_ACCESS_KEY"],
            region="us-east-1",
            endpoint_override=self.url,
            allow_bucket_creation=True,
            allow_bucket_deletion=True,
        )

    def upload(self, folder: Path, place: str) -> str:
        """Put the files below a folder (or one file) below `bucket/prefix`, and return its URL."""
        self._files.create_dir(place.partition("/")[0])
        files = [folder] if folder.is_file() else [path for path in sorted(folder.rglob("*")) if path.is_file()]
        for path in files:
            self.write(f"{place}/{path.relative_to(folder if folder.is_dir() else folder.parent)}", path.read_bytes())
        return f"s3://{place}"

    def write(self, place: str, content: bytes) -> None:
        with self._files.open_output_stream(place) as file:
            file.write(content)

    def content(self, place: str) -> dict[str, bytes]:
        """Return the objects below `bucket/prefix`, by what follows that in their keys."""
        found = self._files.get_file_info(fs.FileSelector(place, recursive=True, allow_not_found=True))
        files = [info.path for info in found if info.type == fs.FileType.File]
        return {path.removeprefix(f"{place}/"): self._files.open_input_file(path).read() for path in files}

    def remove(self, place: str) -> None:
        self._files.delete_file(place)

    def misbehave(self, **rules: float) -> None:
        """Set `delay` (seconds), `failing` (share of requests), `seed`, `after` (requests before all fail), and `denied`."""
        self._control(rules)

    @property
    def requests(self) -> dict[str, int]:
        """The requests by method since the last call of `misbehave`."""
        return dict(self._control()["requests"])

    @property
    def reads(self) -> dict[str, int]:
        """The GET requests by object, as bucket and key."""
        return dict(self._control()["reads"])

    @property
    def failures(self) -> int:
        return int(self._control()["failures"])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def _control(self, rules: Mapping[str, float] | None = None) -> dict[str, Any]:
        body = None if rules is None else json.dumps(rules).encode()
        with urllib.request.urlopen(self.url + CONTROL, data=body, timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
        return found


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    command = [sys.executable, "-m", "tests.support.object_store"]
    root = Path(__file__).parent.parent.parent
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(root)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root, env=environment) as process:
        assert process.stdout is not None
        try:
            yield ObjectStore(process, int(process.stdout.readline()))
        finally:
            process.kill()


class Misbehaving:
    """A WSGI application around another one that is late, answers with errors, or drops connections."""

    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self.application = application
        self._lock = threading.Lock()
        self._set({})

    def _set(self, rules: Mapping[str, float]) -> None:
        self.rules = {"delay": 0.0, "failing": 0.0, "after": -1.0, "denied": 0.0, **rules}
        self._random = random.Random(int(self.rules.get("seed", 0)))
        self.requests: dict[str, int] = {}
        self.reads: dict[str, int] = {}
        self.failures = 0

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] == CONTROL:
            return self._answer(environ, start_response)
        with self._lock:
            method = environ["REQUEST_METHOD"]
            self.requests[method] = self.requests.get(method, 0) + 1
            if method == "GET":
                place = environ["PATH_INFO"].strip("/")
                self.reads[place] = self.reads.get(place, 0) + 1
            dead = 0 <= self.rules["after"] < sum(self.requests.values())
            fails, kind = dead or self._random.random() < self.rules["failing"], self._random.randrange(3)
            self.failures += fails
        time.sleep(self.rules["delay"])
        if self.rules["denied"]:
            start_response("403 Forbidden", [("Content-Length", "0")])
            return [b""]
        connection: socket.socket = environ["werkzeug.socket"]
        if fails and (kind == 0 or method == "HEAD"):
            status = self._random.choice(["500 Internal Server Error", "503 Slow Down"])
            start_response(status, [("Content-Length", "0")])
            return [b""]
        if fails and kind == 1:
            connection.shutdown(socket.SHUT_RDWR)
            start_response("500 Dropped", [])
            return [b""]
        body = self.application(environ, start_response)
        return self._cut(b"".join(body), connection) if fails else body

    def _cut(self, body: bytes, connection: socket.socket) -> Iterator[bytes]:
        yield body[: len(body) // 2]
        connection.shutdown(socket.SHUT_RDWR)
        yield body[len(body) // 2 :]

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] == "POST":
            self._set(json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))))
        body = json.dumps({"requests": self.requests, "reads": self.reads, "failures": self.failures}).encode()
        start_response("200 OK", [("Content-Length", str(len(body)))])
        return [body]


def main() -> None:

    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    application = Misbehaving(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, application, threaded=True)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
