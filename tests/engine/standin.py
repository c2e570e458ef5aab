"""A small HTTP server in place of SGLang, which cannot serve without a GPU: real process, real
sockets. ``--mode`` says how it misbehaves; every request it gets is a line of its ``--log``.
"""

import argparse
import json
import signal
import socket
import ssl
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--mode", default="good")
    parser.add_argument("--grammar", default="xgrammar")
    parser.add_argument("--certificate", help="PEM of certificate and key: speak https")
    parser.add_argument("--url", help="told to the launcher by its check, of no use here")
    parser.add_argument("--host", default="127.0.0.1")
    options = parser.parse_args()
    print("standin: loading weights", flush=True)
    if options.mode == "dies":
        print("standin: CUDA out of memory", file=sys.stderr, flush=True)
        return 7
    if options.mode == "hangs":
        signal.pause()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

        def _answer(self, status: int, body: object) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            with options.log.open("a") as log:
                log.write(json.dumps({"get": self.path}) + "\n")
            info = {"grammar_backend": options.grammar}
            self._answer(200, info if self.path == "/server_info" else {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            body["authorization"] = self.headers["Authorization"]
            with options.log.open("a") as log:
                log.write(json.dumps(body) + "\n")
            if options.mode == "refuses":
                self._answer(500, {"error": "no kernel image"})
                return
            if options.mode == "dies-warming":
                print("standin: scheduler died", flush=True)
                threading.Thread(target=server.shutdown).start()
                time.sleep(30)
            self._answer(200, {"text": ""})

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in options.host else socket.AF_INET

    server = Server((options.host, options.port), Handler)
    if options.certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(options.certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    server.daemon_threads = True
    server.block_on_close = False

    def drain(number: int, frame: object) -> None:
        print("standin: draining", flush=True)
        threading.Thread(target=server.shutdown).start()

    signal.signal(signal.SIGTERM, drain)
    signal.signal(signal.SIGINT, drain)
    if options.mode == "dies-later":
        threading.Timer(1.5, server.shutdown).start()
    server.serve_forever()
    return 9 if options.mode.startswith("dies") else 0


if __name__ == "__main__":
    sys.exit(main())
