"""Who sees whom in the tree block: ancestors and self. The prefix needs no mask."""

import numpy as np
import numpy.typing as npt

from longleaf.ddtree.tree import Tree

WORD_BITS = 64


def ancestor_bits(tree: Tree) -> npt.NDArray[np.uint64]:
    """Return which nodes each node sees, uint64[n, ceil(n / 64)].

    Bit j % 64 (value 1 << (j % 64)) of word j // 64 in row i is set iff node j is node i or an
    ancestor of it. Bits from n on are zero.
    """
    n = len(tree)
    words = -(-n // WORD_BITS)
    closures: list[int] = []
    for node, parent in enumerate(tree.parents.tolist()):
        closures.append((closures[parent] if parent >= 0 else 0) | 1 << node)
    packed = b"".join(closure.to_bytes(words * WORD_BITS // 8, "little") for closure in closures)
    return np.frombuffer(packed, dtype="<u8").reshape(n, words).astype(np.uint64)


def dense_mask(bits: npt.NDArray[np.uint64], n: int) -> npt.NDArray[np.bool_]:
    """Unpack `ancestor_bits` of an n-node tree into bool[n, n]: [query node, key node]."""
    expected = (n, -(-n // WORD_BITS))
    if bits.shape != expected or bits.dtype != np.uint64:
        raise ValueError(
            f"bits of {n} nodes must be uint64{list(expected)}, got {bits.dtype}{list(bits.shape)}"
        )
    octets = np.ascontiguousarray(bits.astype("<u8")).view(np.uint8)
    return np.unpackbits(octets, axis=1, count=n, bitorder="little").astype(np.bool_)


def positions(tree: Tree, prefix_len: int) -> npt.NDArray[np.int64]:
    """Return each node's position, int64[n]: prefix length + depth.

    prefix_len counts the tokens before the root, so the root stands at prefix_len.
    """
    if prefix_len < 0:
        raise ValueError(f"prefix_len must be at least 0, got {prefix_len}")
    return tree.depths.astype(np.int64) + prefix_len
