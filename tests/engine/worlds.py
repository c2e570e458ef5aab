"""A world in which a step's every read and write can be checked: no model, real kernels.

The target is a rule over token sequences, and it reads the sequence of each node from a KV pool,
through the request table and the visibility bits, as attention would. A row of the pool holds a
token and its position. Whatever goes wrong with slots, bits, positions or compaction makes it
answer for another sequence, or refuse a broken one.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

VOCABULARY = 32
MASK_TOKEN = VOCABULARY - 1


def next_token(sequence: Sequence[int]) -> int:
    """The target's choice after a sequence: any fixed rule that looks at all of it."""
    value = 17
    for token in sequence:
        value = (value * 31 + token + 7) % 1_000_003
    return value % (VOCABULARY - 1)


def rival_token(sequence: Sequence[int]) -> int:
    """What the target would nearly have chosen."""
    return next_token([*sequence, 0])


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """What plain greedy decoding gives."""
    sequence = list(prompt)
    for _ in range(count):
        sequence.append(next_token(sequence))
    return sequence[len(prompt) :]


def hidden_row(token: int, position: int) -> list[float]:
    """The tapped hidden state of a token at a position, which the draft KV keeps."""
    return [float(token), float(position)]


class World:
    """KV pools, the request table and what the worker asks of SGLang, for `requests` requests."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        room: int,
        window: int | None = None,
        rival: float = 0.0,
    ) -> None:
        """room: tokens that a request may grow by; window: what the drafter sees, None for all.

        rival: the logit of `rival_token`, where the choice has 9.
        """
        self.rival = rival
        generator = torch.Generator().manual_seed(0)
        self.requests = len(prompts)
        width = max(map(len, prompts)) + room
        slots = self.requests * width
        order = torch.randperm(slots, generator=generator) + 1
        self.req_to_token = torch.zeros(self.requests + 1, width, dtype=torch.int32)
        self.req_to_token[1:] = order.view(self.requests, width).int()
        self.window = window
        self.draft_table = self.req_to_token if window is None else self.req_to_token * 0
        self.layers = [torch.full((slots + 1, 2), -7, dtype=torch.int64) for _ in range(3)]
        self.draft_kv = torch.full((slots + 1, 2), -7.0)
        self.sequences = [list(prompt) for prompt in prompts]
        for request, prompt in enumerate(prompts):
            # The last token is the root of the first step: not in any cache yet.
            for position, token in enumerate(prompt[:-1]):
                slot = int(self.req_to_token[request + 1, position])
                for layer in self.layers:
                    layer[slot] = torch.tensor([token, position])
                self.draft_kv[slot] = torch.tensor(hidden_row(token, position))

    def prefix_lens(self) -> Tensor:
        return torch.tensor([len(sequence) - 1 for sequence in self.sequences])

    def sequence(self, layer: int, request: int, length: int) -> list[int]:
        """Read a prefix from a layer's pool; a wrong position is an error."""
        rows = self.layers[layer][self.req_to_token[request + 1, :length].long()]
        assert rows[:, 1].tolist() == list(range(length)), f"prefix of request {request}"
        tokens: list[int] = rows[:, 0].tolist()
        return tokens

    def verify(self, spec: Any, slots: Tensor, prefix_lens: Tensor) -> SimpleNamespace:
        """The target's forward over trees: writes the nodes' rows, answers for each node."""
        nodes = int(spec.draft_token_num)
        tokens = spec.draft_token.view(-1, nodes)
        positions = spec.positions.view(-1, nodes)
        slots = slots.view(-1, nodes)
        for layer in self.layers:
            layer[slots.view(-1)] = torch.stack((tokens, positions), dim=-1).view(-1, 2)
        logits = torch.zeros(tokens.numel(), VOCABULARY)
        hidden = torch.zeros(tokens.numel(), 2)
        for request in range(tokens.shape[0]):
            length = int(prefix_lens[request])
            prefix = self.sequence(request % len(self.layers), request, length)
            for node in range(nodes):
                seen = [j for j in range(nodes) if _bit(spec.visible[request, node], j)]
                rows = self.layers[0][slots[request, seen]]
                rows = rows[rows[:, 1].argsort()]
                assert rows[:, 1].tolist() == list(range(length, length + len(seen))), "positions"
                row = request * nodes + node
                sequence = prefix + rows[:, 0].tolist()
                logits[row, rival_token(sequence)] = self.rival
                logits[row, next_token(sequence)] = 9.0
                token, position = int(tokens[request, node]), int(positions[request, node])
                hidden[row] = torch.tensor(hidden_row(token, position))
        return SimpleNamespace(
            logits_output=SimpleNamespace(next_token_logits=logits, hidden_states=hidden),
            can_run_cuda_graph=False,
        )

    def draft(self, forward_batch: Any, block: int, seed: int) -> SimpleNamespace:
        """The drafter's forward: checks what it would attend to, guesses around the truth.

        Hidden states are the logits themselves, for a head that is the identity.
        """
        ids = forward_batch.input_ids.view(-1, block)
        assert (ids[:, 1:] == MASK_TOKEN).all()
        hidden = torch.zeros(ids.shape[0], block, VOCABULARY)
        generator = torch.Generator().manual_seed(seed)
        for request, sequence in enumerate(self.sequences):
            length = int(forward_batch.seq_lens[request])
            slots = self.draft_table[request + 1, :length].long()
            expected = [hidden_row(token, i) for i, token in enumerate(sequence[:-1])]
            if self.window is not None:
                expected = expected[-self.window :]
            assert length == len(expected), "window"
            block_slots = self.draft_table[request + 1, length : length + block].tolist()
            assert block_slots == forward_batch.out_cache_loc.view(-1, block)[request].tolist()
            positions = forward_batch.positions.view(-1, block)[request].tolist()
            assert positions == list(range(len(sequence) - 1, len(sequence) - 1 + block))
            assert self.draft_kv[slots].tolist() == expected, "draft KV"
            assert int(ids[request, 0]) == sequence[-1]
            truth = continuation(sequence, block - 1)
            noise = torch.rand(block, VOCABULARY, generator=generator) * 4
            hidden[request] = noise
            for depth, token in enumerate(truth):
                # Right, but seldom on top: a chain would stop, a tree may find it.
                hidden[request, depth + 1, token] += 3.0
        # The block's own rows land in the draft pool, over whatever is not committed.
        for slot in forward_batch.out_cache_loc.tolist():
            self.draft_kv[slot] = -99.0
        output = SimpleNamespace(hidden_states=hidden.view(-1, VOCABULARY))
        return SimpleNamespace(logits_output=output, can_run_graph=False)

    def append_draft_kv(
        self, hidden: Tensor, slots: Tensor, positions: Tensor, lengths: Tensor
    ) -> None:
        """Write the first rows of each request to the draft pool, as SGLang's kernel does."""
        requests, rows = slots.shape
        hidden = hidden.view(requests, rows, 2)
        for request in range(requests):
            for row in range(int(lengths[request])):
                assert int(positions.view(requests, rows)[request, row]) == int(
                    hidden[request, row, 1]
                )
                self.draft_kv[slots[request, row]] = hidden[request, row]


def _bit(words: Tensor, index: int) -> bool:
    return bool((int(words[index // 64]) >> (index % 64)) & 1)


def extend_slots(
    *,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    batch_size: int,
    draft_token_num: int,
    device: Any,
) -> Tensor:
    """SGLang's `assign_extend_cache_locs_func` without Triton."""
    del device
    assert (end_offset - start_offset == draft_token_num).all()
    columns = start_offset[:, None] + torch.arange(draft_token_num)
    assert len(req_pool_indices) == batch_size
    return req_to_token[req_pool_indices[:, None], columns].long().view(-1)


def draft_block(
    *,
    bonus_tokens: Tensor,
    prefix_lens: Tensor,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    block_ids_out: Tensor,
    positions_out: Tensor,
    cache_loc_out: Tensor,
    mask_token_id: int,
) -> None:
    """SGLang's `_prepare_dflash_draft_block_unchecked` without Triton."""
    positions = prefix_lens[:, None] + torch.arange(block_ids_out.shape[1])
    block_ids_out.fill_(mask_token_id)
    block_ids_out[:, 0] = bonus_tokens
    positions_out.copy_(positions)
    cache_loc_out.copy_(req_to_token[req_pool_indices[:, None], positions].long())


def rebuild_window(
    *,
    draft_req_to_token: Tensor,
    target_req_to_token: Tensor,
    req_pool_indices: Tensor,
    suffix_start: Tensor,
    draft_prefix_lens: Tensor,
    verify_out_cache_loc_2d: Tensor,
    batch_size: int,
    block_size: int,
) -> None:
    """SGLang's `rebuild_compact_draft_req_to_token_func` without Triton."""
    assert len(req_pool_indices) == batch_size
    for row, request in enumerate(req_pool_indices.tolist()):
        start, length = int(suffix_start[row]), int(draft_prefix_lens[row])
        suffix = target_req_to_token[request, start : start + length]
        draft_req_to_token[request, :length] = suffix
        block = verify_out_cache_loc_2d[row].int()
        draft_req_to_token[request, length : length + block_size] = block
