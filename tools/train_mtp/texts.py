"""What the model writes itself: it goes on from pieces of a corpus, half of the time greedily.

A drafter guesses what its model will say, not what somebody else wrote, so it learns from the model's text.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from pyspac.errors import UsageError
from pyspac.train.corpus import Module
from pyspac.train.training import load_checkpoint, save_atomically
from tools.train_mtp.base import Base

ROWS = 128  # texts that are written at a time


@dataclass(frozen=True)
class Texts:
    """Texts of equal length, the model's own behind a prompt of `n_prompt` tokens.

    `ids` is [n_text, n_token] int64; `is_greedy`, the same shape in bool, says of each written token
    whether the model found it the likeliest.
    """

    ids: Tensor
    is_greedy: Tensor
    n_prompt: int

    def __len__(self) -> int:
        return len(self.ids)


def cut_prompts(base: Base, modules: list[Module], n_text: int, n_prompt: int, seed: int) -> Tensor:
    """Pieces of the modules, one behind another, in an order that the seed decides: [n_text, n_prompt]."""
    ids = [i for e in base.tokenizer.encode_batch([m.text for m in modules]) for i in e.ids]
    if len(ids) <= n_prompt:
        raise UsageError(f"the corpus has {len(ids)} tokens to begin texts with; give a longer one: --text")
    starts = torch.randint(len(ids) - n_prompt, (n_text,), generator=torch.Generator().manual_seed(seed))
    return torch.tensor([ids[a : a + n_prompt] for a in starts.tolist()])


@torch.no_grad()
def write_on(base: Base, prompts: Tensor, n_new: int, is_greedy: Tensor) -> Texts:
    """`n_new` tokens behind each prompt; greedily in the rows of `is_greedy` [n_text] bool, else sampled."""
    ids, cache = prompts.to(base.device), None
    greedy, is_greedy = torch.zeros_like(ids, dtype=torch.bool), is_greedy.to(base.device)
    for _ in range(n_new):
        new_ids = ids if cache is None else ids[:, -1:]
        out = base.model(new_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, logits = out.past_key_values, out.logits[:, -1].float()
        best = logits.argmax(-1)
        drawn = torch.multinomial(logits.softmax(-1), 1).squeeze(1)
        new = torch.where(is_greedy, best, drawn)
        ids = torch.cat((ids, new[:, None]), dim=1)
        greedy = torch.cat((greedy, (new == best)[:, None]), dim=1)
    return Texts(ids.cpu(), greedy.cpu(), prompts.shape[1])


def load_or_write(base: Base, path: Path, prompts: Tensor, n_new: int) -> Texts:
    """Texts behind all prompts, every second one greedy; kept in `path`, where a broken-off run goes on."""
    n_prompt, n_token = prompts.shape[1], prompts.shape[1] + n_new
    none = {"ids": torch.empty(0, n_token, dtype=torch.int64), "is_greedy": torch.empty(0, n_token) > 0}
    done = load_checkpoint(path, "cpu") if path.exists() else none
    n_done = min(len(done["ids"]), len(prompts))
    if done["ids"].shape[1] != n_token or not torch.equal(done["ids"][:n_done, :n_prompt], prompts[:n_done]):
        raise UsageError(f"{path} has texts behind other prompts; use another --work-dir or delete that file")
    with tqdm(total=len(prompts), initial=n_done, unit="text", desc="writing texts") as bar:
        for chunk in prompts[n_done:].split(ROWS):
            if len(chunk):
                texts = write_on(base, chunk, n_new, torch.arange(len(chunk)) % 2 == 0)
                done = {name: torch.cat((done[name], getattr(texts, name))) for name in done}
                save_atomically(done, path)
                bar.update(len(chunk))
    return Texts(done["ids"][: len(prompts)], done["is_greedy"][: len(prompts)], n_prompt)


def choose_anchors(
    texts: Texts, rows: Tensor, n_masks: int, n_group: int, generator: torch.Generator
) -> Tensor:
    """`n_group` anchors in each of the texts `rows`, sorted: [n_row, n_group] int64.

    First those whose next token the model found the likeliest, as when drafting. The last tokens are none:
    behind them there is no text to learn from.
    """
    good = texts.is_greedy[rows].roll(-1, dims=1).float()
    draw = torch.rand(good.shape, generator=generator) + good
    draw[:, texts.ids.shape[1] - n_masks :] = -1
    return draw.topk(n_group, dim=1).indices.sort(dim=1).values
