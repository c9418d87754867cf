"""A fake API server with as much as kubectl needs to create objects; it keeps what it receives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

_KINDS = {"v1": {"services": "Service", "secrets": "Secret"}, "batch/v1": {"jobs": "Job"}}
"""The supported kinds, by API group and version."""
Sent = list[tuple[str, str, dict[str, Any]]]
"""(method, path, object) of each request that changes something."""


def _path(version: str) -> str:
    return f"apis/{version}" if "/" in version else f"api/{version}"


def _known() -> dict[str, Any]:
    """Return the server's description of itself, by path."""
    group = {"version": "v1", "groupVersion": "batch/v1"}
    known: dict[str, Any] = {
        "/version": {"major": "1", "minor": "33"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {
            "kind": "APIGroupList",
            "groups": [{"name": "batch", "versions": [group], "preferredVersion": group}],
        },
        "/openapi/v3": {
            "paths": {_path(each): {"serverRelativeURL": f"/openapi/{each}"} for each in _KINDS}
        },
    }
    for version, kinds in _KINDS.items():
        known[f"/{_path(version)}"] = {
            "kind": "APIResourceList",
            "groupVersion": version,
            "resources": [
                {"name": name, "kind": kind, "namespaced": True, "verbs": ["create", "patch"]}
                for name, kind in kinds.items()
            ],
        }
        known[f"/openapi/{version}"] = {
            "openapi": "3.0.0",
            "paths": {
                f"/{name}": {
                    "patch": {
                        "parameters": [{"name": "fieldValidation", "in": "query"}],
                        "x-kubernetes-group-version-kind": {
                            "group": version.rpartition("/")[0], "version": "v1", "kind": kind,
                        },
                    }
                }
                for name, kind in kinds.items()
            },
        }  # fmt: skip
    return known


@contextmanager
def api_server() -> Iterator[tuple[str, Sent]]:
    """Serve; yield the URL and the list of what was sent."""
    known, sent = _known(), list[tuple[str, str, dict[str, Any]]]()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Print nothing."""

        def do_GET(self) -> None:
            found = known.get(self.path.partition("?")[0])
            missing = {"kind": "Status", "apiVersion": "v1", "reason": "NotFound", "code": 404}
            self._answer(200 if found else 404, found or missing)

        def do_POST(self) -> None:
            """Keep an object; its UID is its number. kubectl sends JSON as YAML too."""
            text = self.rfile.read(int(self.headers["Content-Length"]))
            made = json.loads(text)
            made["metadata"]["uid"] = f"uid-{len(sent)}"
            sent.append((self.command, self.path, made))
            self._answer(201, made)

        do_PATCH = do_POST  # noqa: N815 - the name that the server calls

        def _answer(self, status: int, answer: dict[str, Any]) -> None:
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", sent
        finally:
            server.shutdown()
            thread.join()
