"""A small Hugging Face hub: the routes that its library uses to download a model and to push one."""

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_secretofatest"
_RESOLVE = re.compile(r"/([\w.-]+/[\w.-]+)/resolve/[^/]+/(.+)")
_API = re.compile(r"/api/models/([\w.-]+/[\w.-]+)/(revision|tree|preupload|commit)/([\w.-]+)")


@dataclass
class Hub:
    """Models by name, as files; those of `closed` need TOKEN. `cut` names a file whose first download breaks.

    `requests` has a line per request, such as "GET /api/models/org/name/revision/main".
    """

    models: dict[str, dict[str, bytes]] = field(default_factory=dict)
    closed: set[str] = field(default_factory=set)
    cut: str | None = None
    requests: list[str] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)
    endpoint: str = ""

    def put(self, name: str, directory: Path) -> None:
        """Publish the files of a directory."""
        self.models[name] = {path.name: path.read_bytes() for path in directory.iterdir()}

    def environment(self, cache: Path, **more: str) -> dict[str, str]:
        """The variables with which the library asks this hub."""
        return {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", **more}


@contextlib.contextmanager
def hub_server() -> Iterator[Hub]:
    """Serve a hub without models."""
    hub = Hub()

    class Handler(_Handler):
        of = hub

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.endpoint = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield hub
        server.shutdown()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    of: Hub

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def log_message(self, *words: object) -> None:
        pass

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urlparse(self.path).path
        self.of.requests.append(f"{self.command} {path}")
        if path == "/api/repos/create":
            self._create(json.loads(body))
        elif found := _API.fullmatch(path):
            self._api(found[1], found[2], found[3], body)
        elif found := _RESOLVE.fullmatch(path):
            self._file(found[1], found[2])
        else:
            self._json({"error": "no such route"}, 404)

    def _readable(self, name: str) -> bool:
        if name not in self.of.models or (name in self.of.closed and not self._has_token()):
            self._json({"error": "Repository not found"}, 401, {"X-Error-Code": "RepoNotFound"})
            return False
        return True

    def _has_token(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _create(self, asked: dict) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        if not self._has_token():
            self._json({"error": "Invalid username or password."}, 401)
        else:
            assert asked.get("private") or asked.get("visibility") == "private", asked
            self.of.closed.add(name)
            self.of.models.setdefault(name, {})
            self._json({"url": f"{self.of.endpoint}/{name}"})

    def _api(self, name: str, what: str, revision: str, body: bytes) -> None:
        if not self._readable(name):
            return
        files = self.of.models[name]
        if what == "revision" and revision not in ("main", COMMIT):
            self._json({"error": "Revision not found"}, 404, {"X-Error-Code": "RevisionNotFound"})
        elif what == "revision":
            self._json({"id": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]})
        elif what == "tree":
            self._json(
                [
                    {"type": "file", "path": file, "size": len(text), "oid": _digest(text)}
                    for file, text in files.items()
                ]
            )
        elif what == "preupload":
            asked = [file["path"] for file in json.loads(body)["files"]]
            ways = [{"path": file, "uploadMode": "regular", "shouldIgnore": False} for file in asked]
            self._json({"files": ways})
        else:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            url = f"{self.of.endpoint}/{name}/commit/{COMMIT}"
            self._json({"commitUrl": url, "commitOid": COMMIT, "success": True})

    def _file(self, name: str, file: str) -> None:
        if not self._readable(name):
            return
        content = self.of.models[name].get(file)
        if content is None:
            self._json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        first = 0
        if wanted := self.headers.get("Range"):
            self.of.ranges.append(f"{file} {wanted}")
            first = int(re.match(r"bytes=(\d+)-", wanted)[1])
        self.send_response(206 if wanted else 200)
        self.send_header("ETag", f'"{_digest(content)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(content) - first))
        if wanted:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "GET" and self.of.cut == file:
            self.wfile.write(content[first : first + len(content) // 2])
            self.close_connection = True
        elif self.command == "GET":
            self.wfile.write(content[first:])

    def _json(self, value: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        text = json.dumps(value).encode()
        self.send_response(status)
        for name, said in {"Content-Length": str(len(text)), **(headers or {})}.items():
            self.send_header(name, said)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
