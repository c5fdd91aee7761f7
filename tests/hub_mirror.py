"""A model hub on loopback, as far as huggingface_hub asks: repository info, file tree, files with ranges.

Its faults are switches on the repository. One thread per connection; tests read `requests` when it is idle.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "c0ffee" * 6 + "beef"


@dataclass
class Repository:
    """Files by path, and what goes wrong with them."""

    files: dict[str, bytes]
    gated: bool = False
    revisions: tuple[str, ...] = ("main", COMMIT)
    broken_files: set[str] = field(default_factory=set)  # answered with status 410, which is not retried
    cut_once_at_bytes: dict[str, int] = field(default_factory=dict)  # the connection drops there, one time


@dataclass
class Mirror:
    url: str
    repositories: dict[str, Repository]
    requests: list[tuple[str, str, str]]  # method, path, Range

    def downloads(self, filename: str) -> list[str]:
        """The Range header of each GET of the file's bytes."""
        return [r for method, path, r in self.requests if method == "GET" and path.endswith(f"/{filename}")]


@contextmanager
def running_mirror(repositories: dict[str, Repository]) -> Iterator[Mirror]:
    """Serves `repositories` ("org/name" -> Repository) until the block ends."""
    requests: list[tuple[str, str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer()

        def do_HEAD(self) -> None:
            self.answer()

        def answer(self) -> None:
            path = self.path.partition("?")[0].strip("/")
            requests.append((self.command, path, self.headers.get("Range", "")))
            parts = path.removeprefix("api/models/").split("/")
            name, rest = "/".join(parts[:2]), parts[2:]
            repository = repositories.get(name)
            revision = rest[1] if len(rest) > 1 else "main"
            if repository is None:
                self.fault(401, "RepoNotFound" if self.headers.get("Authorization") else "")
            elif revision not in repository.revisions:
                self.fault(404, "RevisionNotFound")
            elif not path.startswith("api/models/"):
                self.send_file(repository, "/".join(rest[2:]))
            elif rest[:1] == ["tree"]:
                self.send_json([tree_entry(path, data) for path, data in repository.files.items()])
            else:
                siblings = [{"rfilename": p, "size": len(d)} for p, d in repository.files.items()]
                self.send_json({"id": name, "sha": COMMIT, "siblings": siblings, "gated": repository.gated})

        def send_file(self, repository: Repository, filename: str) -> None:
            if repository.gated:
                return self.fault(403, "GatedRepo")
            if filename in repository.broken_files:
                return self.fault(410, "")
            data = repository.files[filename]
            asked = self.headers.get("Range", "")
            start = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
            self.send_response(206 if asked else 200)
            self.send_header("Content-Length", str(len(data) - start))
            if asked:
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if self.command == "HEAD":
                return None
            cut = repository.cut_once_at_bytes.pop(filename, None)
            self.wfile.write(data[start:cut])
            if cut is not None:
                self.close_connection = True
            return None

        def send_json(self, value: object) -> None:
            body = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def fault(self, status: int, code: str) -> None:
            self.send_response(status)
            if code:
                self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Not printed: `requests` keeps what matters."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield Mirror(f"http://127.0.0.1:{server.server_address[1]}", repositories, requests)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def tree_entry(path: str, data: bytes) -> dict[str, object]:
    return {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
