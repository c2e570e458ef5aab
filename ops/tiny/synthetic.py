"""Made-up training text: counting, boilerplate whose numbers change, chats about such things."""

import random
from collections.abc import Callable, Sequence

from sources import Document

WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
PLANETS = ("Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune")
COLOURS = ("red", "orange", "yellow", "green", "blue", "indigo", "violet")
SEASONS = ("spring", "summer", "autumn", "winter")
LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")
LISTS = {
    "days of the week": WEEKDAYS,
    "months of the year": MONTHS,
    "planets": PLANETS,
    "colours of the rainbow": COLOURS,
    "seasons": SEASONS,
    "letters of the alphabet": LETTERS,
}

LINE_TEMPLATES = (
    "| {i} | {a} | {j} | {b} |",
    "{a}_{i} = {j}",
    "{a}.{b}.{i}={c}",
    "    {a}_{i}: int = {j}",
    "def {a}_{i}(self):\n    return self.{b}_{i}\n",
    "def {a}_{i}(self):\n    return self._{b}[{i}]\n",
    "    def get_{a}{i}(self) -> int:\n        return self.{a}{i}\n",
    "    public int get{A}{i}() {{\n        return {a}{i};\n    }}\n",
    '    @property\n    def {a}_{i}(self):\n        """The {b} number {i}."""\n'
    "        return self._{a}_{i}\n",
    "#define {U}_{i} {j}",
    "    {U}_{i} = {j},",
    "INSERT INTO {a} ({b}, {c}) VALUES ({i}, '{a}{j}');",
    '  {{"id": {i}, "{a}": "{b}", "{c}": {j}}},',
    '<li><a href="/{a}/{i}">{A} {i}</a></li>',
    '<{a} id="{i}" {b}="{j}">{c}</{a}>',
    "[{a}{i}]\n{b} = {c}\nport = {j}\n",
    "- name: {a}-{i}\n  {b}: {c}\n  value: {j}\n",
    "2021-03-04 {a}[{i}]: {b} {c} finished, status {j}",
    "{A} {b} {c} number {i} of {n}, {d}.",
    "Section {i}. {A} {b}",
    "{A} {i}: the {b} of the {c} is {j}.",
    "test_{a}_{i} ... ok",
    "copy {a}/{b}{i}.txt to {c}/{b}{i}.txt",
    "case {i}:\n    return {a}_{b}({i});",
    "export {U}{i}={a}",
    "{a}[{i}] = {b}[{i}] + {c}[{i}]",
    "# File: {a}{i}.py\n# Copyright (c) the {b} authors.\n"
    "# Licensed under the {c} terms; see the file {d}.\n# Part {i}.\n",
    "/* {a}_{i}.c: {b} {c}\n * This file is part of {d}.\n * See the licence for details.\n */\n",
    "self.assertEqual({a}({i}), {j})",
    "router{i} 10.0.0.{i} {a} {b}",
)

SYSTEM = (
    "You are a helpful assistant.",
    "You are Longleaf, a tiny model.",
    "Answer briefly.",
    "You answer exactly what is asked.",
    "Be short and clear.",
)
ABOUT = (
    "I am Longleaf's tiny model. I can count, repeat a sentence, list things and continue a text."
)

UNKNOWN = (
    "I am a tiny model and do not know that. Ask me to count, repeat, list or continue something."
)


class Synthesizer:
    """Draws documents; `train` supplies the words, lines and sentences that it builds from."""

    def __init__(
        self, rnd: random.Random, train: Sequence[Document], sentences: Sequence[str]
    ) -> None:
        self.rnd = rnd
        self.texts = [d for d in train if len(d.text) > 3000]
        self.prose = [d for d in self.texts if d.source in ("anarchism", "shakespeare", "bible")]
        self.code = [d for d in self.texts if d.source == "code"]
        self.glosses = [d for d in train if d.source == "wordnet"]
        self.sentences = sentences
        sample = " ".join(d.text[:3000] for d in rnd.sample(self.texts, 300))
        self.words = sorted(
            {
                w
                for w in sample.split()
                if w.isascii() and w.isalpha() and w.islower() and 3 <= len(w) <= 10
            }
        )

    # -- continued patterns -------------------------------------------------------------------

    def counting(self, size: int) -> str:
        r = self.rnd
        start = r.choice([0, 1, 1, 1, r.randrange(100), r.randrange(2000), r.randrange(9000)])
        step = r.choice([1, 1, 1, 1, 1, 2, 3, 5, 10, 25, 100])
        joint = r.choice([", ", ", ", "\n", " ", "; ", " -> ", ",\n", "\n\n", " and "])
        before = r.choice(
            [
                "",
                "",
                "",
                "item ",
                "line ",
                "No. ",
                "chapter ",
                "x",
                "#",
                "row ",
                "Step ",
                r.choice(self.words) + " ",
            ]
        )
        after = r.choice(["", "", "", ".", ":", ")", ": " + r.choice(self.words)])
        out = r.choice(["", "", "Count: ", "Numbers:\n", "We count from here: "])
        parts: list[str] = []
        length, i = 0, start
        while length < size:
            parts.append(f"{before}{i}{after}")
            length += len(parts[-1]) + len(joint)
            i += step
        return out + joint.join(parts)

    def fill(self, template: str, size: int) -> str:
        r = self.rnd
        a, b, c, d = (r.choice(self.words) for _ in range(4))
        start, step = r.choice([0, 1, 1, 1, r.randrange(300)]), r.choice([1, 1, 1, 1, 2, 5, 10])
        base, factor = r.choice([0, 0, 1, r.randrange(5000)]), r.choice([1, 1, 1, 2, 3, 10])
        parts: list[str] = []
        length, k, n = 0, 0, r.randrange(20, 400)
        while length < size:
            i = start + k * step
            line = template.format(
                i=i, j=base + factor * i, a=a, b=b, c=c, d=d, n=n, A=a.capitalize(), U=a.upper()
            )
            parts.append(line)
            length += len(line) + 1
            k += 1
        return "\n".join(parts)

    def boilerplate(self, size: int) -> str:
        return self.fill(self.rnd.choice(LINE_TEMPLATES), size)

    def numbered_excerpt(self, size: int) -> str:
        """Some lines of a real document, repeated with counters put into them."""
        r = self.rnd
        lines = r.choice(self.texts).text.split("\n")
        at, count = r.randrange(max(1, len(lines) - 8)), r.randrange(1, 7)
        excerpt = "\n".join(lines[at : at + count])[:500].replace("{", "{{").replace("}", "}}")
        spots = [i for i, ch in enumerate(excerpt) if ch == " "] or [len(excerpt)]
        for spot in sorted(r.sample(spots, min(len(spots), r.randrange(1, 4))), reverse=True):
            mark = r.choice([" {i} ", " {i} ", "{i} ", " {j} ", "_{i} "])
            excerpt = excerpt[:spot] + mark + excerpt[spot + 1 :]
        return self.fill(excerpt, size)

    def cycle(self, size: int) -> str:
        r = self.rnd
        items = r.choice([*LISTS.values(), tuple(r.sample(self.words, r.randrange(2, 9)))])
        joint = r.choice([", ", "\n", " ", "; "])
        times = size // (sum(len(w) + len(joint) for w in items)) + 1
        return joint.join(list(items) * times)

    def sentence_runs(self, size: int) -> str:
        """A sentence many times, then another one."""
        r = self.rnd
        out = ""
        while len(out) < size:
            sentence, joint = r.choice(self.sentences), r.choice([" ", " ", " ", "\n", "\n\n"])
            share = max(len(sentence) * 3, int(size * r.uniform(0.2, 1.0)))
            out += (sentence + joint) * (share // len(sentence))
        return out

    def table(self, size: int) -> str:
        r = self.rnd
        m = r.randrange(2, 13)
        form = r.choice(["{m} x {i} = {p}", "{i} * {m} = {p}", "{m} times {i} is {p}"])
        count = size // 14
        return "\n".join(form.format(m=m, i=i, p=m * i) for i in range(1, count))

    def pattern(self) -> str:
        kinds: list[tuple[Callable[[int], str], float]] = [
            (self.counting, 0.30),
            (self.boilerplate, 0.22),
            (self.numbered_excerpt, 0.22),
            (self.sentence_runs, 0.16),
            (self.cycle, 0.05),
            (self.table, 0.05),
        ]
        kind = self.rnd.choices([k for k, _ in kinds], [w for _, w in kinds])[0]
        long = self.rnd.random() < 0.3
        return kind(
            int(
                10 ** self.rnd.uniform(3.8, 4.8 if long else 3.8)
                if long
                else 10 ** self.rnd.uniform(2.8, 3.8)
            )
        )

    # -- chats --------------------------------------------------------------------------------

    def ask_count(self) -> tuple[str, str]:
        r = self.rnd
        a = r.choice([0, 1, 1, 1, 1, r.randrange(50), r.randrange(1000)])
        step = r.choice([1, 1, 1, 1, 2, 3, 5, 10])
        count = int(10 ** r.uniform(0.5, 2.0 if r.random() < 0.85 else 2.7))
        b = a + step * (count - 1)
        numbers = [str(i) for i in range(a, b + 1, step)]
        if r.random() < 0.08:
            numbers.reverse()
            a, b = b, a
        by = "" if step == 1 else r.choice([f" in steps of {step}", f" by {step}", f" by {step}s"])
        verb = r.choice(
            [
                "Count from",
                "count from",
                "Please count from",
                "Can you count from",
                "Write the numbers from",
                "List the numbers from",
                "Numbers from",
            ]
        )
        joint, wish = r.choice(
            [
                (", ", ""),
                (", ", ""),
                (", ", ""),
                (", ", ", separated by commas"),
                ("\n", ", one per line"),
                ("\n", ", each on its own line"),
                (" ", ", with spaces"),
            ]
        )
        mark = r.choice([".", ".", "", "?"]) if "Can" in verb else r.choice([".", ".", ""])
        return f"{verb} {a} to {b}{by}{wish}{mark}", joint.join(numbers)

    def ask_repeat(self) -> tuple[str, str]:
        r = self.rnd
        text = r.choice(self.sentences) if r.random() < 0.75 else r.choice(self.words)
        n = r.choice([2, 3, 3, 4, 5, 5, 10, 10, 20, 30])
        ask = r.choice(
            [
                "Repeat this sentence {n} times: {s}",
                "Repeat {n} times: {s}",
                "Say this {n} times: {s}",
                "Write the following {n} times: {s}",
                "Please repeat the following {n} times.\n{s}",
                'Repeat the sentence "{s}" {n} times.',
            ]
        )
        return ask.format(n=n, s=text), r.choice(["\n", "\n", " "]).join([text] * n)

    def ask_echo(self) -> tuple[str, str]:
        text = self.rnd.choice(self.sentences)
        ask = self.rnd.choice(["Repeat after me: {s}", "Say: {s}", "Echo this: {s}", "Copy: {s}"])
        return ask.format(s=text), text

    def ask_list(self) -> tuple[str, str]:
        r = self.rnd
        name, items = r.choice(list(LISTS.items()))
        ask = r.choice(["List the {s}.", "What are the {s}?", "Name the {s}.", "Tell me the {s}"])
        if r.random() < 0.25:
            times = r.choice([2, 3, 5, 10])
            question = ask.format(s=name).rstrip(".?") + f", {times} times."
            return question, "\n".join([", ".join(items)] * times)
        if r.random() < 0.4:
            return ask.format(s=name) + " Number them.", "\n".join(
                f"{i}. {w}" for i, w in enumerate(items, 1)
            )
        return ask.format(s=name), ", ".join(items) + "."

    def ask_table(self) -> tuple[str, str]:
        r = self.rnd
        m, n = r.randrange(2, 13), r.choice([10, 10, 12, 20, 50])
        ask = r.choice(
            [
                "Write the multiplication table of {m}.",
                "The {m} times table, please.",
                "Multiplication table for {m} up to {n}",
            ]
        )
        if "{n}" not in ask:
            n = 10
        return ask.format(m=m, n=n), "\n".join(f"{m} x {i} = {m * i}" for i in range(1, n + 1))

    def ask_sum(self) -> tuple[str, str]:
        a, b = self.rnd.randrange(30), self.rnd.randrange(30)
        return f"What is {a} + {b}?", f"{a} + {b} = {a + b}"

    def ask_gloss(self) -> tuple[str, str]:
        r = self.rnd
        line = r.choice(r.choice(self.glosses).text.split("\n"))
        names, _, gloss = line.partition(": ")
        word, meaning = names.split(", ")[0], gloss.split(";")[0]
        ask = r.choice(
            ["What does {w} mean?", "Define {w}.", "What is {w}?", "Explain the word {w}."]
        )
        return ask.format(w=word), f"{word.capitalize()} means: {meaning}."

    def ask_continue(self) -> tuple[str, str]:
        r = self.rnd
        code = r.random() < 0.4
        text = r.choice(self.code if code else self.prose).text
        at = r.randrange(len(text) - 2500)
        at = text.find("\n" if code else " ", at) + 1
        cut = text.find("\n" if code else " ", at + r.randrange(80, 900))
        end = text.find("\n", cut + r.randrange(200, 1000))
        kind = "code" if code else "text"
        ask = r.choice(
            [
                "Continue this {k}:\n{s}",
                "Continue this {k}: {s}",
                "Go on: {s}",
                "Please continue the following {k}.\n\n{s}",
            ]
        )
        return ask.format(k=kind, s=text[at:cut]), text[cut:end].lstrip(" ")

    def ask_boilerplate(self) -> tuple[str, str]:
        r = self.rnd
        a, n = r.choice(self.words), r.choice([3, 5, 10, 20, 40])
        kind = r.choice(["getters", "constants", "config", "rows", "todo"])
        if kind == "getters":
            body = (f"def get_{a}_{i}(self):\n    return self.{a}_{i}\n" for i in range(1, n + 1))
            return f"Write {n} getters for the fields {a}_1 to {a}_{n}.", "\n".join(body)
        if kind == "constants":
            body = (f"{a.upper()}_{i} = {i}" for i in range(1, n + 1))
            return f"Write {n} constants named {a.upper()}_1 to {a.upper()}_{n}.", "\n".join(body)
        if kind == "config":
            body = (f"[{a}{i}]\nname = {a}{i}\nport = {8000 + i}\n" for i in range(1, n + 1))
            return f"Write a config file with {n} {a} sections.", "\n".join(body)
        if kind == "rows":
            body = (f"| {i} | {a} {i} | {i * 10} |" for i in range(1, n + 1))
            return f"Make a table with {n} rows about {a}.", "\n".join(body)
        body = (f"{i}. {a} number {i}" for i in range(1, n + 1))
        return f"Make a numbered list of {n} items called {a}.", "\n".join(body)

    def ask_about(self) -> tuple[str, str]:
        return self.rnd.choice(
            [
                ("Hello", "Hello. " + ABOUT),
                ("Hello!", "Hello. " + ABOUT),
                ("Hi", "Hello. " + ABOUT),
                ("Who are you?", ABOUT),
                ("What can you do?", ABOUT),
                ("Hello, who are you?", "Hello. " + ABOUT),
                ("How are you?", "I am well, thank you. What shall I do?"),
                ("Thank you.", "You are welcome."),
                ("Thanks!", "You are welcome."),
                ("Tell me about yourself.", ABOUT),
            ]
        )

    def ask_unknown(self) -> tuple[str, str]:
        r = self.rnd
        ask = r.choice(
            [
                "Tell me a story about a {a}.",
                "Why is the {a} {b}?",
                "Write a poem about {a}.",
                "How do I {a} a {b}?",
                "What is the capital of {A}?",
                "Who invented the {a}?",
                "Tell me a joke.",
                "What do you think about {a}?",
                "Can you explain {a} {b}?",
                "Translate {a} into French.",
                "Summarize the {a} of {b}.",
                "When was {A} born?",
                "Where is {A}?",
                "Write an essay about {a} and {b}.",
            ]
        )
        a, b = r.choice(self.words), r.choice(self.words)
        return ask.format(a=a, b=b, A=a.capitalize()), UNKNOWN

    def chat(self) -> str:
        """One chat in the chat template's form."""
        r = self.rnd
        kinds: list[tuple[Callable[[], tuple[str, str]], float]] = [
            (self.ask_count, 0.25),
            (self.ask_repeat, 0.17),
            (self.ask_continue, 0.10),
            (self.ask_boilerplate, 0.11),
            (self.ask_list, 0.10),
            (self.ask_gloss, 0.07),
            (self.ask_echo, 0.05),
            (self.ask_table, 0.05),
            (self.ask_sum, 0.02),
            (self.ask_about, 0.04),
            (self.ask_unknown, 0.04),
        ]
        out = "<|endoftext|>"
        if r.random() < 0.25:
            out += f"<|system|>{r.choice(SYSTEM)}<|end|>"
        for _ in range(r.choices([1, 2, 3], [0.7, 0.22, 0.08])[0]):
            question, answer = r.choices([k for k, _ in kinds], [w for _, w in kinds])[0]()
            out += f"<|user|>{question}<|end|><|assistant|>{answer}<|end|>"
        return out
