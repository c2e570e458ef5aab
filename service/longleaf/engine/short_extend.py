"""Short extends as chains: through the target's verify graphs instead of operator by operator.

A layer's extend is some thirty launches, so an extend of one token costs the host of 61 layers more
than 100 ms whatever the GPU does. A verify of a chain computes the same: the new tokens over the
cached prefix, each seeing those before it. Its graph is one launch. What follows up on a cached
conversation, the last piece of a chunked prefill and a short prompt all come this way.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from torch import Tensor

from longleaf.engine.transfer import on_device
from longleaf.engine.widths import VerifyRunners

PADDING_SLOT = 0
"""SGLang keeps this slot of its pools for rows that nobody reads."""
FREE_ROWS = 64
MOST_ROWS_A_TOKEN = 4
"""A chain is padded to its width. Up to FREE_ROWS rows that costs less than the host's launches; a
batch of more may have so many rows for each new token."""


@dataclass(frozen=True, slots=True)
class ChainRows:
    """Where packed extends lie in chains of one width, int64 each.

    source: [batch * width], the packed token that a row computes; rows past a request's last token
    repeat that one. filler: bool [batch * width], those rows. tokens: [packed], the row of every
    packed token. last: [batch], the row of every request's last token.
    """

    source: Tensor
    filler: Tensor
    tokens: Tensor
    last: Tensor


def chain_rows(lengths: Sequence[int], width: int, device: torch.device | str) -> ChainRows:
    """Lay out extends of 1 to `width` tokens each, ValueError for others, in one host copy."""
    if not lengths or min(lengths) < 1 or max(lengths) > width:
        raise ValueError(f"extends of 1 to {width} tokens fit, got {list(lengths)}")
    length = np.asarray(lengths)[:, None]
    start = length.cumsum()[:, None] - length
    column = np.arange(width)
    source = start + np.minimum(column, length - 1)
    filler = column >= length
    rows = np.arange(len(lengths) * width).reshape(-1, width)
    parts = [source.ravel(), filler.ravel(), rows[~filler], (rows[:, :1] + length - 1).ravel()]
    there = on_device(parts, device).split([len(part) for part in parts])
    return ChainRows(there[0], there[1].bool(), there[2], there[3])


def extend_positions(
    prefixes: Sequence[int], lengths: Sequence[int], device: torch.device | str
) -> Tensor:
    """Return the positions of packed extends, int64 [sum(lengths)], without waiting."""
    pairs = zip(prefixes, lengths, strict=True)
    return on_device([np.arange(prefix, prefix + new) for prefix, new in pairs], device)


class ShortExtends:
    """Stands where SGLang's ModelRunner keeps the runner of its prefill graphs.

    SGLang asks `can_run_graph` of every extend and hands those that it accepts to `execute`.
    """

    def __init__(self, model_runner: Any, runners: VerifyRunners) -> None:
        self._model_runner = model_runner
        self._runners = runners

    def can_run_graph(self, forward_batch: Any) -> bool:
        """Whether a captured width holds every request's new tokens, and nothing else is asked."""
        lengths = forward_batch.extend_seq_lens_cpu
        if forward_batch.forward_mode != ForwardMode.EXTEND or not lengths or min(lengths) < 1:
            return False
        if forward_batch.capture_hidden_mode != CaptureHiddenMode.FULL:
            return False
        asked = (
            forward_batch.return_logprob,
            forward_batch.input_embeds is not None,
            forward_batch.replace_embeds is not None,
            any(item is not None for item in forward_batch.mm_inputs or ()),
            any(item is not None for item in forward_batch.lora_ids or ()),
            forward_batch.global_num_tokens_cpu is not None,  # data parallel: other ranks join in
            forward_batch.input_ids.shape[0] != sum(lengths),
        )
        if any(asked) or self._prefix_is_loading():
            return False
        width = self._runners.holding(max(lengths), len(lengths))
        most = max(FREE_ROWS, MOST_ROWS_A_TOKEN * sum(lengths))
        return width is not None and width * len(lengths) <= most

    def execute(self, forward_batch: Any, **kwargs: Any) -> LogitsProcessorOutput:
        """Run the extend; logits [batch, vocabulary], tapped hidden states [tokens, width]."""
        lengths: list[int] = list(forward_batch.extend_seq_lens_cpu)
        width = self._runners.holding(max(lengths), len(lengths))
        if width is None:
            raise RuntimeError(f"no verify graph holds extends of {lengths} tokens")
        rows = chain_rows(lengths, width, forward_batch.input_ids.device)
        self._runners.activate(width)
        runner = self._model_runner
        with _untimed(runner):
            output = runner.decode_cuda_graph_runner.execute(_chain(forward_batch, rows, width))
        # It says when a step has read the request table, which an extend's owner does not ask.
        runner.war_fastpath_read_done_event = None
        return LogitsProcessorOutput(
            next_token_logits=output.next_token_logits.index_select(0, rows.last),
            hidden_states=output.hidden_states.index_select(0, rows.tokens),
        )

    def _prefix_is_loading(self) -> bool:
        """Whether a cache below the pool loads prefixes layer by layer, as layers ask for them.

        SGLang's counter says whether this batch loads; others (LMCache's) do not, and may.
        """
        counter = getattr(self._model_runner.token_to_kv_pool, "layer_transfer_counter", None)
        return counter is not None and getattr(counter, "consumer_index", 0) >= 0


@contextmanager
def _untimed(runner: Any) -> Iterator[None]:
    """Keep SGLang's device timer, which runs around the extend already, from starting again."""
    timer, runner.device_timer = runner.device_timer, None
    try:
        yield
    finally:
        runner.device_timer = timer


def _chain(forward_batch: Any, rows: ChainRows, width: int) -> Any:
    """Return the extend as the verify of one chain a request."""
    made = copy(forward_batch)
    made.forward_mode = ForwardMode.TARGET_VERIFY
    made.input_ids = forward_batch.input_ids.index_select(0, rows.source)
    made.positions = forward_batch.positions.index_select(0, rows.source)
    slots = forward_batch.out_cache_loc.index_select(0, rows.source)
    made.out_cache_loc = slots.masked_fill_(rows.filler, PADDING_SLOT)
    prefix = forward_batch.extend_prefix_lens
    made.seq_lens = prefix.to(forward_batch.seq_lens.dtype)
    made.seq_lens_cpu = torch.tensor(forward_batch.extend_prefix_lens_cpu) + width
    made.seq_lens_sum = int(made.seq_lens_cpu.sum())
    if forward_batch.num_token_non_padded is not None:
        made.num_token_non_padded = torch.full_like(
            forward_batch.num_token_non_padded, len(rows.source)
        )
    made.spec_info = DFlashVerifyInput(
        draft_token=made.input_ids,
        positions=made.positions,
        draft_token_num=width,
        custom_mask=None,
        capture_hidden_mode=CaptureHiddenMode.FULL,
    )
    return made
