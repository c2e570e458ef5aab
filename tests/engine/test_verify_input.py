"""The verify input: a node's position is prefix + depth, its bits are its ancestors and itself."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tests.engine.emulated")  # SGLang's stubs come before SGLang

from longleaf.engine.verify_input import RootTrees, verify_input, visible_words  # noqa: E402
from tests.engine.emulated import EngineKernels, emulated_library, kernels  # noqa: E402, F401


@pytest.mark.parametrize("nodes", [2, 16, 64, 65, 128])
def test_positions_and_bits_are_the_trees(kernels: EngineKernels, nodes: int) -> None:  # noqa: F811
    generator = torch.Generator().manual_seed(nodes)
    log_probs = torch.rand(3, 7, 127, generator=generator, dtype=torch.float64).log()
    log_probs = log_probs.sort(dim=2, descending=True).values
    tokens = torch.arange(127).expand(3, 7, 127).contiguous()
    prefix_lens = torch.tensor([0, 5, 185_000])
    trees = kernels.expand(tokens, log_probs, torch.arange(3), nodes - 1, True, prefix_lens)
    spec = verify_input(trees)
    assert spec.draft_token_num == spec.num_tokens_per_req == nodes
    assert spec.custom_mask is None
    assert spec.is_verify_input()
    assert spec.visible is not None
    assert spec.visible.shape == (3, nodes, visible_words(nodes))
    positions = spec.positions.view(3, nodes)
    assert torch.equal(positions, prefix_lens[:, None] + trees.depths)
    for request in range(3):
        for node in range(nodes):
            words = spec.visible[request, node].tolist()
            seen = {j for j in range(nodes) if words[j // 64] >> (j % 64) & 1}
            line, at = {node}, int(trees.parents[request, node])
            while at >= 0:
                line.add(at)
                at = int(trees.parents[request, at])
            assert seen == line


def test_a_root_is_a_tree_that_sees_itself() -> None:
    roots = RootTrees(1, "cpu")
    trees = roots(torch.tensor([4, 5, 6]), torch.tensor([7, 8, 9]))
    spec = verify_input(trees)
    assert spec.draft_token.tolist() == [4, 5, 6]
    assert spec.positions.tolist() == [7, 8, 9]
    assert spec.draft_token_num == 1
    assert trees.visible.view(-1).tolist() == [1, 1, 1]
    assert trees.parents.view(-1).tolist() == [-1, -1, -1]
