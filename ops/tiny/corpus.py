"""Corpus -> tokenizer and token arrays.

    python corpus.py DEBIAN_FOLDER OUT_FOLDER [--small]

OUT_FOLDER gets tokenizer.json, {train,patterns,chats,held_*}.npy.xz (uint16), sentences.json,
split.json. Documents begin with <|endoftext|>.
"""

import argparse
import io
import json
import lzma
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from shapes import ENDOFTEXT
from sources import SOURCES, Document, documents, fetch, is_held_out
from synthetic import Synthesizer
from tokenizer import train_tokenizer
from tokenizers import Tokenizer

HELD_PROSE = ("anarchism", "shakespeare", "bible", "devil")
PATTERN_CHARS, CHAT_CHARS = 40_000_000, 36_000_000


def split(found: Iterable[Document], rnd: random.Random) -> tuple[list[Document], list[Document]]:
    """(training documents under each package's cap, held-out documents)."""
    everything = list(found)
    held = [d for d in everything if is_held_out(d)]
    rest = [d for d in everything if not is_held_out(d)]
    rnd.shuffle(rest)
    room = {s.package: s.megabytes * 1e6 for s in SOURCES}
    train = []
    for document in rest:
        room[document.package] -= len(document.text)
        if room[document.package] > 0:
            train.append(document)
    return train, held


def sentences_of(docs: Iterable[Document]) -> list[str]:
    """Sentences of 40-140 characters, in order."""
    texts = (re.sub(r"\s+", " ", document.text) for document in docs)
    return [
        sentence
        for text in texts
        for sentence in re.split(r"(?<=[.!?]) ", text)
        if 40 < len(sentence) < 140 and sentence[0].isupper() and sentence[-1] in ".!?"
    ]


def encode(tokenizer: Tokenizer, texts: Sequence[str], lead: bool) -> NDArray[np.uint16]:
    """One array of all texts; each begins with <|endoftext|> (put there if `lead`)."""
    start = [ENDOFTEXT] if lead else []
    return np.concatenate(
        [
            np.array(start + e.ids, dtype=np.uint16)
            for i in range(0, len(texts), 256)
            for e in tokenizer.encode_batch(list(texts[i : i + 256]))
        ]
    )


def save(item: tuple[Path, NDArray[np.uint16]]) -> str:
    path, array = item
    buffer = io.BytesIO()
    np.save(buffer, array)
    path.write_bytes(lzma.compress(buffer.getvalue(), preset=1))
    return f"{path.name}: {array.size} tokens, {path.stat().st_size} bytes"


def generate(make: Callable[[], str], chars: int) -> list[str]:
    out: list[str] = []
    total = 0
    while total < chars:
        out.append(make())
        total += len(out[-1])
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("debian", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="keep this one instead of training it")
    parser.add_argument("--small", action="store_true", help="a tenth, to try the scripts")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rnd = random.Random(7)
    fetch(options.debian)
    train, held = split(documents(options.debian), rnd)
    if options.small:
        train = train[::10]
    counts: Counter[str] = Counter()
    for d in train:
        counts[d.source] += len(d.text)
    print("training characters", dict(counts), "documents", len(train), flush=True)

    held_sentences = sentences_of(d for d in held if d.source in HELD_PROSE)
    rnd.shuffle(held_sentences)
    train_sentences = sentences_of(d for d in train if d.source in HELD_PROSE)
    rnd.shuffle(train_sentences)
    synthesizer = Synthesizer(rnd, train, train_sentences[:20000])
    scale = 10 if options.small else 1
    patterns = generate(synthesizer.pattern, PATTERN_CHARS // scale)
    chats = generate(synthesizer.chat, CHAT_CHARS // scale)
    print("patterns", len(patterns), "chats", len(chats), flush=True)

    path = options.out / "tokenizer.json"
    sample = [d.text[:20000] for d in rnd.sample(train, min(len(train), 1500))] + patterns[::40]
    if options.tokenizer:
        shutil.copyfile(options.tokenizer, path)
        tokenizer = Tokenizer.from_file(str(path))
    else:
        tokenizer = train_tokenizer(sample, path)
    print("tokenizer ready", flush=True)
    arrays = {
        "train": encode(tokenizer, [d.text for d in train], lead=True),
        "patterns": encode(tokenizer, patterns, lead=True),
        "chats": encode(tokenizer, chats, lead=False),
    }
    for source in (*HELD_PROSE, "code"):
        texts = [d.text for d in held if d.source == source]
        arrays[f"held_{source}"] = encode(tokenizer, texts, lead=True)
    with ThreadPoolExecutor(2) as pool:
        for line in pool.map(save, ((options.out / f"{n}.npy.xz", a) for n, a in arrays.items())):
            print(line, flush=True)
    (options.out / "sentences.json").write_text(json.dumps(held_sentences[:200], indent=0))
    record = {
        "train_characters": counts,
        "tokens": {n: int(a.size) for n, a in arrays.items()},
        "held_out": [[d.source, d.name] for d in held],
    }
    (options.out / "split.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
