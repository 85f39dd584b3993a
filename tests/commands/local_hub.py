"""A model hub on this machine, as far as pushing and fetching need it: commits of whole repositories, kept in memory.

The wire format is huggingface_hub's (2.x and 1.x): what it asks for and this does not know is a 501, not a silence.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_stand_in"
MODEL = r"/api/models/(?P<name>[\w.-]+/[\w.-]+)"


@dataclass
class Repository:
    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)  # oid -> files, oldest first

    def commit(self, files: dict[str, bytes]) -> str:
        """All files of the newest commit with these; returns the oid."""
        newest = list(self.commits.values())[-1] if self.commits else {}
        oid = hashlib.sha1(f"{len(self.commits)}".encode()).hexdigest()
        self.commits[oid] = {**newest, **files}
        return oid

    def oid(self, revision: str) -> str | None:
        if revision == "main":
            return next(reversed(self.commits), None)
        return revision if revision in self.commits else None


class LocalHub(ThreadingHTTPServer):
    """repositories: by name. asked: every request's method and path."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.asked: list[tuple[str, str]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: LocalHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_args) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append((self.command, path))
        if self.command == "POST" and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._send(401, {"error": "Invalid username or password."})
        for pattern, reply in ROUTES:
            found = re.fullmatch(pattern, path)
            if found:
                return reply(self, body, **found.groupdict())
        return self._send(501, {"error": f"the stand-in has no {self.command} {path}"})

    def _send(self, status: int, content: object, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}"
        if name in self.server.repositories:
            return self._send(409, {"error": "exists", "url": f"{self.server.url}/{name}"})
        # huggingface_hub says `private`, or `visibility` in later versions.
        private = bool(asked.get("private")) or asked.get("visibility") == "private"
        self.server.repositories[name] = Repository(private)
        return self._send(200, {"url": f"{self.server.url}/{name}"})

    def check_card(self, body: bytes) -> None:
        self._send(200, {"errors": [], "warnings": []})

    def preupload(self, body: bytes, name: str) -> None:
        files = [
            {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in json.loads(body)["files"]
        ]
        self._send(200, {"files": files})

    def commit(self, body: bytes, name: str) -> None:
        lines = [json.loads(line) for line in body.splitlines() if line.strip()]
        files = {
            line["value"]["path"]: base64.b64decode(line["value"]["content"]) for line in lines if line["key"] == "file"
        }
        oid = self.server.repositories[name].commit(files)
        self._send(200, {"success": True, "commitOid": oid, "commitUrl": f"{self.server.url}/{name}/commit/{oid}"})

    def info(self, body: bytes, name: str, revision: str = "main") -> None:
        repository = self.server.repositories.get(name)
        oid = repository.oid(revision) if repository else None
        if repository is None or (oid is None and repository.commits):
            return self._send(
                404, {"error": "not found"}, X_Error_Code="RevisionNotFound" if repository else "RepoNotFound"
            )
        files = [{"rfilename": path} for path in repository.commits.get(oid or "", {})]
        return self._send(200, {"id": name, "private": repository.private, "sha": oid, "siblings": files})

    def tree(self, body: bytes, name: str, revision: str) -> None:
        repository = self.server.repositories[name]
        files = repository.commits[repository.oid(revision) or ""]
        entries = [{"type": "file", "path": path, "size": len(data), "oid": "0"} for path, data in files.items()]
        self._send(200, entries)

    def resolve(self, body: bytes, name: str, revision: str, path: str) -> None:
        repository = self.server.repositories.get(name)
        oid = repository.oid(revision) if repository else None
        if repository is None or oid is None:
            code = "RevisionNotFound" if repository else "RepoNotFound"
            return self._send(404, b"", X_Error_Code=code)
        data = repository.commits[oid].get(path)
        if data is None:
            return self._send(404, b"", X_Error_Code="EntryNotFound", X_Repo_Commit=oid)
        return self._send(200, data, ETag=f'"{hashlib.sha1(data).hexdigest()}"', X_Repo_Commit=oid)


ROUTES = (
    (r"/api/repos/create", _Handler.create),
    (r"/api/validate-yaml", _Handler.check_card),
    (MODEL + r"/preupload/main", _Handler.preupload),
    (MODEL + r"/commit/main", _Handler.commit),
    (MODEL + r"/tree/(?P<revision>[^/]+)", _Handler.tree),
    (MODEL + r"/revision/(?P<revision>[^/]+)", _Handler.info),
    (MODEL, _Handler.info),
    (r"/(?P<name>[\w.-]+/[\w.-]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)", _Handler.resolve),
)
