"""The token stream: made once from the corpus and kept; windows of it in an order that the seed decides."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from pyspac.train.corpus import read_stdlib
from pyspac.train.training import save_atomically
from tools.train_demo.common import N_CTX, UserError
from tools.train_demo.tokenizer import encode_modules, train_tokenizer


def load_or_make_tokens(work_dir: Path, n_vocab: int) -> tuple[Tensor, Tensor]:
    """(train, held-out) token streams, each [n_token] int64; made once and then kept in `work_dir`."""
    path = work_dir / "tokens.pt"
    if not path.exists():
        modules = read_stdlib()
        train = [m for m in modules if not m.is_held_out]
        held_out = [m for m in modules if m.is_held_out]
        tokenizer = train_tokenizer([m.text for m in train], n_vocab)
        tokenizer.save(str(work_dir / "tokenizer.json"))
        (work_dir / "held_out.txt").write_text("\n".join(m.name for m in held_out) + "\n")
        save_atomically(
            {k: encode_modules(tokenizer, v) for k, v in (("train", train), ("held_out", held_out))}, path
        )
    tokens = torch.load(path)
    if int(tokens["train"].max()) >= n_vocab or tokens["train"][0] != n_vocab - 1:
        raise UserError(f"{path} was made with another --vocab; use another --work-dir or delete it")
    return tokens["train"], tokens["held_out"]


class Windows:
    """Window number k of an endless, shuffled walk over the stream; epoch e shifts the cuts by a new offset.

    Window k depends on (seed, k) only, so a resumed run sees what an unbroken one would have seen.
    """

    def __init__(self, tokens: Tensor, seed: int) -> None:
        self.tokens, self.seed = tokens, seed
        self.n_per_epoch = (len(tokens) - N_CTX - 1) // N_CTX
        self._epoch, self._starts = -1, torch.empty(0, dtype=torch.int64)

    def __call__(self, k: int) -> Tensor:
        """[N_CTX + 1] int64: the window and the token after it."""
        epoch, i = divmod(k, self.n_per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1000 + epoch)
            offset = int(torch.randint(N_CTX, (), generator=generator))
            self._starts = torch.randperm(self.n_per_epoch, generator=generator) * N_CTX + offset
            self._epoch = epoch
        start = int(self._starts[i])
        return self.tokens[start : start + N_CTX + 1]
