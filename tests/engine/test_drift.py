import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longleaf.engine.drift import DriftError, signature, source_path, source_sha256


def plain(self: Any, bs: int, is_draft: bool = False) -> None: ...
def keyed(a: int, *, b: int = 1, **more: int) -> None: ...
def starred(*rows: int, last: int) -> None: ...


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (plain, "(self, bs, is_draft=)"),
        (keyed, "(a, *, b=, **more)"),
        (starred, "(*rows, last)"),
    ],
)
def test_a_signature_is_names_kinds_and_defaults(
    function: Callable[..., Any], expected: str
) -> None:
    assert signature(function) == expected


def test_a_file_is_found_and_hashed_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "driftpackage"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "inner" / "__init__.py").write_text("")
    (package / "inner" / "leaf.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert source_path("driftpackage") == package / "__init__.py"
    assert source_path("driftpackage.inner") == package / "inner" / "__init__.py"
    before = source_sha256("driftpackage.inner.leaf")
    assert before == hashlib.sha256(b"x = 1\n").hexdigest()
    (package / "inner" / "leaf.py").write_text("x = 2\n")
    assert source_sha256("driftpackage.inner.leaf") != before
    with pytest.raises(DriftError, match=r"driftpackage\.gone does not exist"):
        source_path("driftpackage.gone")
    with pytest.raises(DriftError, match="no_such_package is not installed"):
        source_path("no_such_package.x")
