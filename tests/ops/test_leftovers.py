import socket
import subprocess
import sys

import click
import pytest

from ops.bench.leftovers import check_free

_RUN = """
import time
from contextlib import contextmanager
from ops.bench.leftovers import unwind_on_sigterm

@contextmanager
def stack():
    try:
        yield
    finally:
        print("ended", flush=True)

unwind_on_sigterm()
with stack():
    print("up", flush=True)
    time.sleep(60)
"""


def test_a_stack_of_another_run_is_not_measured() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(click.ClickException, match=f"port {port} is taken"):
            check_free([port])
    check_free([port])


def test_a_run_that_is_told_to_end_ends_what_it_started() -> None:
    with subprocess.Popen([sys.executable, "-c", _RUN], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "up\n"
        run.terminate()
        assert run.stdout.read() == "ended\n"
    assert run.returncode == 143
