"""An `Observation` in, the figures that people read out: names and texts."""

from __future__ import annotations

from typing import Any

from pyspac.engine.threads import threads_text
from pyspac.scheduler.fallback import copies_text
from pyspac.server.snapshot import Observation
from pyspac.units import MIB


def _text(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def figures(seen: Observation) -> dict[str, str]:
    """In the order in which they are shown; "-": nothing happened to measure. Without slots: no device's."""
    return {
        "tokens/s": _text(seen.tokens_per_s, ".1f"),
        **(_device(seen) if seen.n_slots else {}),
        "draft length": _text(seen.draft_length, ".2f") + _limits(seen),
        "accepted": _text(None if seen.acceptance_rate is None else seen.acceptance_rate * 100, ".0f", " %"),
        "draft": _ms(seen.draft_us),
        "verify": _ms(seen.verify_us),
        "process": _ms(seen.process_us),
        **({} if seen.threads is None else {"threads": threads_text(seen.threads)}),
        **({} if seen.tier is None else _tier(seen.tier, seen.seconds)),
        **({} if seen.kept is None else {"router weight kept": _text(seen.kept * 100, ".2f", " %")}),
        **({} if seen.kl is None else {"KL divergence": _text(seen.kl, ".4f")}),
    }


def _device(seen: Observation) -> dict[str, str]:
    return {
        "covered": _text(None if seen.covered is None else seen.covered * 100, ".1f", " %"),
        "loads/s": f"{seen.loads_per_s:.1f}",
        "copied": f"{seen.loaded_bytes_per_s / MIB:.1f} MiB/s",
        **({"whole layers": f"{seen.n_whole} of {int(seen.is_split.sum())}"} if seen.n_whole else {}),
        **({} if seen.copies is None else {"copies": copies_text(seen.copies)}),
        "on the device": f"{seen.n_resident} of {seen.n_slots} slots",
        **({device.name: device.text() for device in seen.devices} if len(seen.devices) > 1 else {}),
    }


def _tier(tier: dict[str, Any], seconds: float) -> dict[str, str]:
    """Experts on disk, and those that memory holds."""
    found = tier["hit_share"]
    mib_s, depth = tier["read_bytes"] / seconds / MIB, _text(tier["depth"], ".1f")
    return {
        "in memory": f"{tier['n_resident']} of {tier['n_slots']} slots",
        "found there": _text(None if found is None else found * 100, ".1f", " %"),
        "reads/s": f"{tier['n_reads'] / seconds:.1f} ({mib_s:.1f} MiB/s, depth {depth})",
        "waited for reads": f"{tier['wait_us'] / 1e4 / seconds:.0f} % of the time",
    }


def _ms(us: float | None) -> str:
    return _text(None if us is None else us / 1e3, ".1f", " ms")


def _limits(seen: Observation) -> str:
    """The draft-length limit, if one is in force."""
    values = sorted(set(seen.n_draft_max.values()))
    return f" (at most {'/'.join(map(str, values))})" if values else ""
