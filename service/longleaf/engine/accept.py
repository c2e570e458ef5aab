"""Accept on the GPU: what a step commits, its log-probabilities, and grammars over the tree."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longleaf_kernels._tree import DraftTrees
from longleaf_kernels.accept import Accepted, SamplingTensors, accept_workspace
from longleaf_kernels.eager import accept_greedy, accept_sampled


class Committed(NamedTuple):
    """What a step commits, per request.

    tokens: int64[batch, stride], the accepted drafts and then the bonus, zeros from lengths on.
    lengths: int32[batch], accepted drafts + 1. bonus: int64[batch]. seq_lens: int64[batch], the
    prefix that the next step starts from. rows: int64[batch, max_path], the nodes of the path
    as rows of the step's flattened nodes; past the path, the request's root again.
    positions: int64[batch, max_path], prefix + depth. slots: int64[batch, max_path], where the
    path's rows lie after compaction. Of rows, positions and slots the first `lengths` count.
    """

    tokens: Tensor
    lengths: Tensor
    bonus: Tensor
    seq_lens: Tensor
    rows: Tensor
    positions: Tensor
    slots: Tensor


class Acceptor:
    """Walks the trees along the target's choices; greedy and sampled requests in one batch."""

    def __init__(self, max_batch: int, nodes: int, seed: int, device: torch.device | str) -> None:
        self._nodes = nodes
        self._batch = max_batch
        self._workspace = accept_workspace(max_batch, nodes, device)
        # One generator per rank, seeded alike and drawn from alike: ranks walk the same path.
        self._generator = torch.Generator(device=device)
        self._generator.manual_seed(seed)

    def __call__(
        self,
        trees: DraftTrees,
        logits: Tensor,
        sampling_info: Any,
        prefix_lens: Tensor,
        max_path: int,
    ) -> Accepted:
        """Accept on logits [batch * nodes, vocabulary]; at most max_path nodes of a path."""
        batch, nodes = trees.tokens.shape
        if sampling_info is None or sampling_info.is_all_greedy:
            target_tokens = logits.argmax(dim=-1).view(batch, nodes)
            return accept_greedy(trees.tokens, trees.parents, target_tokens, max_path)
        if batch > self._batch:
            self._workspace = accept_workspace(batch, self._nodes, logits.device)
            self._batch = batch
        return accept_sampled(
            trees.tokens,
            trees.parents,
            trees.depths,
            logits.view(batch, nodes, -1),
            sampling_tensors(sampling_info),
            self._uniforms(sampling_info, prefix_lens, max_path),
            self._workspace,
        )

    def _uniforms(self, sampling_info: Any, prefix_lens: Tensor, count: int) -> Tensor:
        seeds = sampling_info.sampling_seed
        if seeds is not None:
            return seeded_uniforms(seeds, prefix_lens, count)
        shape = (prefix_lens.shape[0], count)
        return torch.rand(
            shape, dtype=torch.float64, device=prefix_lens.device, generator=self._generator
        )


def sampling_tensors(sampling_info: Any) -> SamplingTensors:
    """Return SGLang's sampling parameters as the kernel takes them.

    SGLang says "greedy" by top_k 1 and "no top-k" by a top_k above any vocabulary; both mean
    the same to the kernel.
    """
    return SamplingTensors(
        temperature=sampling_info.temperatures.reshape(-1).float().contiguous(),
        top_p=sampling_info.top_ps.float().contiguous(),
        top_k=sampling_info.top_ks.to(torch.int32).contiguous(),
        min_p=sampling_info.min_ps.float().contiguous(),
    )


_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15, and the multipliers of splitmix64
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def seeded_uniforms(seeds: Tensor, prefix_lens: Tensor, count: int) -> Tensor:
    """Return uniforms in [0, 1) that depend on a request's seed and a token's position alone.

    seeds, prefix_lens: int64[batch]. Column d draws the token after position prefix + d, so a
    token is drawn alike whatever tree, step or batch it comes up in.
    """
    depths = torch.arange(count, dtype=torch.int64, device=seeds.device)
    positions = prefix_lens.to(torch.int64).unsqueeze(1) + depths
    bits = _mix(_mix(seeds.to(torch.int64)).unsqueeze(1) + positions * _GOLDEN)
    return _shifted(bits, 11).double() * 2.0**-53


def _mix(bits: Tensor) -> Tensor:
    bits = bits + _GOLDEN
    bits = (bits ^ _shifted(bits, 30)) * _MIX_1
    bits = (bits ^ _shifted(bits, 27)) * _MIX_2
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Shift right without the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def committed(
    trees: DraftTrees, accepted: Accepted, prefix_lens: Tensor, slots: Tensor, stride: int
) -> Committed:
    """Say what paths commit.

    slots: int64[batch, nodes], node i's row of the cache. stride: columns of the tokens, at least
    the longest path.
    """
    batch, nodes = trees.tokens.shape
    max_path = accepted.path.shape[1]
    if not max_path <= min(stride, nodes):
        raise ValueError(f"a path of {max_path} does not fit {nodes} nodes, {stride} columns")
    if not trees.tokens.is_cuda:
        return _committed_by_torch(trees, accepted, prefix_lens, slots, stride)
    from longleaf.engine import settle_kernel as kernel

    new = trees.tokens.new_empty
    done = Committed(
        tokens=new((batch, stride)),
        lengths=accepted.path_len,
        bonus=accepted.bonus,
        seq_lens=torch.empty_like(prefix_lens),
        rows=new((batch, max_path)),
        positions=new((batch, max_path)),
        slots=new((batch, max_path)),
    )
    kernel.commit_paths[(batch,)](
        trees.tokens, accepted.path, accepted.path_len, accepted.bonus, prefix_lens, slots,
        done.tokens, done.seq_lens, done.rows, done.positions, done.slots,
        nodes, max_path, stride, COLUMNS=kernel.MAX_COLUMNS,
    )  # fmt: skip
    return done


def _committed_by_torch(
    trees: DraftTrees, accepted: Accepted, prefix_lens: Tensor, slots: Tensor, stride: int
) -> Committed:
    """What the kernel computes, in as many small operators as it replaces."""
    batch, nodes = trees.tokens.shape
    max_path = accepted.path.shape[1]
    path = accepted.path.clamp(min=0).to(torch.int64)
    drafts = trees.tokens.gather(1, path[:, 1:])
    lengths = accepted.path_len
    last = (lengths - 1).to(torch.int64).unsqueeze(1)
    columns = torch.arange(stride, dtype=torch.int64, device=path.device)
    tokens = torch.nn.functional.pad(drafts, (0, stride - max_path + 1))
    tokens = tokens.masked_fill(columns >= last, 0)
    tokens.scatter_(1, last, accepted.bonus.unsqueeze(1))
    first_rows = torch.arange(batch, dtype=torch.int64, device=path.device) * nodes
    return Committed(
        tokens=tokens,
        lengths=lengths,
        bonus=accepted.bonus,
        seq_lens=prefix_lens + lengths.to(prefix_lens.dtype),
        rows=path + first_rows.unsqueeze(1),
        positions=prefix_lens.to(torch.int64).unsqueeze(1) + columns[:max_path],
        slots=slots[:, :max_path].to(torch.int64, copy=True),
    )


def add_logprobs(batch: Any, logits_output: Any, done: Committed) -> None:
    """Put the log-probabilities of the committed tokens where SGLang sends them from.

    The rows of the path are gathered first, so that SGLang's function sees a chain: row d of a
    request holds the logits that chose its d-th committed token.
    """
    from sglang.srt.layers.logprob_processor import compute_spec_v2_logprobs

    requests, length = done.rows.shape
    flat = torch.arange(requests * length, device=done.rows.device)
    chain = SimpleNamespace(next_token_logits=logits_output.next_token_logits[done.rows.view(-1)])
    compute_spec_v2_logprobs(
        batch,
        chain,
        done.tokens[:, :length].reshape(-1),
        flat.view(requests, length),
        length - 1,
    )
    del chain.next_token_logits
    for name, value in vars(chain).items():
        setattr(logits_output, name, value)


def tree_links(parents: Tensor) -> tuple[Tensor, Tensor]:
    """Return each node's first child and next sibling, -1 where there is none.

    parents: int32[batch, nodes], -1 for roots and padding. Returns int64[batch, nodes] twice: the
    links by which SGLang walks a tree for its grammars.
    """
    nodes = parents.shape[1]
    ids = torch.arange(nodes, dtype=torch.int64, device=parents.device)
    parent = parents.to(torch.int64)
    none = torch.full_like(parent, nodes).unsqueeze(2)
    is_child = parent.unsqueeze(1) == ids.view(1, nodes, 1)
    first_child = torch.where(is_child, ids, none).amin(dim=2)
    later = ids.view(1, 1, nodes) > ids.view(1, nodes, 1)
    same = (parent.unsqueeze(1) == parent.unsqueeze(2)) & (parent >= 0).unsqueeze(2) & later
    next_sibling = torch.where(same, ids, none).amin(dim=2)
    return (
        first_child.masked_fill(first_child == nodes, -1),
        next_sibling.masked_fill(next_sibling == nodes, -1),
    )


def grammar_tree(trees: DraftTrees) -> Any:
    """Start copying the trees to the host, for the grammars' bitmask over all their nodes."""
    from sglang.srt.speculative.spec_utils import GrammarTree

    first_child, next_sibling = tree_links(trees.parents)
    return GrammarTree.from_device(first_child, next_sibling, trees.tokens)
