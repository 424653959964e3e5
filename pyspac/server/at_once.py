"""How many tokens of a prompt a server computes at once (-ub): options, a model's header and the device in, a
number out."""

from __future__ import annotations

from pyspac.engine.devices import Device
from pyspac.errors import ConfigError
from pyspac.model.geometry import MoeGeometry, read_geometry
from pyspac.model.gguf_header import GgufHeader
from pyspac.model.prompt_piece import LONGEST_PIECE, Place, beside_device, fit_piece, wanted_piece
from pyspac.server.options import LEAST_TOKENS, ServeOptions


def given_ubatch(options: ServeOptions) -> int | None:
    """As -ub says, or llama-server's variable; None: neither does."""
    text = options.given_value("LLAMA_ARG_UBATCH", "-ub", "--ubatch-size")
    return int(text) if text.isdecimal() else None


def _n_batch(options: ServeOptions) -> int:
    """Tokens of a batch, which -ub cannot exceed. Raises ConfigError for fewer than llama-server takes."""
    text = options.given_value("LLAMA_ARG_BATCH", "-b", "--batch-size")
    n = int(text) if text.isdecimal() else LONGEST_PIECE
    least = max(LEAST_TOKENS, options.n_server_slots)  # a step has a token of each slot
    if n < least:
        raise ConfigError("-b", text, f"{least} or more")
    return n


def choose_n_ubatch(
    options: ServeOptions, header: GgufHeader, n_ctx: int, device: Device, *, is_on_disk: bool
) -> int:
    """Tokens of a prompt that are computed at once: as the user says, else what pays here and fits."""
    most = most_at_once(options, read_geometry(header), device, is_on_disk=is_on_disk)
    return most if given_ubatch(options) is not None else fit_piece(most, header, n_ctx, device.memory_free)


def most_at_once(options: ServeOptions, geometry: MoeGeometry, device: Device, *, is_on_disk: bool) -> int:
    """The same, if memory is no matter."""
    given, n_batch = given_ubatch(options), _n_batch(options)
    if given is not None:
        return min(given or n_batch, n_batch)  # 0: as llama.cpp reads it
    place: Place = "host" if device.is_cpu else beside_device(geometry, device.memory_free)
    place = "disk" if is_on_disk else place
    return min(n_batch, wanted_piece(geometry, place, _per_expert(options)))


def _per_expert(options: ServeOptions) -> int:
    """How many tokens for each expert the host's kernels want: ggml's, beside a device, want few."""
    from pyspac.engine.engine import tokens_per_expert  # loads the native library, as the rest does anyway

    # asked beside a device, too, as it refuses a wrong PYSPAC_KERNELS
    wanted = 0 if options.stock else tokens_per_expert()
    return wanted if options.is_host_only else 0
