"""Prompts that outlive the server (`--keep`): a folder and a command line in, what the engine is told out.

A kept state is used again only with the same key: a hash of all that it depends on. What is not known to be
harmless counts: another model, draft model, adapter, type of cache or flag of llama-server leaves it alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import pyspac
from pyspac.checks import check_int
from pyspac.errors import ConfigError, UsageError
from pyspac.forward.lossy import MAX_KL_VARIABLE
from pyspac.forward.lossy import VARIABLE as LOSSY  # a state that it made is another one
from pyspac.model.gguf_header import read_header
from pyspac.server.model_identity import model_hash, model_parts

FORMAT: Final = 1
DEFAULT_MIB: Final = 8192  # as much as llama-server's --cache-ram
MAX_MIB: Final = 1 << 30
_PROBE_BYTES: Final = 1 << 16
_VARIABLES: Final = ("PYSPAC_KEEP", "PYSPAC_KEEP_MIB", "PYSPAC_KEEP_KEY")
# flags, as variables of llama-server's too, that change neither a state nor how it is computed
_FLAGS_WITH_VALUE: Final = (
    "-m --model --host --port --spac-cache --spac-board -c --ctx-size -np --parallel -t --threads -tb "
    "--threads-batch --threads-http --prio --prio-batch -Cr --cpu-range --poll -to --timeout --cors-origins "
    "--cors-methods --cors-headers --path --api-key --api-key-file --api-prefix --ssl-key-file "
    "--ssl-cert-file -a --alias --tags -cram --cache-ram -sps --slot-prompt-similarity --slot-save-path "
    "--log-file -lv --verbosity --log-verbosity --sleep-idle-seconds -lm --load-mode --chat-template "
    "--chat-template-file --chat-template-kwargs --reasoning-format --reasoning-budget -n --predict "
    "--n-predict --temp --top-k --top-p --min-p -s --seed --media-path --ctx-checkpoints"
)
_FLAGS_ALONE: Final = (
    "--metrics --no-cors-credentials --ui --no-ui --webui --no-webui --mmap --no-mmap --mlock --slots "
    "--no-slots --props --warmup --no-warmup --jinja --no-jinja -v --verbose --log-disable --log-prefix "
    "--log-timestamps --offline --cache-prompt --no-cache-prompt --cache-idle-slots --no-cache-idle-slots "
    "--context-shift --no-context-shift"
)
_WITH_VALUE: Final = frozenset(_FLAGS_WITH_VALUE.split())
_ALONE: Final = frozenset(_FLAGS_ALONE.split())
_LONG_ROPE: Final = "rope_factors_long"  # which factors are used follows from the context's size


def check_keep(folder: Path | None, mib: int | None) -> None:
    """Raise ConfigError or UsageError for a size that cannot be, or has no folder."""
    if mib is None:
        return
    check_int("--keep-mib", mib, 1, MAX_MIB)
    if folder is None:
        raise UsageError(f"--keep-mib {mib} has no effect without --keep DIR: name a folder")


def prepare_folder(folder: Path) -> None:
    """Make it where it is missing, for its owner only. Raises ConfigError if prompts cannot be kept there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_open = stat.S_IMODE(folder.stat().st_mode) & 0o077
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_PROBE_BYTES))
            os.fsync(file.fileno())
    except OSError as error:
        raise ConfigError("--keep", folder, f"a folder that can be written ({error.strerror})") from error
    if is_open:
        raise ConfigError(
            "--keep", folder, f"a folder that only you can read, as it holds prompts: chmod 700 {folder}"
        )


def keep_env(
    folder: Path | None,
    mib: int | None,
    argv: Sequence[str],
    environ: Mapping[str, str],
    model: Path | None,
    n_ctx: int | None,
) -> dict[str, str | None]:
    """What the engine reads; None: nothing, whatever is there. `argv`, `environ`: llama-server's."""
    if folder is None:
        return dict.fromkeys(_VARIABLES)
    key = state_key(argv, environ, model, n_ctx)
    values = (str(folder.absolute()), str(mib or DEFAULT_MIB), key)
    return dict(zip(_VARIABLES, values, strict=True))


def state_key(argv: Sequence[str], environ: Mapping[str, str], model: Path | None, n_ctx: int | None) -> str:
    """64 characters that are equal only where a state may be used again. Raises OSError or ModelError."""
    has_long_rope = model is not None and any(_LONG_ROPE in x.name for x in read_header(model).tensors)
    settings = {
        "format": FORMAT,
        "pyspac": pyspac.__version__,
        "model": None if model is None else _content(model),
        "arguments": list(_that_count(argv[1:])),
        "environment": sorted(_variables_that_count(environ)),
        "n_ctx": n_ctx if has_long_rope else None,
    }
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()


def _that_count(argv: Sequence[str]) -> Iterator[str]:
    """Arguments, with files by their content."""
    is_value = False
    for text in argv:
        if is_value or text in _ALONE:
            is_value = False
        elif text in _WITH_VALUE:
            is_value = True
        else:
            path = Path(text)
            yield _content(path) if path.is_file() else text


def _variables_that_count(environ: Mapping[str, str]) -> Iterator[str]:
    prefix = "LLAMA_ARG_"
    for name, value in environ.items():
        flag = "--" + name.removeprefix(prefix).lower().replace("_", "-")
        if name in (LOSSY, MAX_KL_VARIABLE) or (name.startswith(prefix) and flag not in _WITH_VALUE | _ALONE):
            yield f"{name}={value}"


def _content(path: Path) -> str:
    """A hash of parts of it, and when its files were changed last: a weight may differ anywhere."""
    times = [part.stat().st_mtime_ns for part in model_parts(path)]
    return f"{model_hash(path)} {times}"
