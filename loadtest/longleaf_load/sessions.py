"""What each arrival asks: turns of a conversation, drawn from the plan's seed and its number."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from longleaf_load.arrivals import Arrival, arrivals
from longleaf_load.lengths import Even, PlanError
from longleaf_load.plan import Plan
from longleaf_load.prompts import PromptCounter, PromptSource

_QUESTION = (20, 60)
"""Tokens of a question about a document, or of a later turn."""


def check_lengths(plan: Plan, counter: PromptCounter) -> None:
    """``PlanError`` where the plan writes down a length that its tokenizer cannot make."""
    least = _shortest(plan, counter)
    of = "the shortest prompt that can be made with this tokenizer"
    if plan.longest < least:
        raise PlanError(f"prompts.longest: {plan.longest} tokens are less than {of}, {least}")
    if plan.prompt is not None and not plan.trace and plan.prompt.least < least:
        raise PlanError(f"prompts.length: {plan.prompt.least} tokens are less than {of}, {least}")
    for line in plan.trace:
        if line.prompt_tokens < least:
            raise PlanError(
                f"{line.place}: prompt_tokens: {line.prompt_tokens} are less than {of}, {least}"
            )
    if plan.document is None or not plan.document_share:
        return
    least, most = counter.shortest_part, _longest_document(plan, counter)
    if plan.document.least < least:
        raise PlanError(
            f"documents.length: {plan.document.least} tokens are less than the shortest document "
            f"that can be made with this tokenizer, {least}"
        )
    if plan.document.most > most:
        raise PlanError(
            f"documents.length: {plan.document.most} tokens and a question are more than "
            f"prompts.longest, {plan.longest}: a document has at most {most}"
        )


def _shortest(plan: Plan, counter: PromptCounter) -> int:
    return counter.shortest if plan.api == "chat" else 1


def _longest_document(plan: Plan, counter: PromptCounter) -> int:
    roles = [{"role": role, "content": "x"} for role in ("system", "user")]
    around = counter.count_messages(roles) - 2 * counter.count("x")
    return plan.longest - around - _QUESTION[1]


@dataclass(frozen=True, slots=True)
class Turn:
    """One request to make. ``leave_after``: the client leaves after so many events, None stays.
    ``leave_seconds``: it leaves then if no event has come, None waits for one.
    """

    body: dict[str, Any]
    text: str
    prompt_tokens: int
    max_tokens: int
    number: int
    document: int | None
    leave_after: int | None
    leave_seconds: float | None


class Sessions:
    """Draws sessions; the same plan and seed give the same ones, on however many workers."""

    def __init__(self, plan: Plan, source: PromptSource, model: str) -> None:
        self._plan = plan
        self._source = source
        self._model = model
        self._documents = [self._document(number) for number in range(plan.documents)]

    def arrivals(self) -> Iterator[Arrival]:
        """All arrivals; a trace with times brings its own."""
        plan = self._plan
        if plan.timed:
            times = [line.at for line in plan.trace if line.at is not None]
            stretch = plan.seconds / max(times[-1], 1e-3)
            for number, at in enumerate(times):
                yield Arrival(number, at * stretch, 0)
            return
        yield from arrivals(plan.phases, plan.seed)

    def turns(self, arrival: Arrival) -> "Conversation":
        """The session that begins with ``arrival``."""
        random_ = random.Random(f"{self._plan.seed} {arrival.number}")
        return Conversation(self, self._plan, self._source, arrival.number, random_)

    def _document(self, number: int) -> tuple[str, str, int] | None:
        """Kind, text and length of a shared document."""
        plan = self._plan
        if plan.document is None or not plan.document_share:
            return None
        random_ = random.Random(f"document {plan.seed} {number}")
        kind = _kind(plan, random_)
        length = _within(
            plan.document.draw(random_),
            self._source.shortest_part,
            _longest_document(plan, self._source),
        )
        return kind, self._source.part(kind, length, random_), length

    def pick_document(self, random_: random.Random) -> tuple[int, str, str, int] | None:
        """A document: the first ones are asked about most (Zipf)."""
        if random_.random() >= self._plan.document_share:
            return None
        weights = [1 / rank for rank in range(1, len(self._documents) + 1)]
        number = random_.choices(range(len(self._documents)), weights)[0]
        document = self._documents[number]
        return None if document is None else (number, *document)

    @property
    def model(self) -> str:
        """The served model's name."""
        return self._model


def _within(length: int, least: int, most: int) -> int:
    """What a distribution draws beyond all that is written down is cut off at the limits."""
    return min(max(length, least), most)


def _kind(plan: Plan, random_: random.Random) -> str:
    kinds, shares = zip(*plan.texts, strict=True)
    return str(random_.choices(kinds, shares)[0])


class Conversation:
    """Makes its turns one by one; each later one has the answer to the one before in it."""

    def __init__(
        self,
        sessions: Sessions,
        plan: Plan,
        source: PromptSource,
        number: int,
        random_: random.Random,
    ) -> None:
        self._sessions = sessions
        self._plan = plan
        self._source = source
        self._random = random_
        self._line = plan.trace[number % len(plan.trace)] if plan.trace else None
        self._length_random = Even(plan.seed, number) if plan.even else random_
        self._messages: list[dict[str, str]] = []
        self._done = 0
        self._kind = (self._line.text if self._line else None) or _kind(plan, random_)

    def next(self, answer: str | None = None) -> Turn | None:
        """The next request, ``answer`` being what came to the one before; None at the end."""
        if self._done and (answer is None or self._done >= self._plan.turns):
            return None
        self._done += 1
        if self._done == 1:
            return self._first()
        assert answer is not None
        question = self._source.part(self._kind, self._random.randint(*_QUESTION), self._random)
        self._messages += [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": question},
        ]
        length = self._source.count_messages(self._messages)
        if length + 1 > self._plan.longest:
            return None
        return self._chat(length, None)

    def _first(self) -> Turn:
        document = self._sessions.pick_document(self._random) if self._line is None else None
        if document is None:
            length = self._length()
            if self._plan.api == "completions":
                return self._turn(
                    {"prompt": self._source.ids(self._kind, length, self._random)}, length, None
                )
            text = self._source.text(self._kind, length, self._random)
            self._messages = [{"role": "user", "content": text}]
            return self._chat(length, None)
        number, self._kind, text, length = document
        question = self._source.part(self._kind, self._random.randint(*_QUESTION), self._random)
        self._messages = [
            {"role": "system", "content": text},
            {"role": "user", "content": question},
        ]
        return self._chat(
            length
            + self._source.count_messages(
                [{"role": "system", "content": ""}, {"role": "user", "content": question}]
            ),
            number,
        )

    def _length(self) -> int:
        if self._line is not None:
            length = self._line.prompt_tokens
        else:
            assert self._plan.prompt is not None
            length = self._plan.prompt.draw(self._length_random)
        return _within(length, _shortest(self._plan, self._source), self._plan.longest)

    def _chat(self, length: int, document: int | None) -> Turn:
        return self._turn({"messages": list(self._messages)}, length, document)

    def _turn(self, prompt: dict[str, Any], length: int, document: int | None) -> Turn:
        given = None if self._line is None else self._line.max_tokens
        limit = self._plan.answer.draw(self._random) if given is None else given
        leaves = self._random.random() < self._plan.cancel_share
        after = seconds = None
        if leaves and self._random.random() < 0.5:
            after, seconds = 1, self._random.expovariate(1 / self._plan.cancel_seconds)
        elif leaves:
            after = self._random.randint(2, 20)
        body = {
            "model": self._sessions.model,
            **prompt,
            "max_tokens": limit,
            "temperature": 0,
            "seed": self._random.getrandbits(31),
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "metadata": {"text": self._kind},
        }
        return Turn(body, self._kind, length, limit, self._done, document, after, seconds)
