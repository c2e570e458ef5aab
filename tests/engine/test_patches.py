from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from longleaf.engine.drift import DriftError, source_sha256
from longleaf.engine.patches import Patch, apply_all, load_patches


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    package = tmp_path / "patchpackage"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "leaf.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "patchpackage.leaf"


def make(number: int, module: str, apply: Callable[[], None], sha256: str | None = None) -> Patch:
    digest = source_sha256(module) if sha256 is None else sha256
    return Patch(number, f"n{number}", "because", module, digest, apply)


def test_patches_apply_by_number(module: str) -> None:
    applied: list[int] = []
    patches = [
        make(2, module, lambda: applied.append(2)),
        make(1, module, lambda: applied.append(1)),
    ]
    assert [patch.number for patch in apply_all(patches)] == [1, 2]
    assert applied == [1, 2]


def test_one_drifted_file_means_no_patch_at_all(module: str) -> None:
    applied: list[int] = []
    patches = [
        make(1, module, lambda: applied.append(1)),
        make(2, module, lambda: applied.append(2), sha256="0" * 64),
    ]
    with pytest.raises(DriftError, match=r"patch 2 \(n2\) expects .*; fix: install sglang==0"):
        apply_all(patches)
    assert applied == []


def test_ours_are_numbered_and_say_why() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("sglang")
    for patch in load_patches():
        assert patch.module.startswith("sglang.")
        assert len(patch.why) > 20


@pytest.mark.usefixtures("sglang")
def test_every_patch_of_ours_applies_to_the_wheel_twice() -> None:
    pytest.importorskip("torch")
    patches = apply_all()
    assert [patch.number for patch in patches] == [patch.number for patch in load_patches()]
    apply_all()


@pytest.mark.usefixtures("sglang")
@pytest.mark.parametrize("overlap", [False, True])
def test_trees_give_log_probabilities_and_no_hidden_states(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step keeps no hidden states: SGLang would leave them out of the answer in silence."""
    pytest.importorskip("torch")
    from sglang.srt import runtime_context
    from sglang.srt.speculative import dflash_utils

    apply_all()
    spec = SimpleNamespace(speculative_algorithm="DDTREE")
    monkeypatch.setattr(runtime_context, "get_spec", lambda: spec)

    def answer(**asked: bool) -> str | None:
        request = SimpleNamespace(
            **{"return_logprob": False, "return_hidden_states": False} | asked
        )
        found: str | None = dflash_utils.validate_dflash_request(request, overlap)
        return found

    assert answer(return_logprob=True) is None
    assert answer(return_hidden_states=True) == (
        "DDTREE speculative decoding does not support return_hidden_states."
    )
    spec.speculative_algorithm = "DFLASH"
    assert "return_logprob" in (answer(return_logprob=True) or "")


@pytest.mark.usefixtures("sglang")
def test_a_drift_under_every_patch_of_ours_is_caught() -> None:
    pytest.importorskip("torch")
    for patch in load_patches():
        planted = Patch(patch.number, patch.name, patch.why, patch.module, "f" * 64, pytest.fail)
        with pytest.raises(DriftError, match=f"patch {patch.number} "):
            apply_all([planted])
