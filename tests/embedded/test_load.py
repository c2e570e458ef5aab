"""Checkpoints that cannot be served are refused by name before anything starts."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longleaf.ddtree import SamplingParams
from longleaf.embedded.config import ConfigError
from longleaf.embedded.load import load_models
from longleaf.embedded.options import EngineOptions

Copy = Callable[[Path], Path]


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    """A checkpoint whose small files may be changed; the weights are linked."""

    def make(checkpoint: Path) -> Path:
        folder = tmp_path / checkpoint.name
        folder.mkdir()
        for path in checkpoint.iterdir():
            if path.suffix == ".json":
                (folder / path.name).write_bytes(path.read_bytes())
            else:
                (folder / path.name).symlink_to(path)
        return folder

    return make


def edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_a_context_longer_than_the_drafters_is_refused(
    engine_options: EngineOptions, copy: Copy
) -> None:
    """Past its last position a drafter has no rotation: the request would die in mid-answer."""
    drafter = copy(engine_options.drafter)
    edit(drafter / "config.json", max_position_embeddings=4096)
    options = replace(engine_options, drafter=drafter)
    with pytest.raises(ConfigError, match="at most the drafter's 4096, got 20480"):
        load_models(options)
    assert load_models(replace(options, context_length=4096)).info.context_length == 4096


def test_a_pool_that_no_memory_holds(engine_options: EngineOptions) -> None:
    with pytest.raises(ConfigError, match=f"max_total_tokens is {10**15}: no memory"):
        load_models(replace(engine_options, max_total_tokens=10**15))


def test_sampling_defaults_come_from_the_checkpoint(
    engine_options: EngineOptions, copy: Copy
) -> None:
    target = copy(engine_options.target)
    options = replace(engine_options, target=target)
    edit(target / "generation_config.json", temperature=0.6, top_k=20)
    assert load_models(options).sampling == SamplingParams(0.6, top_k=20)
    (target / "generation_config.json").unlink()
    assert load_models(options).sampling == SamplingParams()


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("generation_config.json", "{", "not valid JSON"),
        ("generation_config.json", '{"temperature": -1}', "temperature must be finite"),
        ("generation_config.json", '{"temperature": "hot"}', "must be real number"),
        ("tokenizer.json", "{", "EOF while parsing"),
        ("tokenizer_config.json", "[]", "must hold a JSON object"),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}', "chat_template: Expected"),
    ],
)
def test_files_that_cannot_be_read_are_named(
    engine_options: EngineOptions, copy: Copy, name: str, text: str, complaint: str
) -> None:
    target = copy(engine_options.target)
    (target / name).write_text(text)
    with pytest.raises(ConfigError, match=f"{name}: .*{complaint}"):
        load_models(replace(engine_options, target=target))
