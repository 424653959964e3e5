"""What the model writes itself: it goes on from pieces of a corpus, half of the time greedily.

A drafter guesses what its model will say, not what somebody else wrote, so it learns from the model's text.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from tools.train_demo.common import UserError, save_atomically
from tools.train_demo.corpus import Module, read_stdlib
from tools.train_mtp.base import Base

PIECE_CHARACTERS = 4000  # of a file: what is held out is chosen piece by piece
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


def read_modules(path: Path | None) -> list[Module]:
    """The corpus: the standard library of the running Python, or the text files of a folder, or a file.

    Says on standard error how many files cannot be read. Raises UserError where there is too little text.
    """
    if path is None:
        return read_stdlib()
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    modules, left_out = [], []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            left_out.append(file.name)
            continue
        cuts = range(0, len(text), PIECE_CHARACTERS)
        modules += [Module(f"{file.name}#{i}", text[i : i + PIECE_CHARACTERS]) for i in cuts]
    if left_out:
        print(
            f"left out {len(left_out)} of the {len(files)} files of {path}, such as {left_out[0]}: "
            "they cannot be read as UTF-8 text",
            file=sys.stderr,
        )
    if not any(m.is_held_out for m in modules) or all(m.is_held_out for m in modules):
        raise UserError(
            f"{path} has {len(modules)} pieces of {PIECE_CHARACTERS} characters of UTF-8 text, which is too "
            "little to hold some out; give a folder of text files with 400,000 characters or more"
        )
    return modules


def cut_prompts(base: Base, modules: list[Module], n_text: int, n_prompt: int, seed: int) -> Tensor:
    """Pieces of the modules, one behind another, in an order that the seed decides: [n_text, n_prompt]."""
    ids = [i for e in base.tokenizer.encode_batch([m.text for m in modules]) for i in e.ids]
    if len(ids) <= n_prompt:
        raise UserError(f"the corpus has {len(ids)} tokens to begin texts with; give a longer one: --text")
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


def load_checkpoint(path: Path, device: Any) -> Any:
    """What `save_atomically` wrote. Raises UserError for what is no such file, or was cut off."""
    try:
        return torch.load(path, map_location=device)
    except Exception as error:  # torch has no class of its own for this
        raise UserError(f"{path} cannot be read ({error}); delete it, or give another --work-dir") from error


def load_or_write(base: Base, path: Path, prompts: Tensor, n_new: int) -> Texts:
    """Texts behind all prompts, every second one greedy; kept in `path`, where a broken-off run goes on."""
    n_prompt, n_token = prompts.shape[1], prompts.shape[1] + n_new
    none = {"ids": torch.empty(0, n_token, dtype=torch.int64), "is_greedy": torch.empty(0, n_token) > 0}
    done = load_checkpoint(path, "cpu") if path.exists() else none
    n_done = min(len(done["ids"]), len(prompts))
    if done["ids"].shape[1] != n_token or not torch.equal(done["ids"][:n_done, :n_prompt], prompts[:n_done]):
        raise UserError(f"{path} has texts behind other prompts; use another --work-dir or delete that file")
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
