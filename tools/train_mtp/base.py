"""The model to train a drafter into: loaded from a Hugging Face folder, frozen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn

from pyspac.errors import UsageError


@dataclass(frozen=True)
class Base:
    """A model of `transformers` and its tokenizer; nothing of the model is ever changed."""

    model: Any
    tokenizer: Tokenizer

    @property
    def device(self) -> torch.device:
        return next(iter(self.model.parameters())).device

    @property
    def embeddings(self) -> nn.Embedding:
        return self.model.get_input_embeddings()

    @property
    def n_vocab(self) -> int:
        return int(self.embeddings.num_embeddings)

    @property
    def embedding_name(self) -> str:
        names = {id(module): name for name, module in self.model.named_modules()}
        return str(names[id(self.embeddings)])


def load_base(folder: Path) -> Base:
    """Raises UsageError: no such folder, no weights or tokenizer in it, not known to `transformers`."""
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise UsageError(
                f"there is no {name} in {folder}; give a folder made by Hugging Face's save_pretrained "
                "(scripts/gguf_to_hf.py makes one of the demo's model)"
            )
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32  # which is the faster one on a CPU
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"transformers cannot load the model in {folder} ({error}); "
            "is it whole, and does this version of transformers know its architecture?"
        ) from error
    if getattr(model.config, "layer_types", None) and set(model.config.layer_types) != {"full_attention"}:
        raise UsageError(
            f"the model in {folder} has layers of the kinds {sorted(set(model.config.layer_types))}; masks "
            "can be trained only where all layers attend to the whole text (full_attention)"
        )
    model.eval().requires_grad_(False).to(device)
    return Base(model, Tokenizer.from_file(str(folder / "tokenizer.json")))
