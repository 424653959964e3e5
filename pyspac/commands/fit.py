"""`pyspac fit`: which models this machine, or another one, can run, and how fast."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import typer
from rich.console import Console
from rich.table import Table

from pyspac.checks import check_int
from pyspac.commands import options as o
from pyspac.commands.common import check_json_target, error_console, output_console, reports_errors
from pyspac.commands.json_file import STDOUT, write_json
from pyspac.commands.machine_speed import TYPES, measure
from pyspac.commands.model_names import find_file
from pyspac.engine.cpus import default_n_threads
from pyspac.engine.memory import free_memory
from pyspac.engine.values import read_size
from pyspac.errors import ConfigError, UsageError
from pyspac.forward.options import DEFAULT_N_CTX
from pyspac.model.checks import check_model_file
from pyspac.model.device_needs import kv_bytes
from pyspac.model.geometry import read_geometry
from pyspac.model.known_models import Weights, all_weights
from pyspac.model.memory_tier import MEANS_MIB
from pyspac.model.speed_forecast import CARD_GB_S, WIDTHS, Forecast, Machine, forecast
from pyspac.units import GIB, size_text

MAX_N_CTX: Final = 1 << 24
STEADY: Final = 1.2  # the fastest kernels by the slowest: less is not worth a line
QUIET: Final = 0.1  # of the cores, that other programs take: less is not worth a line

Words: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL",
        help="GGUF files or names of Hugging Face, instead of the models that people run.",
    ),
]
Vram: TypeAlias = Annotated[
    str | None, typer.Option("--vram", metavar="SIZE", help="Predict for a card of this size, such as 8G.")
]
Ram: TypeAlias = Annotated[
    str | None,
    typer.Option("--ram", metavar="SIZE", help="Predict for this much free memory. Default: what is free."),
]
CtxSize: TypeAlias = Annotated[
    int, typer.Option("-c", "--ctx-size", metavar="N", help="Tokens of the context.")
]


@reports_errors
def fit(
    models: Words = None,
    vram: Vram = None,
    ram: Ram = None,
    ctx_size: CtxSize = DEFAULT_N_CTX,
    threads: o.Threads = None,
    json_file: o.JsonFile = None,
) -> None:
    """Show which models fit, and how fast they would be.

    Measures memory, kernels and disk for some seconds, and predicts speeds from them and the models' sizes.
    A card's part rests on an assumed speed: no card was ever measured.
    """
    check_json_target(json_file)
    check_int("-c", ctx_size, 1, MAX_N_CTX)
    if threads is not None:
        check_int("-t", threads, 1)
    vram_bytes = 0 if vram is None else _size("--vram", vram)
    ram_bytes = free_memory() if ram is None else _size("--ram", ram)
    files = [find_file(word) for word in models or ()]
    weights = [_of_file(path, ctx_size) for path in files] or list(all_weights(ctx_size))
    types = set().union(*(one.types for one in weights)) if files else TYPES
    if (progress := error_console()).is_terminal:
        progress.print("measuring memory, kernels and disk")
    machine = measure(
        threads or default_n_threads(), ram_bytes, vram_bytes, files[0] if files else None, sorted(types)
    )
    found = [forecast(one, machine, ctx_size) for one in weights]
    if json_file is not None:
        write_json(json_file, _to_dict(machine, found, ctx_size))
    if json_file != STDOUT:
        show(output_console(), machine, found, ctx_size)


def _size(flag: str, text: str) -> int:
    with suppress(UsageError):  # its advice has shares and auto, which are no size of a machine
        if "%" not in text and (n_bytes := read_size(flag, text, 0)):
            return n_bytes
    raise ConfigError(flag, text, "GiB (8G) or MiB (8000), more than 0")


def _of_file(path: Path, n_ctx: int) -> Weights:
    header = check_model_file(path)
    geometry = read_geometry(header)
    if not geometry.is_moe:
        raise UsageError(f"{path} is a dense model: it has no experts that could be elsewhere")
    return Weights.of_file(header, geometry, {n_ctx: kv_bytes(header, n_ctx)})


def _to_dict(machine: Machine, found: Sequence[Forecast], n_ctx: int) -> dict[str, Any]:
    return {
        "n_ctx": n_ctx,
        "ram_bytes": machine.ram_bytes,
        "vram_bytes": machine.vram_bytes,
        "measured": {
            "memory_gb_s": machine.memory_gb_s,
            "disk": machine.disk.to_dict(),
            "widths": WIDTHS,
            "kernels": {name: speed.gb_s for name, speed in machine.kernels.items()},
            "varied": machine.varied,
            "others_share": machine.others_share,
        },
        "assumed": {"card_gb_s": CARD_GB_S if machine.vram_bytes else None},
        "models": [one.to_dict() for one in found],
    }


def show(console: Console, machine: Machine, found: Sequence[Forecast], n_ctx: int) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("model")
    for head in ("file\nGB", "needs\nGiB"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("experts", no_wrap=True)
    for head in ("answers\ntokens/s", "prompts\ntokens/s"):
        table.add_column(head, justify="right", no_wrap=True)
    for one in found:
        style = "dim" if one.decode_tps is None else None
        table.add_row(*cells(one), style=style)
    console.print(table)
    card = f", a card with {size_text(machine.vram_bytes)}" if machine.vram_bytes else ""
    console.print(
        f"\nPredicted for {size_text(machine.ram_bytes)} of free memory{card}, a context of {n_ctx} tokens, "
        "without drafts; needs: memory for everything, so that no expert stays on disk.",
        style="dim",
    )
    if all(one.decode_tps is None for one in found):
        console.print(f"{MEANS_MIB}.", style="yellow")
    low, high = machine.varied
    if high / low > STEADY:
        console.print(
            f"Kernels ran at {low:.2f} to {high:.2f} times their median speed while measured: expect models "
            "to vary as much.",
            style="yellow",
        )
    if machine.others_share > QUIET:
        console.print(
            f"Other programs took {machine.others_share:.0%} of the cores meanwhile: end them, and repeat; "
            "speeds without them are higher.",
            style="yellow",
        )
    if machine.vram_bytes:
        console.print(
            f"With a card: predicted, never measured; {CARD_GB_S:g} GB/s is assumed.", style="yellow"
        )
    shares = ", ".join(f"{name} {speed.gb_s[0]:.0f}" for name, speed in machine.kernels.items())
    console.print(
        f"Measured, in GB/s: memory {machine.memory_gb_s:.1f}, kernels {shares or 'none'}, disk "
        f"{machine.disk.depth_32_gb_s:.2f}. To run one: pyspac run FILE.gguf, or USER/MODEL:QUANT",
        style="dim",
    )


def cells(one: Forecast) -> list[str]:
    name = f"{one.name} {one.quantisation}"
    sizes = [f"{one.model_bytes / 1e9:.1f}", f"{one.needed_bytes / GIB:.1f}"]
    if one.decode_tps is None or one.prompt_tps is None:
        return [name, *sizes, f"not below {one.least_bytes / GIB:.1f} GiB", "-", "-"]
    on_disk = f"{1 - one.share_in_memory - one.share_on_card:.0%} on disk"
    place = one.place.replace(" and disk", ", disk").replace("disk", on_disk)
    return [name, *sizes, place, _number(one.decode_tps), _number(one.prompt_tps)]


def _number(tps: float) -> str:
    return f"{tps:,.0f}" if tps >= 10.0 else f"{tps:.1f}"
