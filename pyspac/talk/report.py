"""What a run reports: one JSON object, and a short table of 80 columns."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from pyspac.engine.board_figures import EngineInfo, read_info
from pyspac.engine.threads import threads_text
from pyspac.model.spec_types import NONE
from pyspac.scheduler.fallback import copies_text
from pyspac.scheduler.layer_modes import whole_text
from pyspac.speculation.explain import explain, to_dicts
from pyspac.speculation.manager import FIXED
from pyspac.talk.answer import Answer
from pyspac.talk.figures import Figures, way_dict
from pyspac.units import MIB

if TYPE_CHECKING:
    from pyspac.talk.own_server import OwnServer


def run_dict(
    server: OwnServer, figures: Figures, answer: Answer, *, with_decisions: bool = False
) -> dict[str, Any]:
    """The object of `--json`."""
    return {
        **_server_dict(server),
        **(_decisions_dict(server) if with_decisions else {}),
        **answer_dict(answer),
        **figures.to_dict(),
    }


def answer_dict(answer: Answer) -> dict[str, Any]:
    """What came of the request, from any server."""
    return {
        "seed": answer.seed,
        "text": answer.text,
        "token_ids": answer.token_ids,
        "stop_reason": answer.stop_reason,
        "n_prompt": answer.n_prompt,
        "n_cached": answer.n_cached,
        **answer.to_dict(),
    }


def _server_dict(server: OwnServer) -> dict[str, Any]:
    """The models, and the drafter."""
    options = server.options
    drafts = options.drafts
    return {
        **way_dict(
            _info_of(server), server.device_name, server.launch.n_ubatch, is_host_only=options.is_host_only
        ),
        "model": str(server.launch.model),
        "draft": str(options.draft) if options.draft and drafts else None,
        "mtp": str(options.mtp) if options.mtp and drafts else None,
        "spec_type": options.wanted_spec_type,
        "draft_max": options.attach.n_draft_max if drafts else 0,
        "speculation": _controller(server) if drafts else None,
    }


def _controller(server: OwnServer) -> str:
    return server.options.attach.speculation if server.attachment is not None else FIXED


def _info_of(server: OwnServer) -> EngineInfo | None:
    return None if server.board is None else read_info(server.board)


def _decisions_dict(server: OwnServer) -> dict[str, Any]:
    """With --explain: how draft lengths were chosen, and the costs that rests on."""
    speculation = server.attachment and server.attachment.speculation
    if not speculation:
        return {}
    shared = speculation.speculation
    return {"decisions": to_dicts(shared.decisions()), "costs": shared.shared.table.to_dict()}


def print_decisions(console: Console, server: OwnServer) -> None:
    """For `--explain`: what was decided, or why there was nothing to decide."""
    speculation = server.attachment and server.attachment.speculation
    if speculation:
        for line in explain(speculation.speculation.decisions()):
            console.print(line, style="dim", markup=False, soft_wrap=True)
    elif server.options.drafts:
        console.print(
            f"the draft length is fixed at {server.options.attach.n_draft_max}, so there is nothing to "
            "explain: have it chosen with --speculation auto",
            style="yellow",
        )
    else:
        console.print(
            "nothing drafts, so there is nothing to explain: give -md or --spec-type", style="yellow"
        )


# ------------------------------------------------------------------------------------------------ table


def print_table(
    console: Console,
    answer: Answer,
    server: OwnServer | None = None,
    figures: Figures | None = None,
    defaults: str | None = None,
) -> None:
    """What happened, in at most 80 columns; of a server that ran already only what the answer tells.

    `defaults`: flags that were saved for the model, and are used.
    """
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    rows = [*speed_rows(answer), *drafting_rows(answer, server)]
    if server is not None and figures is not None:
        rows = [("mode", mode_text(server)), *rows, *engine_rows(server, figures, answer)]
    if defaults is not None:
        rows.append(("defaults", f"{defaults} (saved by pyspac bench --profile)"))
    for name, text in rows:
        table.add_row(name, text)
    console.print(table)


def mode_text(server: OwnServer) -> str:
    info = _info_of(server)
    threads = f"{server.n_threads} thread{'s' * (server.n_threads != 1)}"
    if info is None and server.options.stock:
        return f"stock llama.cpp on {server.device_name}, {threads}"
    if info is None:
        return f"llama.cpp's kernels, {threads}: the engine has none for this model here"
    if server.options.is_host_only:
        what = "every expert" if info.n_expert else "a dense model"
        return f"{what} on the host, {threads}, {info.kernels} kernels"
    return f"split between {device_text(server)} and the host"


def device_text(server: OwnServer) -> str:
    """The device's name, and that it is emulated where it is."""
    info = _info_of(server)
    if info is None or not info.is_emulated:
        return info.device if info else server.device_name
    if server.options.is_emulated:
        return "a device emulated on the CPU"
    return f"{info.device} with an emulated link"


def speed_rows(answer: Answer) -> list[tuple[str, str]]:
    n_new = f" ({answer.n_cached} of them kept)" if answer.n_cached else ""
    return [
        (
            "tokens",
            f"{answer.n_tokens} after a prompt of {answer.n_prompt}{n_new}, stopped: {answer.stop_reason}",
        ),
        (
            "speed",
            f"{_number(answer.tps)} tokens/s, {_number(answer.tpot_ms)} ms per token, "
            f"the first after {_number(answer.ttft_ms)} ms",
        ),
    ]


def drafting_rows(answer: Answer, server: OwnServer | None) -> list[tuple[str, str]]:
    name = server.options.wanted_spec_type if server else ""
    if name == NONE or (not server and not answer.totals.n_draft):
        return [("drafting", NONE)]
    totals = answer.totals
    rate = f"{totals.acceptance_rate or 0.0:.0%} accepted"
    text = f"{totals.n_draft} drafted, {rate}, {_number(totals.acceptance_length)} tokens per step"
    text = text if totals.n_draft else "nothing drafted"
    return [("drafting", f"{name}, {text}" if name else text)]


def engine_rows(server: OwnServer, figures: Figures, answer: Answer) -> list[tuple[str, str]]:
    if (info := _info_of(server)) is None:
        return []
    n_steps = max(1, answer.totals.n_steps)
    if server.options.is_host_only:
        return _host_rows(info, figures, n_steps)
    return _split_rows(figures, n_steps)


def _declined_text(figures: Figures) -> str:
    return "".join(f", {n} declined ({reason})" for reason, n in figures.declined().items())


def _host_rows(info: EngineInfo, figures: Figures, n_steps: int) -> list[tuple[str, str]]:
    """Without a device: what the engine's own kernels compute."""
    experts = (
        f"experts of {info.n_layer_kernels} layers{_declined_text(figures)}, and " if info.n_expert else ""
    )
    rows = [("own kernels", f"{experts}{info.n_dense_kernels} other matrices")]
    if info.n_layer_kernels:
        rows.append(("per step", f"experts {figures.steps_us('host_us') / n_steps / 1e3:.2f} ms"))
    if (threads := figures.threads()) is not None and threads["is_crowded"]:
        rows.append(("threads", threads_text(threads)))
    tier = _tier_rows(figures)
    predicted = [(f"predicted by {p['name']}", _read_ahead_text(p)) for p in figures.predictors()]
    return [*rows, *tier, *_lossy_rows(figures), *(predicted if tier else [])]


def _tier_rows(figures: Figures) -> list[tuple[str, str]]:
    """Experts that stay on disk."""
    if (tier := figures.tier()) is None:
        return []
    share = "-" if tier["hit_share"] is None else f"{tier['hit_share']:.0%}"
    depth = "-" if tier["depth"] is None else f"{tier['depth']:.1f}"
    to_device = f"{tier['n_to_device_read']} of {tier['n_to_device']} experts that were copied"
    return [
        ("memory", f"{tier['n_slots']} experts, {tier['pool_bytes'] / MIB:.0f} MiB; {share} of those used"),
        (
            "disk",
            f"{tier['read_bytes'] / MIB:.0f} MiB in {tier['n_reads']} reads, {depth} at a time; "
            f"waited {tier['wait_us'] / 1e6:.2f} s",
        ),
        *([("from disk", to_device)] if tier["n_to_device"] else []),
    ]


def _read_ahead_text(predictor: dict[str, Any]) -> str:
    """Of the engine's predictors, which ask the disk."""
    if predictor["recall"] is None:
        return "nothing"
    return (
        f"{predictor['recall']:.0%} of what was used, {predictor['precision']:.0%} right; "
        f"{predictor['n_queued']} experts read for it"
    )


def _split_rows(figures: Figures, n_steps: int) -> list[tuple[str, str]]:
    experts = figures.experts()
    moved = f"{experts['loaded_bytes'] / MIB:.1f} MiB"
    return [
        ("layers", f"{figures.n_split} split{_declined_text(figures)}"),
        ("slots", f"{experts['n_slots']} experts, {experts['pool_bytes'] / MIB:.1f} MiB"),
        *_tier_rows(figures),
        ("covered", _coverage_text(figures.coverage())),
        *_lossy_rows(figures),
        (
            "loads",
            f"{experts['n_loads']} ({moved}), {experts['n_evictions']} evictions, {experts['n_late']} late",
        ),
        *_device_rows(figures),
        *_stage_rows(experts),
        *_scheduler_rows(figures.scheduler()),
        ("per step", _step_text(figures, n_steps)),
        *((f"predicted by {p['name']}", _predicted_text(p)) for p in figures.predictors()),
    ]


def _device_rows(figures: Figures) -> list[tuple[str, str]]:
    """One for each of several devices."""
    devices = figures.devices()
    return [(device.name, device.text()) for device in devices if len(devices) > 1]


def _stage_rows(experts: dict[str, int]) -> list[tuple[str, str]]:
    """What the prompt copied while it was computed; no row if it copied nothing."""
    if not experts["n_staged"]:
        return []
    hidden = max(0.0, 1 - experts["stage_wait_us"] / max(1, experts["staged_us"]))
    text = f"{experts['n_staged']} experts ({experts['staged_bytes'] / MIB:.1f} MiB) passed through the slots"
    return [("prompt", f"{text}, {hidden:.0%} of their copying hidden")]


def _scheduler_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Layers that the device holds whole, and whether copies pay, once that was measured."""
    whole, copies = found["whole"], found["copies"]
    return [
        *([("whole layers", whole_text(whole))] if whole and whole["layers"] else []),
        *([("copies", copies_text(copies))] if copies and copies["gain"] is not None else []),
    ]


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


def _lossy_rows(figures: Figures) -> list[tuple[str, str]]:
    kept, kl = figures.router_weight_kept(), figures.kl_divergence()
    if kept is None:
        return []
    rows = [("not exact", f"{1 - kept:.2%} of the router's weight (--lossy)")]
    if kl is not None:
        of_lossy = "" if kl["of_lossy"] is None else f", {kl['of_lossy']:.4f} of lossy ones"
        rows.append(
            ("KL divergence", f"{kl['mean']:.4f} nats per token{of_lossy} ({kl['n_samples']} samples)")
        )
    return rows


def _coverage_text(coverage: float | None) -> str:
    return "-" if coverage is None else f"{coverage:.1%} of activations found their expert on the device"


def _step_text(figures: Figures, n_steps: int) -> str:
    """Times of experts per step, summed over the layers; a device's time may not be observed yet."""
    host, device = (figures.steps_us(name) / n_steps / 1e3 for name in ("host_us", "device_us"))
    device_text = f"{device:.2f} ms" if device else "not observed"
    step_us = figures.scheduler()["step_us_p50"]
    scheduler_ms = _number(None if step_us is None else step_us / 1e3)
    return f"host experts {host:.2f} ms, device experts {device_text}, scheduler {scheduler_ms} ms"


def _number(value: float | None) -> str:
    """EngineInfo three digits; "-" for none."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
