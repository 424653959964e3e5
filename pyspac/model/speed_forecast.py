"""Will it fit, and how fast: a model's weights and a machine's measured speeds in, where things are and
tokens per second out.

A token's time is that of the weights it reads, each type at the speed of the kernel that multiplies it, of
attention to the text so far, and a little per layer. In prompts a pass over a matrix serves all tokens that
meet it: an expert's are those of a piece that choose it. Absent experts of a layer are read from disk at
once, while those that are there are computed, and are computed then; layers come one after the other. A
prompt reads all experts, as it is a run's first; those of the next layer meanwhile, where memory has room. A
card holds all but experts, and some of these; its own speed is assumed.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import ceil
from typing import Any, Final, Literal

import numpy as np

from pyspac.model.device_needs import MARGIN_BYTES as CARD_MARGIN_BYTES
from pyspac.model.disk_probe import DiskSpeed
from pyspac.model.known_models import Bytes, Weights
from pyspac.model.memory_tier import MARGIN_BYTES
from pyspac.model.prompt_piece import LONGEST_PIECE, host_piece

# tokens of a pass that kernels are measured with; half a tile of 16 at the end, as an expert has on average
WIDTHS: Final = (1, 8, 40, 136)
REACHED: Final = 0.87  # of a kernel's speed over one long matrix; measured: docs/fit.md
LAYER_US: Final = 90.0  # norms, router, waiting; of the demo model's layers on two cores
PROMPT_LAYER_MOP: Final = (
    1.1  # 1e6 operations, at the speed of one token's attention: norms, adding up a token's experts
)
N_TAIL: Final = 4  # tokens that llama-server computes after a prompt's others: what it keeps ends before them
N_TEXT: Final = 512  # tokens of a text so far, which attention looks at
DECODING: Final = 0  # of a Machine's attention
PROMPT: Final = 1
KV_REACHED: Final = 0.25  # of memory's speed, by keys and values: weights push them out of caches
BUFFERS_BYTES: Final = 512 << 20  # of a context, and what the program takes
CARD_GB_S: Final = 300.0  # assumed of any card: that of the slower ones with 8 GB and more
# share of the experts in memory -> share of those in use that are there: the lower of Qwen3-30B-A3B and
# Gemma-4-26B-A4B, 128 tokens each, from memory that is empty at first (`pyspac lab run TRACE --eviction ema
# --miss fetch --prefetch none --k 0 --capacity ...`)
_HELD: Final = (0.0, 0.05, 0.10, 0.17, 0.25, 0.40, 1.0)
_FOUND: Final = (0.0, 0.37, 0.55, 0.69, 0.79, 0.89, 1.0)
Place = Literal["memory", "disk", "card and memory", "card and disk", "card", "nowhere"]


@dataclass(frozen=True, slots=True)
class KernelSpeed:
    """Of one type's kernel, in 1e9 bytes of weights per second, times each of WIDTHS tokens, or the first."""

    gb_s: tuple[float, ...]

    def pass_us(self, n_bytes: float, n_tokens: float) -> float:
        """Of so many weights times so many tokens: between two widths, and beyond the last, along a line."""
        times = [n_bytes / (gb_s * 1e3) for gb_s in self.gb_s]
        if n_tokens == WIDTHS[0]:
            return times[0]
        i = min(bisect(WIDTHS, n_tokens), len(times) - 1) - 1
        slope = (times[i + 1] - times[i]) / (WIDTHS[i + 1] - WIDTHS[i])
        return times[i] + slope * (n_tokens - WIDTHS[i])


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What was measured here, and what it is asked to hold."""

    ram_bytes: int  # for a model
    memory_gb_s: float
    kernels: Mapping[str, KernelSpeed]
    disk: DiskSpeed
    n_threads: int = 1
    vram_bytes: int = 0  # of a card; 0: none
    reached: float = REACHED
    layer_us: float = LAYER_US
    prompt_layer_mop: float = PROMPT_LAYER_MOP
    attention_gop_s: tuple[float, ...] = (15.0, 120.0)  # 1e9 operations/s in caches: decoding, prompts
    per_expert: int = 0  # tokens that kernels want for each expert
    varied: tuple[float, float] = (1.0, 1.0)  # slowest, fastest turn over the median, decoding
    others_share: float = 0.0  # of the threads' cores, that other programs took meanwhile

    def pass_us(self, weights: Bytes, n_tokens: float = 1) -> float:
        """Of weights times so many tokens."""
        return sum(self._kernel(name).pass_us(n, n_tokens) for name, n in weights.items()) / self.reached

    def reading_us(self, n_bytes: float) -> float:
        """What reading so much takes of the cores that compute."""
        return n_bytes * self.disk.cpu_s_per_gb / self.n_threads / 1e3

    @property
    def prompt_layer_us(self) -> float:
        """Of one token and layer."""
        return self.prompt_layer_mop / self.attention_gop_s[DECODING] * 1e3

    def _kernel(self, name: str) -> KernelSpeed:
        if name in self.kernels:
            return self.kernels[name]
        known = [speed.gb_s for speed in self.kernels.values()] or [(self.memory_gb_s,) * len(WIDTHS)]
        return KernelSpeed((self.memory_gb_s, *map(min, list(zip(*known, strict=True))[1:])))


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Of one model on one machine."""

    name: str
    quantisation: str
    model_bytes: int
    needed_bytes: int  # of memory, for all of it
    place: Place
    share_in_memory: float  # of the experts
    share_on_card: float
    decode_tps: float | None  # None: it does not run
    prompt_tps: float | None
    least_bytes: int  # of memory, to run at all
    notes: tuple[str, ...] = field(default=())

    @property
    def has_card(self) -> bool:
        return self.place.startswith("card")

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        basis = "predicted, never measured on a GPU" if self.has_card else "predicted"
        return asdict(self) | {"basis": basis}


def forecast(
    weights: Weights, machine: Machine, n_ctx: int, found: float | None = None, n_text: int = N_TEXT
) -> Forecast:
    """`found`: share of the experts in use that is in memory, where it is known; None: as recorded texts.

    `n_text`: tokens of a prompt, and of the text that decoding goes on with.
    """
    kv = weights.kv[n_ctx]
    on_card = _share_on_card(weights, machine, kv)
    has_card = bool(machine.vram_bytes) and on_card >= 0
    host_others = BUFFERS_BYTES + MARGIN_BYTES + (0 if has_card else weights.others_bytes + kv)
    on_card = max(0.0, on_card)
    rest = 1.0 - on_card
    room = machine.ram_bytes - host_others
    one_layer = weights.n_expert * weights.expert_bytes
    in_memory = max(0.0, min(rest, room / max(1, weights.experts_bytes)))
    place = _place(in_memory, rest, room, one_layer, has_card=has_card)
    common: dict[str, Any] = {
        "name": weights.name, "quantisation": weights.quantisation, "model_bytes": weights.model_bytes,
        "needed_bytes": host_others + int(rest * weights.experts_bytes), "place": place,
        "share_in_memory": in_memory, "share_on_card": on_card, "least_bytes": host_others + one_layer,
    }  # fmt: skip
    if place == "nowhere":
        return Forecast(**common, decode_tps=None, prompt_tps=None)
    held = in_memory + on_card
    share = found_share(held) if found is None else found
    n_text = min(n_text, n_ctx)
    card_share = on_card if has_card else None
    decode = _forward_us(weights, machine, share, n_text, card_share)
    prompt = _prompt_us(weights, machine, held, n_text, card_share)
    return Forecast(**common, decode_tps=1e6 / decode, prompt_tps=1e6 / prompt)


def decode_tps(weights: Weights, machine: Machine, found: float) -> float:
    """Without a card; `found` as in `forecast`."""
    return 1e6 / _forward_us(weights, machine, found, N_TEXT, None)


def found_share(held: float) -> float:
    """Of the experts in use, what is there where memory holds that share of all: as in recorded traces."""
    return max(held, float(np.interp(held, _HELD, _FOUND)))


def _share_on_card(weights: Weights, machine: Machine, kv: int) -> float:
    """Of the experts; below 0: not even the rest fits there."""
    room = machine.vram_bytes - CARD_MARGIN_BYTES - BUFFERS_BYTES - weights.others_bytes - kv
    return min(1.0, room / max(1, weights.experts_bytes)) if machine.vram_bytes else 0.0


def _place(in_memory: float, rest: float, room: int, one_layer: int, *, has_card: bool) -> Place:
    if rest <= 0.0:
        return "card"
    if in_memory >= rest:
        return "card and memory" if has_card else "memory"
    if room < one_layer:
        return "nowhere"
    return "card and disk" if has_card else "disk"


def _forward_us(
    weights: Weights, machine: Machine, found: float, n_text: int, on_card: float | None, n_tokens: int = 1
) -> float:
    """Of so few tokens. What a card holds (None: there is none) is used as often as recorded texts use the
    best of that size."""
    used = _n_chosen(weights, n_tokens)
    experts_us = used * machine.pass_us(weights.expert, n_tokens * weights.n_expert_used / used)
    late_us = experts_us * (1.0 - found)  # absent ones are computed once all of them have come
    absent = used * weights.expert_bytes * (1.0 - found)
    absent_us = machine.reading_us(absent)
    chance = 1.0 - found**used
    disk_us = chance * machine.disk.latency_us + absent / (machine.disk.depth_32_gb_s * 1e3)
    card_us = 0.0
    dense_us = machine.pass_us(weights.dense + weights.output, n_tokens)
    kv_us = weights.kv_row_bytes * n_text / (machine.memory_gb_s * KV_REACHED * 1e3)
    dense_us += n_tokens * (_attention_us(weights, machine, n_text) + kv_us)
    if on_card is not None:
        hit = found_share(on_card)
        card_us = used * weights.expert_bytes * hit / (CARD_GB_S * 1e3)
        experts_us = max(late_us, experts_us * (1.0 - hit))
        dense_us = (weights.dense + weights.output).total() / (CARD_GB_S * 1e3)
    layer_us = max(experts_us - late_us, disk_us if found < 1.0 else 0.0, card_us) + late_us + absent_us
    return dense_us + weights.n_layer_moe * layer_us + weights.n_layer * machine.layer_us


def _prompt_us(weights: Weights, machine: Machine, held: float, n_text: int, on_card: float | None) -> float:
    """Of one token of so many."""
    n_tail = min(N_TAIL, n_text - 1) if weights.has_tail else 0
    in_memory = host_piece(weights.n_expert, weights.n_expert_used, machine.per_expert)
    n_pieces = ceil((n_text - n_tail) / (in_memory if held >= 1.0 else LONGEST_PIECE))
    n_piece = (n_text - n_tail) / n_pieces
    piece_us = _piece_us(weights, machine, held, n_text, n_piece, has_card=on_card is not None)
    last_us = machine.pass_us(weights.output)  # only the last token's logits
    if n_tail:
        last_us = _forward_us(weights, machine, held, n_text, on_card, n_tail)  # the last layers' are there
    return (n_pieces * piece_us + last_us) / n_text


def _piece_us(
    weights: Weights, machine: Machine, held: float, n_text: int, n_piece: float, *, has_card: bool
) -> float:
    n_chosen = _n_chosen(weights, n_piece)
    n_experts = (weights.n_layer_moe - 1) * n_chosen  # the last layer computes the last token's
    experts_us = n_experts * machine.pass_us(weights.expert, n_piece * weights.n_expert_used / n_chosen)
    others_us = n_piece * weights.n_layer * machine.prompt_layer_us
    if not has_card:
        others_us += machine.pass_us(weights.dense, n_piece)
        others_us += n_piece * _attention_us(weights, machine, n_text, PROMPT) / 2  # to half of it
    if held >= 1.0:
        return experts_us + others_us
    n_reads = weights.n_layer_moe * n_chosen
    n_bytes = n_reads * weights.expert_bytes
    read_us = n_bytes / (machine.disk.depth_32_gb_s * 1e3)
    ahead = max(0.0, min(1.0, held * weights.n_layer_moe - 1.0))  # of a layer, beside the one that runs
    first_us = read_us / n_reads  # before anything is computed
    us = max(first_us + experts_us + others_us, read_us + max(0.0, others_us - ahead * read_us))
    return us + machine.reading_us(n_bytes)


def _n_chosen(weights: Weights, n_tokens: float) -> float:
    """Experts of a layer that so many tokens use."""
    unused: float = (1.0 - weights.n_expert_used / weights.n_expert) ** n_tokens
    return weights.n_expert * (1.0 - unused)


def _attention_us(weights: Weights, machine: Machine, n_text: int, kind: int = DECODING) -> float:
    return 4 * weights.query_width * n_text / (machine.attention_gop_s[kind] * 1e3)
