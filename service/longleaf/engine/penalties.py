"""Penalties and a least number of tokens over a tree: each node's logits by its own path.

SGLang's penalizers learn one output token a step from the host, and for the DFLASH family none at
all: what a request asks for would be ignored. Here every node is penalised as plain decoding would
be after the node's path, by the tokens that the host knows, those of the step before, which are
still on the device, and the path's own. Costs a few passes over the logits of the requests that
ask, and nothing for others.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from longleaf.engine.accept import Committed
from longleaf.engine.transfer import on_device
from longleaf_kernels._tree import WORD_BITS, DraftTrees


class Asked(NamedTuple):
    """What a request asks for.

    frequency, presence: taken from a logit for each occurrence in the output, and once.
    repetition: divides a positive logit of a token of the output, multiplies a negative one.
    least: output tokens before which no token of `stops` is given.
    """

    frequency: float
    presence: float
    repetition: float
    least: int
    stops: frozenset[int]


def asked(request: Any) -> Asked | None:
    """Return what a request of SGLang's asks for; None for nothing."""
    params = request.sampling_params
    least = params.min_new_tokens if len(request.output_ids) < params.min_new_tokens else 0
    found = Asked(
        params.frequency_penalty,
        params.presence_penalty,
        params.repetition_penalty,
        least,
        _stops(request) if least else frozenset(),
    )
    return None if found[:4] == (0.0, 0.0, 1.0, 0) else found


def _stops(request: Any) -> frozenset[int]:
    """Return the tokens that SGLang holds back until min_new_tokens are out."""
    stops = set(request.sampling_params.stop_token_ids or ())
    tokenizer = request.tokenizer
    if tokenizer is not None:
        stops |= set(tokenizer.additional_stop_token_ids or ())
        if tokenizer.eos_token_id is not None:
            stops.add(tokenizer.eos_token_id)
    return frozenset(stops)


class Penalties:
    """Penalises the nodes of a step, and keeps what the step commits for the next one.

    The host knows a request's output but for the step before, which it may not have seen yet.
    That step's tokens are kept by the request's row in SGLang's table of requests.
    """

    def __init__(self, rows: int, stride: int, device: torch.device | str) -> None:
        """rows: of the table of requests. stride: the most tokens that a step commits."""
        self._tokens = torch.zeros(rows, stride, dtype=torch.int64, device=device)
        self._lengths = torch.zeros(rows, dtype=torch.int64, device=device)

    def __call__(
        self,
        logits: Tensor,
        trees: DraftTrees,
        requests: Sequence[Any],
        req_pool_indices: Tensor,
        prefix_lens: Tensor,
    ) -> None:
        """Penalise logits [batch * nodes, vocabulary] in place."""
        batch, nodes = trees.tokens.shape
        by_request = logits.view(batch, nodes, -1)
        for row, request in enumerate(requests):
            wanted = asked(request)
            if wanted is None:
                continue
            known = np.array(request.output_ids, dtype=np.int64)
            stops = np.array(sorted(wanted.stops), dtype=np.int64)
            told = on_device([known, stops[stops < logits.shape[1]]], logits.device)
            # The prefix ends before the root, which is the last token of the output.
            total = prefix_lens[row] - len(request.origin_input_ids) + 1
            root = trees.tokens[row, :1]
            recent, unseen = self._unseen(req_pool_indices[row : row + 1], total - len(known), root)
            counts = torch.zeros(logits.shape[1], device=logits.device)
            counts.scatter_add_(0, told[: len(known)], counts.new_ones(len(known)))
            counts.scatter_add_(0, recent, unseen.to(counts.dtype))
            _penalise(by_request[row], trees, row, counts, wanted)
            if wanted.least:
                early = total + trees.depths[row] < wanted.least
                stop = torch.zeros_like(counts, dtype=torch.bool)
                stop.index_fill_(0, told[len(known) :], True)
                by_request[row].masked_fill_(early[:, None] & stop, float("-inf"))

    def _unseen(self, slot: Tensor, missing: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens, and which of them are of the last `missing` ones of the output.

        The last of all is the root: after a prefill nothing else is kept.
        """
        kept = self._tokens.index_select(0, slot).view(-1)
        length = self._lengths.index_select(0, slot)
        column = torch.arange(len(kept), device=kept.device)
        unseen = (column >= length - missing) & (column < length - 1) & (missing > 1)
        return torch.cat([kept, root]), torch.cat([unseen, (missing > 0).view(1)])

    def keep(self, requests: Sequence[Any], req_pool_indices: Tensor, done: Committed) -> None:
        """Keep what a step commits, if the next one may have to know it."""
        if any(asked(request) for request in requests):
            rows = req_pool_indices.to(torch.int64)
            self._tokens.index_copy_(0, rows, done.tokens)
            self._lengths.index_copy_(0, rows, done.lengths.to(torch.int64))


def _penalise(logits: Tensor, trees: DraftTrees, row: int, counts: Tensor, wanted: Asked) -> None:
    """Penalise one request's nodes [nodes, vocabulary] in place; counts: [vocabulary], output."""
    if (wanted.frequency, wanted.presence, wanted.repetition) == (0.0, 0.0, 1.0):
        return
    drafted = trees.tokens[row].clamp(min=0)
    on_path = _paths(trees.visible[row], len(drafted))
    same = drafted[:, None] == drafted
    # [node, other]: how often the other node's token is on the node's path, the root left out.
    again = on_path.to(counts.dtype) @ same.to(counts.dtype)
    others = drafted.expand(len(drafted), -1)
    after = _penalised(logits.gather(1, others), counts[drafted] + again, wanted)
    logits.copy_(_penalised(logits, counts, wanted))
    logits.scatter_(1, others, after.to(logits.dtype))


def _penalised(logits: Tensor, counts: Tensor, wanted: Asked) -> Tensor:
    used = counts > 0
    less = logits - (wanted.frequency * counts + wanted.presence * used.to(counts.dtype))
    if wanted.repetition == 1.0:
        return less
    scaled = torch.where(less < 0, less * wanted.repetition, less / wanted.repetition)
    return torch.where(used, scaled, less)


def _paths(visible: Tensor, nodes: int) -> Tensor:
    """Return which nodes are on a node's path below the root, bool [nodes, nodes]."""
    node = torch.arange(nodes, device=visible.device)
    bits = visible[:, node // WORD_BITS] >> (node % WORD_BITS)
    seen = (bits & 1).bool()
    seen[:, 0] = False
    return seen
