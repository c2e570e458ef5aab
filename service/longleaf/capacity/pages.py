"""The answer of ``longleaf capacity`` in words, with each formula and the numbers in it."""

import math
from dataclasses import dataclass
from typing import Any

from longleaf.capacity import model as formulas
from longleaf.capacity.check import Seen, in_ms
from longleaf.capacity.model import Model, Objective, State
from longleaf.capacity.search import Found

_GB = 2**30
_FULL = 0.6
"""Share of a pod's cores to plan with: a gateway must answer its probes at any time."""
_LEAST_PODS = 2
_APART = 4 / 3
"""Times so many times each other's, of the formulas and of the simulation, are said to differ."""


@dataclass(frozen=True, slots=True)
class Prices:
    """``node_cost`` an hour and replica; gateway CPU in ms a request and µs a prompt token."""

    node_cost: float
    gateway_ms: float
    gateway_us_per_token: float
    gateway_cores: float


@dataclass(frozen=True, slots=True)
class Answer:
    """``models``: one for each curve that could serve the traffic, with what the formulas gave for
    it; ``model`` is the chosen one. ``why_not``: of each other curve.
    """

    objective: Objective
    model: Model
    state: State
    found: Found | None
    prices: Prices
    models: tuple[tuple[Model, State], ...]
    why_not: tuple[str, ...] = ()

    @property
    def pods(self) -> int:
        """Gateway pods: their CPU, and never fewer than two."""
        return max(_LEAST_PODS, math.ceil(self.gateway_cpu / (_FULL * self.prices.gateway_cores)))

    @property
    def gateway_cpu(self) -> float:
        """Cores."""
        prompt, _ = self.model.tokens
        prices = self.prices
        return self.state.rate * (
            prices.gateway_ms / 1e3 + prompt * prices.gateway_us_per_token / 1e6
        )

    @property
    def cost(self) -> tuple[float, float]:
        """Of a million tokens: of prompts and answers together, and of answers alone."""
        hour = self.state.replicas * self.prices.node_cost
        prompt, answer = self.model.tokens
        per_hour = self.state.rate * 3600
        return hour / (per_hour * (prompt + answer)) * 1e6, hour / (per_hour * answer) * 1e6

    @property
    def pool(self) -> tuple[int, float]:
        """Least KV pool of a replica: slots and bytes."""
        busy = math.ceil(self.state.batch) * self.model.footprint
        slots = math.ceil(max(self.model.largest, busy))
        return slots, slots * self.model.curve.kv_bytes_per_token

    @property
    def nearly(self) -> list[int]:
        """Smaller fleets that missed by less than the spread."""
        return [] if self.found is None else self.found.nearly(self.objective, self.model.kinds)

    def document(self) -> dict[str, Any]:
        """The same as JSON."""
        model, state, found = self.model, self.state, self.found
        checked = None if found is None else found.answer
        slots, size = self.pool
        return {
            "curve": dict(model.curve.source),
            "rate": state.rate,
            "replicas": state.replicas,
            "replicas_by_formulas": state.replicas if found is None else found.formulas,
            "missed_by_less_than_spread": self.nearly,
            "utilization": state.utilization,
            "most_per_replica": model.most_per_replica,
            "nodes": model.curve.nodes,
            "batch": state.batch,
            "tpot_ms": state.tpot * 1e3,
            "kv_tokens_in_use": state.kv_tokens,
            "kv_pool_tokens": slots,
            "kv_pool_bytes": size,
            "gateway_pods": self.pods,
            "gateway_cpu_cores": self.gateway_cpu,
            "cost_per_million_tokens": self.cost[0],
            "cost_per_million_answer_tokens": self.cost[1],
            "kinds": [
                {
                    "prompt_tokens": kind.prompt_tokens,
                    "cached_tokens": kind.cached_tokens,
                    "uncached_tokens": kind.uncached_tokens,
                    "answer_tokens": kind.answer_tokens,
                    "share": kind.share,
                    "ttft_ms": state.ttft[number] * 1e3,
                    **_seen(
                        "ttft",
                        state.ttft[number],
                        None if checked is None else checked.ttft[number],
                    ),
                }
                for number, kind in enumerate(model.kinds)
            ],
            **_seen("tpot", state.tpot, None if checked is None else checked.tpot),
            "simulated": []
            if found is None
            else [
                {
                    "replicas": one.replicas,
                    "simulated_replicas": one.simulated,
                    "requests": one.requests,
                    "missed": one.missed(self.objective, model.kinds),
                    "by_less_than_spread": one.nearly(self.objective, model.kinds),
                }
                for one in found.tried
            ],
            "tree_budget": [
                {
                    "curve": one.curve.name,
                    "nodes": one.curve.nodes,
                    "token_ms": one.token_seconds(own) * 1e3,
                    "replicas_by_formulas": own.replicas,
                }
                for one, own in self.models
            ],
            "curves_left_out": list(self.why_not),
            "extrapolated": _beyond(self),
        }


def words(answer: Answer) -> str:
    """All of it."""
    model, state, prices = answer.model, answer.state, answer.prices
    prefill, steps, batch = model.mean_prefill, model.mean_steps, model.batch_limit
    share = state.rate / state.replicas
    slots, size = answer.pool
    prompt, completion = model.tokens
    full = model.step_seconds(batch)
    interrupted = "" if model.one_at_a_time else f" / (1 - {share:.4g} * {prefill:.4g})"
    near = ", ".join(map(str, answer.nearly))
    parts = [
        f"{state.replicas} replicas{near and f' ({near} miss by less than the spread)'}, "
        f"{answer.pods} gateway pods, a tree of {model.curve.nodes} nodes",
        "",
        (formulas.__doc__ or "").partition("\n\n")[2].rstrip(),
        "",
        f"With {state.rate:g} requests a second on curve {model.curve.name}:",
        f"    mean(P) = {prefill:.4g} s, mean(n) = {steps:.4g}, commit_len = "
        f"{model.mean_commit_len:.3g}, mean context = {model.footprint:.6g} tokens",
        f"    b at most {batch:.3g}: sequences, or pool / context; step(b) = {full * 1e3:.4g} ms",
        f"    a replica serves 1 / ({prefill:.4g} + {steps:.4g} * {full:.4g} / {batch:.3g}) = "
        f"{model.most_per_replica:.4g} requests a second at most",
        f"    {state.replicas} replicas: {share:.4g} each, {state.utilization:.0%} busy, "
        f"b = {state.batch:.3g}, step(b) = {state.step * 1e3:.4g} ms",
        f"    TPOT = {state.step * 1e3:.4g} / {model.mean_commit_len:.3g}{interrupted} = "
        f"{state.tpot * 1e3:.4g} ms{_simulated_tpot(answer)}",
        f"    W = {in_ms(state.wait)} ms",
        *_kinds(answer),
        f"    KV in use: b * context = {state.kv_tokens:.6g} tokens on average",
        f"    KV pool: max(largest request {model.largest}, ceil(b) * context) = {slots} tokens "
        f"* {model.curve.kv_bytes_per_token:.6g} bytes = {size / _GB:.3g} GiB a GPU",
        *_budget(answer),
        f"    gateway: {state.rate:g} * ({prices.gateway_ms:g} ms + {prompt:.6g} tokens * "
        f"{prices.gateway_us_per_token:g} µs) = {answer.gateway_cpu:.3g} cores; at {_FULL:.0%} of "
        f"{prices.gateway_cores:g} each, at least {_LEAST_PODS}: {answer.pods} pods",
    ]
    if prices.node_cost:
        both, alone = answer.cost
        parts.append(
            f"    cost: {state.replicas} * {prices.node_cost:g} an hour / ({state.rate:g} * 3600 * "
            f"({prompt:.6g} + {completion:.6g}) tokens) = {both:.4g} a million tokens; "
            f"{alone:.4g} a million answer tokens"
        )
    return "\n".join([*parts, *_simulation(answer), *_beyond(answer)])


def _simulation(answer: Answer) -> list[str]:
    """What the formulas gave, what the simulation gave for it, and why replicas were added."""
    found, kinds = answer.found, answer.model.kinds
    if found is None:
        return []
    lines = [
        "",
        f"The formulas gave {found.formulas} replicas. Simulated, behind one gateway:",
        *(
            f"    {one.replicas} replicas: {one.verdict(answer.objective, kinds)}"
            for one in found.tried
        ),
    ]
    checked = found.answer
    lines.append(
        f"    {checked.requests} requests after those that filled the fleet; mean (± twice its "
        "standard error, 99th percentile, of how many)"
    )
    if checked.simulated < checked.replicas:
        lines.append(
            f"    {checked.simulated} of the {checked.replicas} replicas with their share of the "
            "arrivals, which queue no less than all of them would"
        )
    lines += [
        f"    no request of {kind} came: more --check-requests would tell"
        for kind, seen in zip(kinds, checked.ttft, strict=True)
        if seen is None
    ]
    return lines


def _kinds(answer: Answer) -> list[str]:
    model, state, found = answer.model, answer.state, answer.found
    lines = []
    for number, kind in enumerate(model.kinds):
        told = found.answer.ttft[number] if found is not None else None
        seen = _beside(state.ttft[number], told)
        lines.append(
            f"    TTFT of {kind} = W + {in_ms(model.prefill[number])} = "
            f"{in_ms(state.ttft[number])} ms{seen}"
        )
    return lines


def _simulated_tpot(answer: Answer) -> str:
    return _beside(answer.state.tpot, None if answer.found is None else answer.found.answer.tpot)


def _beside(formula: float, seen: Seen | None) -> str:
    """What was simulated, beside what a formula gave."""
    if seen is None:
        return ""
    return f"; simulated {seen}{', differs' if _differs(formula, seen) else ''}"


def _differs(formula: float, seen: Seen) -> bool:
    """By more than a third of the smaller one."""
    small, large = sorted((formula, seen.mean))
    return large > _APART * small


def _budget(answer: Answer) -> list[str]:
    """step(b) / commit_len of each curve, and those that could not serve the traffic."""
    lines = [
        f"    {one.curve.nodes} nodes ({one.curve.name}): step(b) / commit_len = "
        f"{state.step * 1e3:.4g} / {one.mean_commit_len:.3g} = "
        f"{one.token_seconds(state) * 1e3:.4g} ms a token with b = {state.batch:.3g}; "
        f"{state.replicas} replicas by the formulas"
        for one, state in answer.models
    ]
    return lines + [f"    left out: {reason}" for reason in answer.why_not]


def _beyond(answer: Answer) -> list[str]:
    """What was extrapolated."""
    longest = max(kind.prompt_tokens + kind.answer_tokens for kind in answer.model.kinds)
    return answer.model.curve.beyond(answer.model.batch_limit, longest)


def _seen(name: str, formula: float, seen: Seen | None) -> dict[str, float | bool | None]:
    spread = None if seen is None else seen.spread
    return {
        f"simulated_{name}_ms": None if seen is None else seen.mean * 1e3,
        f"simulated_{name}_spread_ms": None if spread is None else spread * 1e3,
        f"simulated_{name}_p99_ms": None if seen is None else seen.p99 * 1e3,
        f"simulated_{name}_count": None if seen is None else seen.count,
        f"simulated_{name}_differs": None if seen is None else _differs(formula, seen),
    }
