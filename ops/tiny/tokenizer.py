"""Byte-level BPE of 4096 tokens; digits stand alone, so that counting is spelled out."""

from collections.abc import Iterable
from pathlib import Path

from shapes import SPECIAL_TOKENS, VOCAB
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


def train_tokenizer(texts: Iterable[str], path: Path) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    if tokenizer.get_vocab_size() != VOCAB:
        raise ValueError(f"tokenizer has {tokenizer.get_vocab_size()} tokens, wanted {VOCAB}")
    tokenizer.save(str(path))
    return tokenizer
