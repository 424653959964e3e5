"""What a context with the engine reports of itself: parts of a JSON object, and a device's name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspac.engine.board_figures import NO_EXPERTS

if TYPE_CHECKING:
    from pyspac.engine.devices import Device
    from pyspac.generate.options import RunOptions
    from pyspac.generate.session import Session
    from pyspac.generate.split import Split

NO_SCHEDULER = dict.fromkeys(("estimator", "step_us_p50", "step_us_p99", "copies", "whole"))


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


def device_text(session: Session) -> str:
    """The device's name, and that it is emulated where it is."""
    info = session.split.info if session.split else None
    if info is None or not info.is_emulated:
        return info.device if info else session.device.name
    if session.device.is_cpu:
        return "a device emulated on the CPU"
    return f"{info.device} with an emulated link"
