"""The vocabulary: texts in, a byte-level BPE that llama.cpp calls "qwen2" out, and texts as tokens."""

from __future__ import annotations

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from pyspac.train.corpus import Module
from tools.train_demo.common import EOS
from tools.train_demo.split import QWEN2_SPLIT


def train_tokenizer(texts: list[str], n_vocab: int) -> Tokenizer:
    """Byte-level BPE of exactly `n_vocab` tokens, the last of them the end-of-text token."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=n_vocab - 1, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([EOS])
    assert tokenizer.get_vocab_size() == n_vocab
    return tokenizer


def eos_id(tokenizer: Tokenizer) -> int:
    """The id of the end-of-text token, which every vocabulary made here has."""
    found = tokenizer.token_to_id(EOS)
    assert found is not None
    return int(found)


def encode_modules(tokenizer: Tokenizer, modules: list[Module]) -> Tensor:
    """All modules behind one another, an end-of-text token before each: [n_token] int64."""
    eos = eos_id(tokenizer)
    ids: list[int] = []
    for encoding in tokenizer.encode_batch([m.text for m in modules]):
        ids += [eos, *encoding.ids]
    return torch.tensor(ids, dtype=torch.int64)
