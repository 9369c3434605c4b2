"""A stand-in for W&B's server that keeps the history of one run, as `wandb sync` sends it.

It answers the few requests that wandb 0.31 makes. What it keeps is what the real server is given; how that
server shows it is not known here.
"""

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Line = dict[str, Any]


class _Server(ThreadingHTTPServer):
    """`history` has the lines of the run's history, and `offsets` says where each upload of some began."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.history: list[Line] = []
        self.offsets: list[int] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, operation: str, variables: Line) -> Line:
        project = {"id": "p", "name": "p", "entity": {"id": "e", "name": "e"}}
        lines = len(self.history)
        if operation == "UpsertBucket":
            bucket = {"id": "r", "name": variables["name"], "displayName": "run", "project": project}
            return {"upsertBucket": {"bucket": {**bucket, "historyLineCount": lines}, "inserted": not lines}}
        if operation == "RunResumeStatus":
            return {"model": {**project, "bucket": self._bucket(variables["name"]) if lines else None}}
        if operation == "CreateRunFiles":
            files = [{"name": name, "uploadUrl": f"{self.url}/file"} for name in variables["files"]]
            return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}
        viewer = {"id": "u", "entity": "e", "username": "u", "flags": "{}", "teams": {"edges": []}}
        versions = {
            "cliVersionInfo": {"max_cli_version": "1"},
            "latestLocalVersionInfo": None,
            "features": [],
        }
        return {"viewer": viewer, "serverInfo": versions}

    def _bucket(self, name: str) -> Line:
        newest = json.dumps({"_step": max(line["_step"] for line in self.history)})
        counts = {"historyLineCount": len(self.history), "eventsLineCount": 0, "logLineCount": 0}
        tails = {"historyTail": json.dumps([newest]), "eventsTail": "[]", "summaryMetrics": newest}
        rest = {"id": "r", "name": name, "displayName": "run", "config": "{}", "tags": [], "notes": None}
        return {**counts, **tails, **rest, "wandbConfig": json.dumps({"t": 1})}

    def take(self, files: Line) -> None:
        for name, chunk in files.items():
            if name == "wandb-history.jsonl":
                offset, lines = chunk["offset"], [json.loads(line) for line in chunk["content"]]
                self.history[offset : offset + len(lines)] = lines
                self.offsets.append(offset)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        """Nothing is printed."""

    def do_GET(self) -> None:
        self._reply({})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        if self.path.endswith("/graphql"):
            asked = json.loads(body)
            self._reply(
                {"data": self.server.answer(asked.get("operationName"), asked.get("variables") or {})}
            )
            return
        if self.path.endswith("/file_stream"):
            self.server.take(json.loads(body).get("files") or {})
        self._reply({})

    do_PUT = do_POST

    def _reply(self, value: Line) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def wandb_server() -> Iterator[_Server]:
    """A server on a port of its own, in another thread."""
    with _Server() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
