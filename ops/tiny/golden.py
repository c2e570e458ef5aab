"""Golden logits of the exported pair, float32, for the tests of the numpy engine.

    python golden.py MODELS_FOLDER PROMPTS.json.xz OUT_FOLDER

target.npz: HF DeepseekV3ForCausalLM on each prompt. Per prompt n: tokens_n int64[T],
positions_n int64[P], logits_n float32[P, V] (after the token at that position).
drafter.npz: ops/tiny's drafter. Per prompt n: tokens_n int64[T], anchors_n int64[A] (the anchor is
the token at that position; the context is what stands before it), logits_n float32[A, 7, V].
Both hold `versions`, a JSON string.
"""

import json
import lzma
import platform
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from export import load_exported
from tokenizers import Tokenizer
from transformers import DeepseekV3ForCausalLM

CHAT = "<|endoftext|><|user|>Count from 1 to 30.<|end|><|assistant|>1, 2, 3, 4, 5, 6, 7, 8"


def prompts(tokenizer: Tokenizer, path: Path) -> list[list[int]]:
    """Prose, code, a repeated sentence and a chat; the longest passes the drafter's window."""
    data = json.loads(lzma.decompress(path.read_bytes()))
    prose = tokenizer.encode(data["prose"][0]["text"][2000:6000]).ids[:700]
    code = tokenizer.encode(data["code"][0]["text"][3000:5000]).ids[:200]
    repeat = (tokenizer.encode(" " + data["sentences"][3]).ids * 20)[:300]
    return [prose, code, repeat, tokenizer.encode(CHAT).ids]


@torch.no_grad()
def main() -> None:
    models, data, out = (Path(a) for a in sys.argv[1:4])
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(models / "tiny-target" / "tokenizer.json"))
    versions = json.dumps(
        {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": np.__version__,
            "machine": platform.machine(),
            "dtype": "float32",
        }
    )
    reference = DeepseekV3ForCausalLM.from_pretrained(
        models / "tiny-target", dtype=torch.float32
    ).eval()
    target, drafter = load_exported(models)
    for_target: dict[str, object] = {"versions": versions}
    for_drafter: dict[str, object] = {"versions": versions}
    for n, ids in enumerate(prompts(tokenizer, data)):
        tokens = torch.tensor([ids])
        count = len(ids)
        positions = np.unique(np.linspace(0, count - 1, 8).astype(np.int64))
        for_target[f"tokens_{n}"] = np.array(ids)
        for_target[f"positions_{n}"] = positions
        for_target[f"logits_{n}"] = reference(tokens).logits[0].numpy()[positions]
        if n == 1:
            continue
        anchors = torch.tensor([count // 2, count - 9] if n == 0 else [count - 9])
        logits = drafter(target, tokens, target(tokens)[1], anchors)
        for_drafter[f"tokens_{n}"] = np.array(ids)
        for_drafter[f"anchors_{n}"] = anchors.numpy()
        for_drafter[f"logits_{n}"] = logits[0].numpy()
    np.savez_compressed(out / "target.npz", **for_target)  # type: ignore[arg-type]
    np.savez_compressed(out / "drafter.npz", **for_drafter)  # type: ignore[arg-type]
    for path in sorted(out.glob("*.npz")):
        print(
            path.name, path.stat().st_size, "bytes", {k: v.shape for k, v in np.load(path).items()}
        )


if __name__ == "__main__":
    main()
