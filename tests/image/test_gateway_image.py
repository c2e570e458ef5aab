"""The gateway's image, built for real and started as its own user."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.cluster.control_plane import eventually
from tests.cluster.processes import Stream, chat, get
from tests.serve.test_serve import free_ports

LARGEST = 250_000_000
"""Bytes of the image above its base."""
ROOT = Path(__file__).parents[2]


class Images:
    """buildah over the storage that tests/image/build.sh fills."""

    def __init__(self) -> None:
        cache = Path(os.environ.get("LONGLEAF_CACHE", Path.home() / ".cache/longleaf")) / "image"
        self._words = (
            *("buildah", "--root", str(cache / "storage"), "--runroot", str(cache / "run")),
            *("--storage-driver", "vfs"),
        )

    def __call__(self, *arguments: str) -> str:
        """Standard output of a command."""
        done = subprocess.run(
            [*self._words, *arguments], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    @contextmanager
    def running(self, container: str, *command: str) -> Iterator[subprocess.Popen[bytes]]:
        """A process of the image, with nothing of this one's environment."""
        words = [*self._words, "run", "--isolation", "chroot", container, "--", *command]
        environment = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}
        with subprocess.Popen(words, env=environment) as process:
            try:
                yield process
            finally:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(timeout=60)
                except subprocess.TimeoutExpired:
                    process.kill()


@pytest.fixture(scope="module")
def images() -> Images:
    if "LONGLEAF_GATEWAY_IMAGE" not in os.environ:
        pytest.skip("needs the gateway's image: make test-image builds it")
    return Images()


@pytest.fixture(scope="module")
def container(images: Images) -> Iterator[str]:
    name = images("from", "--pull-never", os.environ["LONGLEAF_GATEWAY_IMAGE"])
    yield name
    images("rm", name)


def test_the_image_describes_itself(images: Images) -> None:
    image = json.loads(images("inspect", "--type", "image", os.environ["LONGLEAF_GATEWAY_IMAGE"]))
    config = image["OCIv1"]["config"]
    assert config["User"] == "10001:10001"
    assert config["Entrypoint"] == ["longleaf"]
    assert config["StopSignal"] == "SIGTERM"
    labels = config["Labels"]
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert len(labels["org.opencontainers.image.revision"]) == 40
    assert not [name for name in config["Env"] if "KEY" in name or "TOKEN" in name]


def test_the_image_is_small_and_its_user_writes_nothing(images: Images, container: str) -> None:
    root = Path(images("mount", container))
    try:
        ours = root / "opt" / "longleaf"
        files = [path for path in ours.rglob("*") if path.is_file() and not path.is_symlink()]
        assert 60_000_000 < sum(path.stat().st_size for path in files) < LARGEST
        assert not [path for path in files if path.stat().st_uid == 10001]
        assert not [path for path in files if path.stat().st_mode & 0o002]
        assert not (root / "src").exists()
        # What the chart's preStop runs.
        assert (root / "usr" / "bin" / "sleep").exists()
        assert not list(ours.glob("lib/python3*/site-packages/pip/__init__.py"))
    finally:
        images("umount", container)


@pytest.fixture
def locked(images: Images, container: str) -> Iterator[tuple[str, ...]]:
    """Words before a command that run it as a pod of the chart would.

    The root is read-only but for /tmp, the user is the image's, the environment its own.
    """
    image = json.loads(images("inspect", "--type", "image", os.environ["LONGLEAF_GATEWAY_IMAGE"]))
    config = image["OCIv1"]["config"]
    root = images("mount", container)
    script = (
        'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && mount -t tmpfs tmp "$0/tmp" && '
        'mount -t proc proc "$0/proc" && mount --bind /dev "$0/dev" && user=$1 && shift && '
        'exec chroot --userspec="$user" "$0" "$@"'
    )
    try:
        yield (
            *("env", "-i", *config["Env"], "unshare", "--mount", "/bin/sh", "-ec", script, root),
            *(config["User"], *config["Entrypoint"]),
        )
    finally:
        images("umount", container)


def _ready(port: str, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None
    return get(f"http://127.0.0.1:{port}/readyz") is not None


def test_engine_and_gateway_answer_from_the_image(images: Images, container: str) -> None:
    """As uid 10001, which cannot write to what it runs."""
    engine, port, metrics = map(str, free_ports(3))
    options = ("--port", port, "--metrics-port", metrics)
    replica = f"http://127.0.0.1:{engine}"
    with (
        images.running(container, "longleaf", "embedded", "--port", engine),
        images.running(container, "longleaf", "gateway", "--replica", replica, *options) as gateway,
    ):
        eventually(lambda: _ready(port, gateway), "the gateway knows a ready engine")
        assert "1, 2, 3" in chat(f"http://127.0.0.1:{port}", model="tiny-target")
        users = {
            path.parent.stat().st_uid
            for path in Path("/proc").glob("[0-9]*/cmdline")
            if f"--port\0{port}" in _read(path) and "buildah" not in _read(path)
        }
        assert users == {10001}


def test_a_read_only_root_is_enough_and_sigterm_drains(locked: tuple[str, ...]) -> None:
    engine, port, metrics = map(str, free_ports(3))
    url = f"http://127.0.0.1:{port}"
    replica = ("--replica", f"http://127.0.0.1:{engine}")
    with ExitStack() as stack:
        model = start(stack, *locked, "embedded", "--port", engine, "--drain-seconds", "120")
        options = ("--port", port, "--metrics-port", metrics, "--drain-timeout", "120")
        gateway = start(stack, *locked, "gateway", *replica, *options)
        eventually(lambda: _ready(port, gateway), "the gateway knows a ready engine")
        root = Path(f"/proc/{gateway.pid}/root")
        assert Path(f"/proc/{gateway.pid}").stat().st_uid == 10001
        mounts = Path(f"/proc/{gateway.pid}/mounts").read_text().splitlines()
        assert [line.split()[3].split(",")[0] for line in mounts if line.split()[1] == "/"] == [
            "ro"
        ]
        assert list((root / "tmp").iterdir()) == []
        stream = Stream(url, 2500, model="tiny-target")
        assert stream.started.wait(60)
        gateway.send_signal(signal.SIGTERM)
        model.send_signal(signal.SIGTERM)
        eventually(lambda: get(f"{url}/readyz") is None, "it is no longer ready")
        assert not stream.ended.is_set()
        assert stream.ended.wait(200)
        assert stream.tokens() == 2500
        assert gateway.wait(timeout=30) == 0
        assert model.wait(timeout=30) == 0


def start(stack: ExitStack, *command: str) -> subprocess.Popen[bytes]:
    """A process that the stack ends."""
    process = stack.enter_context(subprocess.Popen(command))
    stack.callback(process.kill)
    return process


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
