"""The adaptive node budget: how many nodes the next step verifies, 1 being no speculation.

Widths cost nothing while a step is bound by memory and much beyond, and what they earn depends on
the text. The controller takes the width with the most committed tokens a millisecond, from a cost
model and from what recent steps accepted. It has no clock and no random numbers: controllers that
are told the same choose the same, so the ranks of a tensor-parallel group agree without a message.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import sqrt

_SPREAD_WEIGHT = 16.0
"""Values that the assumed variance of 1 is worth: few steps that gain nothing prove little."""
_TRIAL_SHARE = 0.03
"""Share of the time that trials may lose, by what is known when they are made."""
_BYTES_A_TOKEN = 1152.0
_FLOP_A_TOKEN_AND_NODE = 8 * 2176.0


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Milliseconds of one step, by nodes, context and batch.

    fixed_ms: everything that neither nodes nor context move. draft_ms: the drafter and the tree,
    which a step of one node does without. node_ms: what a verified row costs outside attention.
    layers: attention layers; bytes_per_ms and flop_per_ms: what the verify kernel reaches, of
    which the slower decides. measured: milliseconds by (nodes, context) at batch 1, which replace
    the model where given (straight lines between contexts, the model's slope beyond them).
    The defaults are for 61 layers of 8 heads on one H200: within 11 % of every width that
    `make bench-engine` measured there at 1k, 16k and 64k.
    """

    fixed_ms: float = 3.9
    draft_ms: float = 0.6
    node_ms: float = 0.02
    layers: int = 61
    bytes_per_ms: float = 2.1e9
    flop_per_ms: float = 3.1e11
    measured: Mapping[tuple[int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("fixed_ms", "layers", "bytes_per_ms", "flop_per_ms"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("draft_ms", "node_ms"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        for (nodes, context), value in self.measured.items():
            if nodes < 1 or context < 0 or not value > 0:
                raise ValueError(
                    f"measured[{nodes}, {context}] must be nodes >= 1, context >= 0 and a time "
                    f"above 0, got {value}"
                )

    def milliseconds(self, nodes: int, context: int, batch: int = 1) -> float:
        """Time of a step that verifies `nodes` rows for each of `batch` requests."""
        points = sorted((at, ms) for (n, at), ms in self.measured.items() if n == nodes)
        if not points:
            return self._modelled(nodes, context, batch)
        extra = self._modelled(nodes, context, batch) - self._modelled(nodes, context, 1)
        for (low, low_ms), (high, high_ms) in pairwise(points):
            if low <= context <= high:
                return low_ms + (high_ms - low_ms) * (context - low) / (high - low) + extra
        at, ms = points[0] if context < points[0][0] else points[-1]
        return ms + self._modelled(nodes, context, 1) - self._modelled(nodes, at, 1) + extra

    def _modelled(self, nodes: int, context: int, batch: int) -> float:
        memory = context * _BYTES_A_TOKEN / self.bytes_per_ms
        tensor = context * nodes * _FLOP_A_TOKEN_AND_NODE / self.flop_per_ms
        draft = self.draft_ms if nodes > 1 else 0.0
        rows = self.node_ms * nodes * batch
        return self.fixed_ms + draft + rows + self.layers * batch * max(memory, tensor)


class BudgetController:
    """Chooses each step's node count among the captured widths.

    widths: node counts, root included, ascending; 1 means no speculation. depth: drafted depths
    (block - 1): a path that reaches it would be no longer in a wider tree.

    What it learns from one step: trees of one draft are nested and node ids follow the order of
    taking, so a path's nodes below id w are what the tree of w nodes would have accepted. A wide
    step thus tells what every narrower one would have committed; a narrow step is censored: it says
    nothing about wider ones, unless its path is as deep as can be. So it keeps, as one does for
    survival, for each width how often its path is not as deep as can be, and for each pair of
    neighbouring widths what the wider adds in that case, over the recent steps that could tell.
    To average the gain over all steps that tell would count the full paths too often.

    The first steps take every width once, widest first, so that a warm-up meets them all.

    optimism: a width is judged by its mean and so many standard errors more, hence an unknown one
    is tried until it is known to be worse, the cheaper the more often, and again as that fades.
    memory: steps after which what was learnt has faded to 1/e.
    """

    def __init__(
        self,
        widths: Sequence[int],
        costs: StepCosts,
        *,
        depth: int = 7,
        optimism: float = 2.5,
        memory: float = 60.0,
    ) -> None:
        if not widths or min(widths) < 1 or sorted(set(widths)) != list(widths):
            raise ValueError(f"widths must be ascending node counts from 1, got {list(widths)}")
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        if not optimism >= 0:
            raise ValueError(f"optimism must be at least 0, got {optimism}")
        if not memory >= 1:
            raise ValueError(f"memory must be at least 1 step, got {memory}")
        self.widths = tuple(widths)
        self._costs = costs
        self._depth = depth
        self._optimism = optimism
        self._decay = 1.0 - 1.0 / memory
        # Before anything is seen: a wider tree is assumed to add a little, with little weight.
        self._gain = [_Mean(_prior_gain(low, high, depth)) for low, high in pairwise(widths)]
        self._short = [_Mean(1.0) for _ in widths[1:]]
        self._first = _Mean(1.0 + _prior_gain(1, widths[0], depth))
        self._untried = list(widths)
        self._allowance = 0.0

    def expected_commit(self, width: int) -> float:
        """Tokens a request commits in a step of `width` nodes, as far as is known."""
        index = self.widths.index(width)
        pairs = zip(self._short[:index], self._gain[:index], strict=True)
        return self._first.value + sum(short.value * gain.value for short, gain in pairs)

    def choose(self, context: int, batch: int) -> int:
        """Return the width of the next step: `batch` requests of `context` tokens on average."""
        if len(self.widths) == 1:
            return self.widths[0]
        if self._untried:
            return self._untried.pop()
        times = [self._costs.milliseconds(width, context, batch) for width in self.widths]
        rates = [
            self.expected_commit(width) / time
            for width, time in zip(self.widths, times, strict=True)
        ]
        hopes = [
            rate + self._doubt(index) / time
            for index, (rate, time) in enumerate(zip(rates, times, strict=True))
        ]
        best = max(range(len(rates)), key=lambda i: (rates[i], -i))
        hoped = max(range(len(hopes)), key=lambda i: (hopes[i], -i))
        self._allowance = min(self._allowance + _TRIAL_SHARE * times[best], 2.0 * max(times))
        # What the best known width would need for as many tokens is not lost.
        loss = times[hoped] - self.expected_commit(self.widths[hoped]) / rates[best]
        if loss > self._allowance:
            return self.widths[best]
        self._allowance -= max(0.0, loss)
        return self.widths[hoped]

    def _doubt(self, index: int) -> float:
        """Tokens by which a width may be better than known: what its gains leave uncertain."""
        pairs = zip(self._short[:index], self._gain[:index], strict=True)
        return self._optimism * sqrt(sum((short.value * gain.error) ** 2 for short, gain in pairs))

    def observe(
        self,
        width: int,
        accepted: Sequence[int],
        paths: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Learn from a step of `width` nodes.

        accepted: drafts that each request accepted. paths: for each request the node ids of its
        accepted path (the root may be left out), which tell about narrower widths too; without
        them a step tells about its own width alone. A request whose path is longer than what it
        accepted was cut by the end of its answer, and tells nothing.
        """
        index = self.widths.index(width)
        if paths is not None and len(paths) != len(accepted):
            raise ValueError(f"{len(accepted)} requests have {len(paths)} paths")
        for mean in (self._first, *self._short, *self._gain):
            mean.fade(self._decay)
        for request, drafts in enumerate(accepted):
            if paths is None:
                self._learn_total(index, drafts)
                continue
            ids = [node for node in paths[request] if node > 0]
            if len(ids) < drafts:
                raise ValueError(f"a path of {len(ids)} drafts is said to have {drafts}")
            if len(ids) > drafts:
                continue
            depths = [sum(node < w for node in ids) for w in self.widths]
            if self.widths[0] > 1:
                self._first.add(1 + depths[0])
            for pair in range(len(self.widths) - 1):
                if pair <= index:
                    self._short[pair].add(depths[pair] < self._depth)
                if pair < index and depths[pair] < self._depth:
                    self._gain[pair].add(depths[pair + 1] - depths[pair])

    def _learn_total(self, index: int, drafts: int) -> None:
        """Learn a total alone: it is shared among the gains below in their proportion."""
        if index == 0:
            if self.widths[0] > 1:
                self._first.add(1 + drafts)
            return
        below = self.expected_commit(self.widths[index]) - self._first.value
        scale = max(0.0, 1 + drafts - self._first.value) / max(below, 1e-9)
        for pair in range(index):
            self._gain[pair].add(scale * self._gain[pair].value)
        if index < len(self._short):
            self._short[index].add(drafts < self._depth)


class _Mean:
    """A mean and its standard error, of values that fade."""

    __slots__ = ("_spread", "value", "weight")

    def __init__(self, prior: float) -> None:
        self.value = prior
        self.weight = 1.0
        self._spread = 1.0

    @property
    def error(self) -> float:
        """Standard error of the mean; that of half a value at least is told, however old it is."""
        return sqrt(self._spread / max(self.weight, 0.5))

    def fade(self, decay: float) -> None:
        """Let what was added count for less."""
        self.weight *= decay

    def add(self, value: float) -> None:
        """Count one more value."""
        self.weight += 1.0
        off = value - self.value
        self.value += off / self.weight
        self._spread += (off * (value - self.value) - self._spread) / (self.weight + _SPREAD_WEIGHT)


def _prior_gain(low: int, high: int, depth: int) -> float:
    """Tokens that a tree of `high` nodes is assumed to add to one of `low`, before any step."""
    chain = max(0, min(high - 1, depth) - min(low - 1, depth))
    beyond = max(0, high - 1 - depth) - max(0, low - 1 - depth)
    return 0.35 * chain + 0.15 * (beyond / max(1, high - 1))
