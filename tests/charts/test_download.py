"""The init container that fetches models: its script, by the hub's own client, from a local hub."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.charts.rendering import Rendered, container, environment

FILES = {"config.json": b'{"a": 1}', "model-1.safetensors": b"weights" * 1000}


@contextmanager
def hub() -> Iterator[tuple[str, list[tuple[str, str, str | None]]]]:
    """A hub whose every repository has FILES; its URL, and method, path and key of requests."""
    asked: list[tuple[str, str, str | None]] = []

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            path = self.path.partition("?")[0]
            asked.append((self.command, path, self.headers.get("authorization")))
            revision = path.split("/")[-1 if path.startswith("/api/") else 4]
            if "/tree/" in path:
                entries = [
                    {"type": "file", "path": name, "size": len(data), "oid": f"{len(data):040x}"}
                    for name, data in FILES.items()
                ]
                body = json.dumps(entries).encode()
            elif path.startswith("/api/"):
                siblings = [{"rfilename": name} for name in FILES]
                body = json.dumps({"id": "r", "sha": revision, "siblings": siblings}).encode()
            else:
                body = FILES[path.rpartition("/")[2]]
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.send_header("x-repo-commit", revision)
            self.send_header("etag", f'"{hash(body) & (1 << 64) - 1:040x}"')
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_GET = do_HEAD = _answer  # noqa: N815

        def log_message(self, format: str, *words: object) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_models_are_fetched_at_their_revisions_and_once(full: Rendered, tmp_path: Path) -> None:
    python = os.environ.get("LONGLEAF_ENGINE_PYTHON")
    if python is None:
        pytest.skip("needs the hub's client: make test-chart installs it")
    download = container(full.engine, "download")
    assert environment(download)["HF_TOKEN"]["secretKeyRef"]["name"] == "hub"
    models = tmp_path / "models"
    script = download["args"][0].replace("/models/", f"{models}/")
    with hub() as (url, asked):
        for _ in range(2):
            done = subprocess.run(
                [*download["command"], script],
                env={
                    "PATH": f"{Path(python).parent}:{os.environ['PATH']}",
                    "HOME": str(tmp_path / "home"),
                    "HF_ENDPOINT": url,
                    "HF_TOKEN": "a-token",
                },
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, (done.stderr, asked)
    for name in ("target", "drafter"):
        found = {
            path.name: path.read_bytes() for path in (models / name).iterdir() if path.is_file()
        }
        assert found == FILES
    fetched = [path for method, path, _ in asked if method == "GET" and "/resolve/" in path]
    assert sorted(fetched) == sorted(
        f"/{repository}/resolve/{revision}/{name}"
        for repository, revision in (
            ("moonshotai/Kimi-K2.6", "0123456789abcdef0123456789abcdef01234567"),
            ("example/Kimi-K2.6-DFlash", "89abcdef0123456789abcdef0123456789abcdef"),
        )
        for name in FILES
    )
    keys = {key for _, path, key in asked if "/Kimi-K2.6" in path}
    assert keys == {"Bearer a-token"}, asked


def test_a_download_ends_at_once_as_first_process_of_its_container(
    full: Rendered, tmp_path: Path
) -> None:
    download = container(full.engine, "download")
    began, stays = tmp_path / "began", tmp_path / "stays"
    fetcher = tmp_path / "hf"
    fetcher.write_text(f"#!/bin/sh\ntouch {began}; sleep 3; touch {stays}\n")
    fetcher.chmod(0o755)
    contained = ("unshare", "--map-root-user", "--user", "--pid", "--fork")
    if subprocess.run([*contained, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("needs namespaces of processes")
    with subprocess.Popen(
        [*contained, *download["command"], download["args"][0]],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
    ) as process:
        try:
            deadline = time.monotonic() + 20
            while not began.exists():
                assert time.monotonic() < deadline
                time.sleep(0.02)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            os.kill(int(children), signal.SIGTERM)
            assert process.wait(timeout=20) == 143
        finally:
            process.kill()
    assert not stays.exists()
