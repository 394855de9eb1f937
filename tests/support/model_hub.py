"""The part of the Hugging Face Hub's HTTP interface that models need, on this machine and in memory.

    with model_hub() as hub:                  # hub.url is what HF_ENDPOINT has to be
        hub.put("ann/words", {"config.json": b"..."})

`hub.fails_with = 503` answers every request with that; `hub.asked` are the requests, `hub.private` the private models.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_token-of-a-test-do-not-print"
USER = "ann"


class ModelHub:
    """Models by name, each a list of commits; a commit is its files."""

    def __init__(self) -> None:
        self.url = ""
        self.commits: dict[str, list[tuple[str, dict[str, bytes]]]] = {}
        self.private: set[str] = set()
        self.asked: list[str] = []
        self.fails_with: int | None = None
        self.repeats_token = False
        """Whether an error repeats what it was sent, as a hostile server may."""

    def put(self, name: str, files: Mapping[str, bytes]) -> str:
        """Add a commit with these files in place of those of the same names, and return it."""
        commits = self.commits.setdefault(name, [])
        whole = {**(commits[-1][1] if commits else {}), **files}
        sha = hashlib.sha1(f"{name}{len(commits)}".encode()).hexdigest()
        commits.append((sha, whole))
        return sha

    def files(self, name: str, revision: str = "main") -> tuple[str, dict[str, bytes]] | None:
        commits = self.commits[name]
        if revision == "main":
            return commits[-1]
        return next((one for one in commits if one[0] == revision), None)


@contextmanager
def model_hub() -> Iterator[ModelHub]:
    hub = ModelHub()

    class Handler(_Handler):
        store = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    store: ModelHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(b"")

    def do_GET(self) -> None:
        self.answer(b"")

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(length)
        self.answer(body)

    def answer(self, body: bytes) -> None:
        path, sent = unquote(urlsplit(self.path).path), self.headers.get("Authorization") or ""
        self.store.asked.append(f"{self.command} {path}")
        if self.store.fails_with is not None:
            words = f"no: {sent}" if self.store.repeats_token else "not today"
            return self.send(self.store.fails_with, {"error": words}, {"X-Error-Message": words})
        is_known = sent == f"Bearer {TOKEN}"
        match path.strip("/").split("/"):
            case ["api", "whoami-v2"]:
                self.send(200, {"name": USER, "type": "user", "orgs": [], "auth": {}}) if is_known else self.refuse(401)
            case ["api", "validate-yaml"]:
                self.send(200, {"errors": [], "warnings": []})
            case ["api", "repos", "create"]:
                self.create(json.loads(body), is_known)
            case ["api", "models", user, model, *rest]:
                self.about(f"{user}/{model}", rest, body, is_known)
            case [user, model, "resolve", revision, *file]:
                self.file(f"{user}/{model}", revision, "/".join(file), is_known)
            case _:
                self.refuse(404)
        return None

    def create(self, wanted: dict[str, Any], is_known: bool) -> None:
        name = f"{wanted.get('organization') or USER}/{wanted['name']}"
        if not is_known:
            return self.refuse(401)
        if not name.startswith(f"{USER}/"):
            return self.send(403, {"error": "not yours"}, {"X-Error-Message": "You may not write there"})
        if name in self.store.commits:
            return self.send(409, {"error": "exists", "url": f"{self.store.url}/{name}"})
        self.store.put(name, {".gitattributes": b""})
        if wanted.get("private") or wanted.get("visibility") == "private":
            self.store.private.add(name)
        self.send(200, {"url": f"{self.store.url}/{name}", "name": name, "id": name})
        return None

    def is_there(self, name: str, is_known: bool) -> bool:
        if name in self.store.commits and (is_known or name not in self.store.private):
            return True
        self.send(404, {"error": "not found"}, {"X-Error-Code": "RepoNotFound"})
        return False

    def about(self, name: str, rest: list[str], body: bytes, is_known: bool) -> None:
        if not self.is_there(name, is_known):
            return None
        match rest:
            case ["preupload", _]:
                modes = [
                    {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                    for one in json.loads(body)["files"]
                ]
                return self.send(200, {"files": modes})
            case ["commit", _]:
                if not is_known:
                    return self.refuse(401)
                rows = [json.loads(line) for line in body.splitlines()]
                files = {
                    row["value"]["path"]: base64.b64decode(row["value"]["content"])
                    for row in rows
                    if row["key"] == "file"
                }
                sha = self.store.put(name, files)
                url = f"{self.store.url}/{name}/commit/{sha}"
                return self.send(200, {"commitUrl": url, "commitOid": sha, "success": True, "hookOutput": ""})
        revision = rest[1] if rest else "main"
        found = self.store.files(name, revision)
        if found is None:
            return self.send(404, {"error": "no revision"}, {"X-Error-Code": "RevisionNotFound"})
        sha, content = found
        if rest and rest[0] == "tree":
            rows = [{"type": "file", "path": path, "size": len(of), "oid": git_id(of)} for path, of in content.items()]
            return self.send(200, rows)
        siblings = [{"rfilename": path} for path in content]
        return self.send(200, {"id": name, "modelId": name, "sha": sha, "siblings": siblings})

    def file(self, name: str, revision: str, path: str, is_known: bool) -> None:
        if not self.is_there(name, is_known):
            return None
        found = self.store.files(name, revision)
        if found is None or path not in found[1]:
            return self.send(404, {"error": "no file"}, {"X-Error-Code": "EntryNotFound"})
        sha, content = found
        self.send(200, content[path], {"X-Repo-Commit": sha, "ETag": f'"{git_id(content[path])}"'})
        return None

    def refuse(self, code: int) -> None:
        self.send(code, {"error": "Invalid username or password."}, {"X-Error-Message": "Invalid credentials"})

    def send(self, code: int, content: Any, headers: Mapping[str, str] | None = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        self.send_header(
            "Content-Type", "application/octet-stream" if isinstance(content, bytes) else "application/json"
        )
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def git_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
