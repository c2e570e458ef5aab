"""Rows of the page that need no browser."""

import re

import pytest

from longleaf.ui.page import render
from longleaf.ui.samples import Histogram
from longleaf.ui.state import ReplicaView, View


def page_of(pool: dict[str, float], capacity: float | None) -> str:
    replica = ReplicaView("http://<a>", "ready", 0, pool, None, None, capacity)
    wait = Histogram((), (), 0.0)
    return render(View(0.0, [replica], {}, 0.0, wait, [], [], None))


@pytest.mark.parametrize(
    ("pool", "capacity", "label"),
    [
        ({"used": 10.0, "cached": 40.0, "free": 50.0}, None, "50% full"),
        ({"free": 25.0}, 100.0, "75% full"),  # SGLang
        ({"free": 25.0}, None, None),
        ({}, 100.0, None),
        ({"free": 110.0}, 100.0, "0% full"),
        ({"used": 10.0, "cached": 40.0, "free": -50.0}, None, None),
        ({"free": -25.0}, 100.0, None),
    ],
)
def test_a_pool_is_as_full_as_is_known(
    pool: dict[str, float], capacity: float | None, label: str | None
) -> None:
    text = page_of(pool, capacity)
    found = re.findall(r'<svg class=pool [^>]*aria-label="([^"]*)"', text)
    assert found == ([] if label is None else [label])
    assert "not told" in text
    assert "http://&lt;a&gt;" in text
