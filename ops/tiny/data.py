"""Token arrays on the device and the batches drawn from them."""

import io
import lzma
import math
from pathlib import Path

import numpy as np
import torch
from shapes import ENDOFTEXT, VOCAB
from torch import Tensor

REPEAT, RANDOM, PATTERN, CHAT, REAL = range(5)  # kinds of rows; all but REAL are "structured"


def load_tokens(path: Path, device: str) -> Tensor:
    """int16[N] of a .npy.xz of uint16 ids (all below 4096)."""
    array = np.load(io.BytesIO(lzma.decompress(path.read_bytes())))
    return torch.from_numpy(array.astype(np.int16)).to(device)


class Batches:
    def __init__(self, folder: Path, device: str) -> None:
        self.device = device
        self.train = load_tokens(folder / "train.npy.xz", device)
        self.patterns = load_tokens(folder / "patterns.npy.xz", device)
        self.chats = load_tokens(folder / "chats.npy.xz", device)
        self.chat_starts = (self.chats == ENDOFTEXT).nonzero().flatten()

    def draw(self, rows: int, length: int, shares: tuple[float, ...]) -> tuple[Tensor, int]:
        """(int64[rows, length], number of structured rows, which come first).

        shares: of REPEAT, RANDOM, PATTERN, CHAT; the rest is REAL.
        """
        weights = torch.tensor([*shares, 1.0 - sum(shares)])
        kinds = torch.multinomial(weights, rows, replacement=True).sort().values
        counts = torch.bincount(kinds, minlength=5).tolist()
        parts = [
            self.repeats(counts[REPEAT], length, made_up=False),
            self.repeats(counts[RANDOM], length, made_up=True),
            self.slices(self.patterns, counts[PATTERN], length),
            self.whole_chats(counts[CHAT], length),
            self.slices(self.train, counts[REAL], length),
        ]
        return torch.cat(parts), rows - counts[REAL]

    def slices(self, stream: Tensor, rows: int, length: int) -> Tensor:
        start = torch.randint(stream.numel() - length, (rows, 1), device=self.device)
        return stream[start + torch.arange(length, device=self.device)].long()

    def whole_chats(self, rows: int, length: int) -> Tensor:
        """Rows that begin where a chat begins, as a served prompt does."""
        usable = self.chat_starts[self.chat_starts < self.chats.numel() - length]
        start = usable[torch.randint(usable.numel(), (rows, 1), device=self.device)]
        return self.chats[start + torch.arange(length, device=self.device)].long()

    def repeats(self, rows: int, length: int, made_up: bool) -> Tensor:
        """Rows that from some point on repeat their last `period` tokens."""
        device = self.device
        position = torch.arange(length, device=device)
        u = torch.rand(4, rows, 1, device=device)
        longest = torch.where(u[0] < 0.6, 64.0, length / 3)
        period = torch.exp(math.log(8) + u[1] * (longest.log() - math.log(8))).long()
        begin = torch.where(u[2] < 0.6, period, torch.maximum((u[3] * 0.6 * length).long(), period))
        source = torch.where(
            position >= begin, (position - begin) % period + begin - period, position
        )
        if made_up:
            return torch.randint(8, VOCAB, (rows, length), device=device).gather(1, source)
        start = torch.randint(self.train.numel() - length, (rows, 1), device=device)
        return self.train[start + source].long()


def anchors(length: int, count: int, first: int, block: int, device: str) -> Tensor:
    """Sorted distinct anchor positions in [first, length - block]."""
    room = length - block - first + 1
    return (torch.randperm(room, device=device)[:count] + first).sort().values
