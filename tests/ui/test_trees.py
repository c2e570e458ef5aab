"""Draft trees: read, laid out, drawn."""

import json
import math
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from longleaf.ui.trees import DraftTree, draw, layout, read_trees

TOLD: dict[str, Any] = {
    "time": 5.0,
    "context": 1024,
    "parents": [-1, 0, 0, 1, 1, 3],
    "log_probs": [0.0, -0.1, -2.3, -0.2, -1.9, -0.3],
    "path": [0, 1, 3],
}


def told(**changes: Any) -> bytes:
    return json.dumps({"trees": [{**TOLD, **changes}]}).encode()


def test_a_parent_is_in_the_middle_of_its_children_and_no_two_nodes_meet() -> None:
    places = layout(TOLD["parents"])
    assert places == [(0, 1.25), (1, 0.5), (1, 2.0), (2, 0.0), (2, 1.0), (3, 0.0)]
    assert layout([-1]) == [(0, 0.0)]


def test_the_accepted_path_is_drawn_as_such() -> None:
    (tree,) = read_trees(told())
    assert (tree.context, tree.commit_len) == (1024, 3)
    svg = ElementTree.fromstring(draw(tree))
    nodes = [one.get("class") for one in svg.iter("circle")]
    assert nodes == [*["node accepted"] * 2, "node", "node accepted", "node", "node"]
    edges = [one.get("class") for one in svg.iter("path")]
    assert edges == ["edge", "edge", "edge", "edge accepted", "edge accepted"]
    titles = [one.text for one in svg.iter("title")]
    assert titles[3] == "prefix probability 0.819, accepted"
    assert [one.text for one in svg.iter("text")][1:3] == [".90", ".10"]


def test_text_is_shown_where_the_engine_tells_it_and_escaped() -> None:
    texts = ["a", "<b>", " c", "&", '"', "é"]
    svg = draw(read_trees(told(texts=texts))[0])
    drawn = [one.text for one in ElementTree.fromstring(svg).iter("text")]
    assert drawn == ["a", "<b>", "\N{MIDDLE DOT}c", "&", '"', "é"]
    assert "<b>" not in svg


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"parents": [-1, 0, 0, 4, 1, 3]}, "parent of each node"),
        ({"parents": [0, 0, 0, 1, 1, 3]}, "parent of each node"),
        ({"parents": [], "log_probs": []}, "1 to 512 nodes"),
        ({"log_probs": [0.0]}, "a probability of each"),
        ({"path": [1, 3]}, "begins at the root"),
        ({"path": [0, 9]}, "stays in the tree"),
        ({"path": [0, 3]}, "child of the one before"),
        ({"texts": ["a"]}, "each node has a text"),
        ({"context": None}, "mistypes a field"),
        ({"time": {}}, "mistypes a field"),
        ({"context": math.inf}, "mistypes a field"),
        ({"time": math.nan}, "are numbers"),
        ({"log_probs": [0.0, -0.1, -2.3, -0.2, -1.9, math.nan]}, "are numbers"),
    ],
)
def test_what_is_no_tree_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_trees(told(**changes))


@pytest.mark.parametrize("text", [b"{}", b"[]", b'{"trees": 1}', b'{"trees": [1]}', b"<html>"])
def test_what_is_no_answer_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"list 'trees'|field|Expecting"):
        read_trees(text)


def test_a_probability_is_never_above_one() -> None:
    tree = DraftTree(1.0, 1, (-1,), (1.0,), (0,))
    assert "1 nodes, 0 drafts accepted" in draw(tree)
    assert read_trees(told(log_probs=[1.0] * 6))[0].probabilities == (1.0,) * 6


def test_long_texts_are_cut_and_the_newest_trees_kept() -> None:
    texts = ["a" * 1_000_000, "b" * 40, "c", "d", "e", "f"]
    (tree,) = read_trees(told(texts=texts))
    assert tree.texts is not None
    assert tree.texts[:2] == ("a" * 39 + "\N{HORIZONTAL ELLIPSIS}", "b" * 40)
    many = json.dumps({"trees": [{**TOLD, "time": float(n)} for n in range(5)]}).encode()
    assert [tree.time for tree in read_trees(many, most=2)] == [3.0, 4.0]
