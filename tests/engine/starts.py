"""Starts of a process that has SGLang: one imports it, and forks for each start that is asked for.

Importing SGLang takes ten seconds; every start is still a process of its own, in which neither our
plugin nor any other has been loaded.
"""

import json
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Start:
    """How a start ended."""

    returncode: int
    stdout: str
    stderr: str


class Starts:
    """The process that forks; leaving the context ends it."""

    def __init__(self) -> None:
        places = [str(ROOT), str(ROOT / "service"), str(ROOT / "kernels")]
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.engine.starts"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, code: str, path: Path, **environment: str) -> Start:
        """Run code in a process of its own, with a folder before everything else on its path."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        job = {"code": code, "path": str(path), "environment": environment}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process that forks has ended"
        return Start(**json.loads(answer))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


def _serve() -> None:
    """Import SGLang, and fork for each line of standard input."""
    warnings.simplefilter("ignore")
    from tests.engine import stubs

    stubs.install()
    from longleaf.engine import pins

    for module in ("sglang.srt.entrypoints.http_server", *pins.SIGNATURES):
        import_module(module)
    for line in sys.stdin:
        job = json.loads(line)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            child = os.fork()
            if child == 0:
                _become(job, out.fileno(), err.fileno())
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode())
        print(json.dumps(dict(zip(Start.__slots__, (status, *texts), strict=True))), flush=True)


def _become(job: dict[str, object], out: int, err: int) -> None:
    os.dup2(out, 1)
    os.dup2(err, 2)
    environment = job["environment"]
    assert isinstance(environment, dict)
    os.environ.update(environment)
    sys.path.insert(0, str(job["path"]))
    code = 0
    try:
        exec(compile(str(job["code"]), "<start>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
