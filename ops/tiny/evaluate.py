"""commit_len of an exported pair, measured with torch in float32 (greedy).

    python evaluate.py MODELS_FOLDER PROMPTS.json.xz [--out table.json] [--contexts 1024,4096,16384]

MODELS_FOLDER holds tiny-target and tiny-drafter. The chain is 7 drafts, the tree 16 nodes grown
from that chain.
"""

import argparse
import json
import lzma
import time
from pathlib import Path
from typing import Any

import torch
from decode import commit_lens, distinct_ngrams, generate
from export import load_exported
from shapes import MASK, PAD, RESERVED
from tokenizers import Tokenizer

COUNTS = ("{i}, ", "{i}\n", "line {i}\n", "item {i}: ")
CHATS = (
    "Count from 1 to 200.",
    "Repeat this sentence 20 times: The river was wide and the boat was small.",
    "List the days of the week, 5 times.",
    "Write 20 getters for the fields width_1 to width_20.",
)
Prompts = list[list[int]]


def last(tokens: list[int], end: float, length: int) -> list[int]:
    """`length` tokens that end at a share of the text (or as early as there are enough)."""
    stop = max(length, min(int(end * len(tokens)), len(tokens)))
    return tokens[stop - length : stop]


def prompts(
    tokenizer: Tokenizer, data: dict[str, Any], length: int, positions: int
) -> dict[str, Prompts]:
    """Category -> prompts of exactly `length` tokens."""

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text).ids
        return ids

    def grown(piece: str, n: int) -> list[int]:
        """The first tokens of a template's text, cut at a place that depends on n."""
        lines, ids = [], list[int]()
        for i in range(1 + 13 * n, 7 * length):
            lines.append(piece.format(i=i, j=10 * i))
            if len(lines) % 500 == 0 or i == 7 * length - 1:
                ids = encode("".join(lines))
                if len(ids) >= length + 64:
                    break
        return ids[5 * n : 5 * n + length]

    out: dict[str, Prompts] = {
        "repeat": [],
        "count": [],
        "boilerplate": [],
        "prose": [],
        "code": [],
    }
    for n in range(12):
        sentence = encode(" " + data["sentences"][n])
        whole = sentence * (length // len(sentence) + 2)
        out["repeat"].append(whole[n : n + length])
        out["count"].append(grown(COUNTS[n % 4], n))
    for n, item in enumerate(data["boilerplate"]):
        out["boilerplate"].append(grown(item["template"], n))
    for kind in ("prose", "code"):
        for item in data[kind]:
            tokens = encode(item["text"])
            first = 0.3 if length < 8000 else 0.85
            for n in range(positions):
                end = first + (1.0 - first) * (n + 1) / positions
                if len(tokens) >= length:
                    out[kind].append(last(tokens, end, length))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--contexts", default="1024,4096,16384")
    parser.add_argument("--positions", type=int, default=10, help="cuts of a prose or code source")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.backends.cuda.enable_cudnn_sdp(False)  # it compiles anew for every mask shape
    target, drafter = (m.to(options.device) for m in load_exported(options.models))
    tokenizer = Tokenizer.from_file(str(options.models / "tiny-target" / "tokenizer.json"))
    data = json.loads(lzma.decompress(options.prompts.read_bytes()))
    table: list[dict[str, Any]] = []
    begun, never = time.monotonic(), 0

    def measure(kind: str, length: int, rows: Prompts, count: int) -> None:
        nonlocal never
        tokens = torch.tensor(rows, device=options.device)
        tokens = generate(target, tokens, count)
        made = tokens[:, tokens.shape[1] - count :]
        never += int(
            torch.isin(made, torch.tensor([MASK, PAD, RESERVED], device=made.device)).sum()
        )
        got = commit_lens(target, drafter, tokens, tokens.shape[1] - count)
        chain, tree = (sum(x) / len(x) for x in (got.chain, got.tree))
        row = {
            "kind": kind,
            "context": length,
            "prompts": len(rows),
            "generated": count,
            "chain": round(chain, 3),
            "tree": round(tree, 3),
            "ratio": round(tree / chain, 3),
            "lowest": round(min(got.tree), 2),
            "highest": round(max(got.tree), 2),
            "distinct8": round(distinct_ngrams(made.tolist()), 3),
            "accuracy": got.accuracy,
        }
        table.append(row)
        print(
            f"[{time.monotonic() - begun:5.1f}]",
            " ".join(f"{k} {v}" for k, v in row.items()),
            flush=True,
        )
        if length <= 1024:
            print(
                "   ",
                repr(tokenizer.decode(rows[0][-24:])),
                "=>",
                repr(tokenizer.decode(made[0].tolist(), skip_special_tokens=False)),
            )

    for length in (int(c) for c in options.contexts.split(",")):
        for kind, rows in prompts(tokenizer, data, length, options.positions).items():
            if rows:
                measure(kind, length, rows, 48 + 7 if kind in ("prose", "code") else 128)
    for question in CHATS:
        ids = tokenizer.encode(f"<|endoftext|><|user|>{question}<|end|><|assistant|>").ids
        measure("chat", len(ids), [ids], 128)
    print("mask, pad or reserved tokens generated:", never)
    if options.out:
        options.out.write_text(json.dumps({"never_tokens": never, "table": table}, indent=1))


if __name__ == "__main__":
    main()
