"""Serves text expositions from files at /metrics.

``python -m ops.observe.replay --port 9400 FILE…``. Files are read at every scrape, so what writes
one (a probe's ``--textfile``) is seen at the next.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import click

_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Handler(BaseHTTPRequestHandler):
    files: tuple[Path, ...] = ()

    def do_GET(self) -> None:
        """Answer a scrape."""
        if self.path != "/metrics":
            self.send_error(404)
            return
        body = b"".join(path.read_bytes() for path in self.files if path.exists())
        self.send_response(200)
        self.send_header("Content-Type", _CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Scrapes are not worth a line each."""


@contextmanager
def replaying(*files: Path, port: int = 0) -> Iterator[int]:
    """Serve ``files`` on 127.0.0.1 while the context lasts; gives the port."""
    handler = type("Handler", (_Handler,), {"files": files})
    with ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield int(server.server_address[1])
        finally:
            server.shutdown()
            thread.join()


@click.command()
@click.option("--port", default=9400, show_default=True)
@click.argument(
    "files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
def main(port: int, files: tuple[Path, ...]) -> None:
    """Serve FILES at http://127.0.0.1:PORT/metrics until Ctrl-C."""
    with replaying(*files, port=port) as found:
        click.echo(f"http://127.0.0.1:{found}/metrics")
        click.pause("")


if __name__ == "__main__":
    main()
