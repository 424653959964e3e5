"""Texts of a model with its hidden states and predictions, in files that grow: a stopped run goes on."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pyspac.errors import UsageError

_ABOUT: Final = "about.json"

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class About:
    """What all texts of a folder have in common. Sizes in tokens."""

    model: str  # its file's name and size
    n_embd: int
    layers: tuple[int, ...]  # whose inputs are kept
    n_prompt: int  # at the beginning of each text; the model wrote the rest
    n_new: int
    n_top: int  # of each prediction, the likeliest tokens
    corpus: str = ""  # what the prompts were cut from: a digest

    @property
    def n_token(self) -> int:
        return self.n_prompt + self.n_new


@dataclass(frozen=True)
class Rows:
    """n texts. A text's last token is not computed, so there are states of all others.

    `ids` [n, n_token] int32; `states` [n, n_token - 1, n_layers, n_embd] float16; of the predictions behind
    the prompt's last token and each written one but the last: `top_ids` [n, n_new, n_top] int32, best first,
    and `top_logs` float16, natural logarithms of their probabilities.
    """

    ids: Array
    states: Array
    top_ids: Array
    top_logs: Array


class Captured:
    """The texts in a folder: appended, and read without loading them all."""

    def __init__(self, folder: Path, about: About) -> None:
        """Raises UsageError where the folder has texts of another kind."""
        self.folder, self.about = folder, about
        folder.mkdir(parents=True, exist_ok=True)
        self._check(json.loads(json.dumps(asdict(about))))
        self._cut()

    def _check(self, about: dict[str, Any]) -> None:
        path = self.folder / _ABOUT
        if not path.exists():
            path.write_text(json.dumps(about, indent=2) + "\n")
            return
        try:
            found = json.loads(path.read_text())
        except ValueError as error:
            raise UsageError(f"{path} cannot be read ({error}); give another --work-dir") from error
        other = [name for name in about if found.get(name) != about[name]]
        if other:
            said = ", ".join(f"{name} {found.get(name)} instead of {about[name]}" for name in other)
            raise UsageError(
                f"{self.folder} has texts of another run ({said}); give another --work-dir or delete it"
            )

    def _shapes(self) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Shape of one text, and type, by the names of `Rows`."""
        a = self.about
        top = (a.n_new, a.n_top)
        return {
            "ids": ((a.n_token,), np.int32),
            "states": ((a.n_token - 1, len(a.layers), a.n_embd), np.float16),
            "top_ids": (top, np.int32),
            "top_logs": (top, np.float16),
        }

    def _row_bytes(self) -> dict[str, int]:
        return {
            name: int(np.prod(shape)) * np.dtype(kind).itemsize
            for name, (shape, kind) in self._shapes().items()
        }

    def _cut(self) -> None:
        """Forget texts of which a part was not written."""
        row_bytes = self._row_bytes()
        paths = {name: self.folder / name for name in row_bytes}
        for path in paths.values():
            path.touch()
        self._n = min(paths[name].stat().st_size // n for name, n in row_bytes.items())
        for name, path in paths.items():
            with path.open("r+b") as file:
                file.truncate(self._n * row_bytes[name])

    def __len__(self) -> int:
        return self._n

    def append(self, rows: Rows) -> None:
        for name, (_shape, kind) in self._shapes().items():
            with (self.folder / name).open("ab") as file:
                file.write(np.ascontiguousarray(getattr(rows, name), kind).tobytes())
        self._n += len(rows.ids)

    def rows(self, indices: Any) -> Rows:
        """Some of the texts, copied: a slice or an array of whole numbers."""
        return Rows(**{name: self._read(name, indices) for name in self._shapes()})

    def prompts(self) -> Array:
        """What all texts begin with: [n, n_prompt] int32."""
        return self._read("ids", slice(None))[:, : self.about.n_prompt]

    def _read(self, name: str, indices: Any) -> Array:
        shape, kind = self._shapes()[name]
        if self._n == 0:  # an empty file cannot be mapped
            return np.zeros((0, *shape), kind)
        return np.array(np.memmap(self.folder / name, kind, "r", shape=(self._n, *shape))[indices])


def digest(texts: list[str]) -> str:
    """A short name of a corpus's contents."""
    sha = hashlib.sha256()
    for text in texts:
        sha.update(text.encode() + b"\0")
    return sha.hexdigest()[:16]
