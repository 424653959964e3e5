"""What a run reports: one JSON object, and a short table of 80 columns."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from pyspac.engine.board import STAGE_FIELDS
from pyspac.generate.decode import Generation
from pyspac.generate.session import Session
from pyspac.scheduler.fallback import copies_text
from pyspac.scheduler.layer_modes import whole_text
from pyspac.speculation.explain import to_dicts
from pyspac.units import MIB

if TYPE_CHECKING:
    from pyspac.engine.devices import Device
    from pyspac.generate.options import RunOptions
    from pyspac.generate.split import Split

NO_SCHEDULER = dict.fromkeys(("estimator", "step_us_p50", "step_us_p99", "copies", "whole"))

# what `--json` says of a run without the engine
NO_EXPERTS = dict.fromkeys(
    (
        "n_slots",
        "pool_bytes",
        "n_hit",
        "n_miss",
        "n_late",
        "n_loads",
        "n_evictions",
        "loaded_bytes",
        *STAGE_FIELDS,
        "n_steps_with_both",
    ),
    0,
)


def run_dict(session: Session, generation: Generation) -> dict[str, Any]:
    """The object of `--json`."""
    split, options = session.split, session.options
    return {
        **run_as_dict(options, session.device, split),
        **_decisions_dict(session),
        "seed": None if session.sampler.is_greedy else session.sampler.seed,
        "text": session.model.vocab.detokenize(generation.token_ids),
        "token_ids": generation.token_ids,
        "stop_reason": generation.stop_reason,
        "n_prompt": generation.metrics.n_prompt,
        **generation.metrics.to_dict(),
        **engine_dict(split),
    }


def run_as_dict(options: RunOptions, device: Device, split: Split | None) -> dict[str, Any]:
    """How models are run; `mode`: split, host (own kernels alone, no device), or stock."""
    return {
        "mode": ("host" if options.is_host_only else "split") if split else "stock",
        "device": split.info.device if split else device.name,
        "emulated": bool(split and split.info.is_emulated),
        "model": str(options.model),
        "draft": str(options.draft) if options.draft and options.effective_draft_max else None,
        "mtp": str(options.mtp) if options.mtp and options.effective_draft_max else None,
        "spec_type": options.effective_spec_type,
        "draft_max": options.effective_draft_max,
        "speculation": options.controller if options.effective_draft_max else None,
    }


def engine_dict(split: Split | None) -> dict[str, Any]:
    """What the engine and its scheduler did since they were attached."""
    return {
        "experts": split.experts_dict() if split else dict(NO_EXPERTS),
        "devices": [device.as_json() for device in split.devices()] if split else [],
        "tier": split.tier_dict() if split else None,
        "prompt_read_bytes": split.prompt_read_bytes if split else 0,
        "layers": split.layers_dict() if split else {"split": 0, "declined": {}, "unpinned": 0},
        "scheduler": NO_SCHEDULER | (split.scheduler_dict() if split else {}),
        "predictors": split.predictors_list() if split else [],
    }


def _decisions_dict(session: Session) -> dict[str, Any]:
    """With --explain: how draft lengths were chosen, and the costs that rests on."""
    if not (session.options.explain and session.speculation):
        return {}
    return {
        "decisions": to_dicts(session.speculation.decisions()),
        "costs": session.speculation.shared.table.to_dict(),
    }


# ------------------------------------------------------------------------------------------------ table


def print_table(console: Console, session: Session, generation: Generation) -> None:
    """What happened, in at most 80 columns."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in table_rows(session, generation):
        table.add_row(name, text)
    console.print(table)


def table_rows(session: Session, generation: Generation) -> list[tuple[str, str]]:
    rows = [("mode", _mode_text(session)), *_speed_rows(generation), *_speculation_rows(session, generation)]
    if session.split:
        rows += (_host_rows if session.options.is_host_only else _split_rows)(session.split, generation)
    if session.options.profile is not None:
        rows.append(("defaults", f"{session.options.profile} (saved by pyspac bench --profile)"))
    if session.loading.no_effect:
        rows.append(("predicted", session.loading.no_effect))
    return rows


def _mode_text(session: Session) -> str:
    if session.lacks_kernels:
        return f"llama.cpp's kernels, {session.n_threads} threads: the engine has none for this model here"
    if session.split is None:
        return f"stock llama.cpp on {session.device.name}, {session.n_threads} threads"
    if session.options.is_host_only:
        what = "every expert" if session.preflight.geometry.is_moe else "a dense model"
        return f"{what} on the host, {session.n_threads} threads, {session.split.info.kernels} kernels"
    return f"split between {device_text(session)} and the host"


def device_text(session: Session) -> str:
    """The device's name, and that it is emulated where it is."""
    info = session.split.info if session.split else None
    if info is None or not info.is_emulated:
        return info.device if info else session.device.name
    if session.device.is_cpu:
        return "a device emulated on the CPU"
    return f"{info.device} with an emulated link"


def _speed_rows(generation: Generation) -> list[tuple[str, str]]:
    m = generation.metrics
    return [
        ("tokens", f"{m.n_tokens} after a prompt of {m.n_prompt}, stopped: {generation.stop_reason}"),
        (
            "speed",
            f"{_number(m.tps)} tokens/s, {_number(m.tpot_ms)} ms per token, "
            f"the first after {_number(m.ttft_ms)} ms",
        ),
    ]


def _speculation_rows(session: Session, generation: Generation) -> list[tuple[str, str]]:
    if session.options.effective_draft_max == 0:
        return [("drafting", "none")]
    totals = generation.metrics.totals
    rate = "nothing drafted" if totals.acceptance_rate is None else f"{totals.acceptance_rate:.0%} accepted"
    return [
        (
            "drafting",
            f"{session.options.effective_spec_type}, {totals.n_draft} drafted, {rate}, "
            f"{_number(totals.acceptance_length)} tokens per step",
        )
    ]


def _declined_text(split: Split) -> str:
    declined = split.layers_dict()["declined"]
    return "".join(f", {n} declined ({reason})" for reason, n in declined.items())


def _host_rows(split: Split, generation: Generation) -> list[tuple[str, str]]:
    """Without a device: what the engine's own kernels compute."""
    info = split.info
    experts = (
        f"experts of {info.n_layer_kernels} layers{_declined_text(split)}, and " if info.n_expert else ""
    )
    rows = [("own kernels", f"{experts}{info.n_dense_kernels} other matrices")]
    if info.n_layer_kernels and generation.metrics.steps:
        host_ms = split.steps_us("host_us") / len(generation.metrics.steps) / 1e3
        rows.append(("per step", f"experts {host_ms:.2f} ms"))
    predicted = [(f"predicted by {p['name']}", _read_ahead_text(p)) for p in split.predictors_list()]
    return [*rows, *(tier_rows := _tier_rows(split)), *(predicted if tier_rows else [])]


def _tier_rows(split: Split) -> list[tuple[str, str]]:
    """Experts that stay on disk."""
    tier = split.tier_dict()
    if tier is None:
        return []
    share = "-" if tier["hit_share"] is None else f"{tier['hit_share']:.0%}"
    depth = "-" if tier["depth"] is None else f"{tier['depth']:.1f}"
    copies = (
        [("from disk", f"{tier['n_to_device_read']} of {tier['n_to_device']} experts that were copied")]
        if split.scheduler
        else []
    )
    return [
        ("memory", f"{tier['n_slots']} experts, {tier['pool_bytes'] / MIB:.0f} MiB; {share} of those used"),
        (
            "disk",
            f"{tier['read_bytes'] / MIB:.0f} MiB in {tier['n_reads']} reads, {depth} at a time; "
            f"waited {tier['wait_us'] / 1e6:.2f} s",
        ),
        *copies,
    ]


def _read_ahead_text(predictor: dict[str, Any]) -> str:
    """Of the engine's predictors, which ask the disk."""
    if predictor["recall"] is None:
        return "nothing"
    return (
        f"{predictor['recall']:.0%} of what was used, {predictor['precision']:.0%} right; "
        f"{predictor['n_queued']} experts read for it"
    )


def _split_rows(split: Split, generation: Generation) -> list[tuple[str, str]]:
    experts, layers = split.experts_dict(), split.layers_dict()
    declined = _declined_text(split)
    moved = f"{experts['loaded_bytes'] / MIB:.1f} MiB"
    return [
        ("layers", f"{layers['split']} split{declined}"),
        ("slots", f"{experts['n_slots']} experts, {experts['pool_bytes'] / MIB:.1f} MiB"),
        *_tier_rows(split),
        ("covered", _coverage_text(split.coverage())),
        (
            "loads",
            f"{experts['n_loads']} ({moved}), {experts['n_evictions']} evictions, {experts['n_late']} late",
        ),
        *_device_rows(split),
        *_stage_rows(experts),
        *_whole_rows(split),
        *_copies_rows(split),
        ("per step", _step_text(split, max(1, len(generation.metrics.steps)))),
        *((f"predicted by {p['name']}", _predicted_text(p)) for p in split.predictors_list()),
    ]


def _device_rows(split: Split) -> list[tuple[str, str]]:
    """One for each of several devices."""
    devices = split.devices()
    return [(device.name, device.text()) for device in devices if len(devices) > 1]


def _stage_rows(experts: dict[str, int]) -> list[tuple[str, str]]:
    """What the prompt copied while it was computed; no row if it copied nothing."""
    if not experts["n_staged"]:
        return []
    hidden = max(0.0, 1 - experts["stage_wait_us"] / max(1, experts["staged_us"]))
    text = f"{experts['n_staged']} experts ({experts['staged_bytes'] / MIB:.1f} MiB) passed through the slots"
    return [("prompt", f"{text}, {hidden:.0%} of their copying hidden")]


def _whole_rows(split: Split) -> list[tuple[str, str]]:
    """Layers that the device holds whole; no row if there are none."""
    found = split.scheduler_dict()["whole"]
    return [] if found is None or not found["layers"] else [("whole layers", whole_text(found))]


def _copies_rows(split: Split) -> list[tuple[str, str]]:
    """Whether copies pay, once that was measured."""
    found = split.scheduler_dict()["copies"]
    return [] if found is None or found["gain"] is None else [("copies", copies_text(found))]


def _predicted_text(predictor: dict[str, Any]) -> str:
    """Shares of what the predicted tokens used, and what became of the copies."""
    if predictor["recall"] is None:
        return "no token came again" if "known" in predictor else "nothing"
    if "known" not in predictor:  # one of the engine's
        return (
            f"{predictor['recall']:.0%} of what was used, {predictor['precision']:.0%} right; "
            f"{predictor['n_copied']} copies for it, {predictor['n_copies_used']} used, "
            f"{predictor['n_refused']} left out; {_number(predictor['us_per_layer'])} us per layer"
        )
    return (
        f"{predictor['recall']:.0%} of what the {predictor['known']:.0%} known tokens used, "
        f"{predictor['precision']:.0%} right; {predictor['n_copied']} copies for it, "
        f"{predictor['n_copies_used']} used, {predictor['n_refused']} left out, "
        f"{predictor['n_late']} of them too late; {_number(predictor['us_per_step'])} us each time"
    )


def _coverage_text(coverage: float | None) -> str:
    return "-" if coverage is None else f"{coverage:.1%} of activations found their expert on the device"


def _step_text(split: Split, n_steps: int) -> str:
    """Times of experts per step, summed over the layers; a real device's time is not observed."""
    host, device = (split.steps_us(name) / n_steps / 1e3 for name in ("host_us", "device_us"))
    device_text = f"{device:.2f} ms" if device else "not observed"
    scheduler_ms = _number(split.scheduler_dict()["step_us_p50"] / 1e3)
    return f"host experts {host:.2f} ms, device experts {device_text}, scheduler {scheduler_ms} ms"


def _number(value: float | None) -> str:
    """About three digits; "-" for none."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
