"""Mask tokens in a server (--mtp): an adapter and the options in, options that fit each other out."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pyspac.engine.limits import MAX_BATCH
from pyspac.errors import ModelError, UsageError
from pyspac.model.device_needs import N_UBATCH, is_recurrent
from pyspac.model.gguf_header import GgufHeader
from pyspac.model.mtp import check_adapter
from pyspac.model.prompt_piece import LONGEST_PIECE
from pyspac.server import log
from pyspac.server.options import ServeOptions
from pyspac.speculation.cost_table import masked_width

MAX_SEQUENCES: Final = 256  # LLAMA_MAX_SEQ
# llama-server's defaults
_BATCHES: Final = (("-b", "--batch-size", LONGEST_PIECE), ("-ub", "--ubatch-size", N_UBATCH))
_SPLIT_CACHE: Final = ("-no-kvu", "--no-kv-unified")


def fit_masks(options: ServeOptions, target: GgufHeader, *, has_engine: bool) -> ServeOptions:
    """As many drafts as the adapter has masks, and batches wide enough. Raises ModelError, UsageError."""
    assert options.mtp is not None
    adapter = check_adapter(options.mtp, target)
    _check_can_keep_apart(options, target)
    if options.stock and not options.trace:
        raise UsageError("--mtp needs the engine, which --stock leaves out: leave out one of them")
    if not has_engine and not options.trace:
        raise UsageError(
            "--mtp needs the engine, which has no kernels for this model without a device: use one, or "
            "another drafter"
        )
    scheduler = options.attach.scheduler
    n = min(scheduler.n_draft_max, adapter.n_masks)
    if options.attach.speculation == "static" and n < scheduler.n_draft_max:
        log.warning(f"--draft-max {scheduler.n_draft_max} is {n} here: the adapter has so many masks")
    attach = replace(options.attach, scheduler=replace(scheduler, n_draft_max=n))
    return replace(options, attach=attach, max_batch=_choose_max_batch(options, n))


def _check_can_keep_apart(options: ServeOptions, target: GgufHeader) -> None:
    if is_recurrent(target):
        raise ModelError(
            f"{target.path}: the recurrent layers of this model cannot keep mask tokens apart, which "
            "draft-lora needs; use another drafter, or --spec-type none"
        )
    for flag in _SPLIT_CACHE:
        if flag in options.passed:
            raise UsageError(f"{flag} cannot be used with --mtp, whose masks share the cache of the text")


def _choose_max_batch(options: ServeOptions, n_draft: int) -> int:
    """Tokens of the widest batch with masks: all slots at once, unless another one was asked for."""
    width, n_slots = masked_width(n_draft, n_draft), options.n_server_slots
    fewer = "draft fewer tokens with --draft-max"
    if n_slots * (2 + n_draft) > MAX_SEQUENCES:
        raise UsageError(
            f"{n_slots} server slots with {n_draft} drafts each need {n_slots * (2 + n_draft)} sequences, "
            f"and llama.cpp has {MAX_SEQUENCES}: {fewer}, or give fewer slots with -np"
        )
    limits = {"--max-batch": MAX_BATCH if options.max_batch is None else options.max_batch}
    for short, flag, default in _BATCHES:
        text = options.passed_value(short, flag)
        limits[flag] = int(text) if text.isdecimal() else default
    for flag, limit in limits.items():
        if width > limit:
            raise UsageError(
                f"{flag} is {limit}, and a step that verifies {n_draft} drafts and makes as many has {width} "
                f"tokens: {fewer}, or raise it"
            )
    return min(n_slots * width, *limits.values()) if options.max_batch is None else options.max_batch
