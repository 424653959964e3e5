"""`pyspac inspect`: what a model file holds, and how many of its experts fit into a device's memory, or the
host's."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Annotated, Final, Self, TypeAlias

import typer
from rich.console import Console
from rich.table import Table

from pyspac.checks import check_int
from pyspac.commands import options as o
from pyspac.commands.common import check_json_target, output_console, reports_errors
from pyspac.commands.json_file import STDOUT, write_json
from pyspac.commands.model_names import find_files
from pyspac.commands.tier_view import TierView
from pyspac.engine.cpus import default_n_threads
from pyspac.engine.memory import free_memory
from pyspac.engine.values import read_size
from pyspac.errors import ConfigError, PyspacError
from pyspac.forward.preflight import choose_n_ctx
from pyspac.model.checks import check_model_file
from pyspac.model.device_needs import Needs, estimate_needs
from pyspac.model.draft_files import drafting_note, has_head
from pyspac.model.geometry import LayerGeometry, MoeGeometry, read_geometry
from pyspac.model.gguf_header import GgufHeader
from pyspac.model.memory_tier import asked_bytes, check_ram
from pyspac.model.prompt_piece import beside_device, fit_piece, wanted_piece
from pyspac.model.tier_forecast import Places
from pyspac.units import GIB, MIB, size_text

DEFAULT_VRAM: Final = tuple(n * GIB for n in (4, 8, 12, 16, 24))


Vram: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--vram",
        metavar="SIZE",
        help="Show how many experts fit into this much memory, and onto such a GPU beside weights, "
        "context (-c) and draft model (-md). Repeatable.",
    ),
]
RamSizes: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--ram",
        metavar="SIZE",
        help="Predict the speed with this much memory for experts and the rest on disk; measures "
        "both. With --vram: how many experts are on the device, in memory and on disk. "
        "Repeatable.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gpu:
    """One with so much memory, and what it holds beside experts."""

    n_bytes: int
    n_ubatch: int  # tokens of a prompt that are computed at once
    needs: Needs

    @classmethod
    def of(cls, target: GgufHeader, draft: GgufHeader | None, n_ctx: int, n_bytes: int) -> Self:
        """Without a draft model the target's own head drafts, if it has one."""
        geometry = read_geometry(target)
        n = fit_piece(wanted_piece(geometry, beside_device(geometry, n_bytes)), target, n_ctx, n_bytes)
        drafts = draft is None and has_head(target)
        return cls(
            n_bytes=n_bytes, n_ubatch=n, needs=estimate_needs(target, draft, n_ctx, n, has_head=drafts)
        )


Gpus: TypeAlias = dict[int, _Gpu]  # by their memory, the smallest first


@reports_errors
def inspect(
    model_word: o.ModelWord = None,
    model: o.Model = None,
    hf_repo: o.HfRepo = None,
    model_draft: o.ModelDraft = None,
    ctx_size: o.CtxSize = None,
    vram: Vram = None,
    ram: RamSizes = None,
    threads: o.Threads = None,
    json_file: o.JsonFile = None,
) -> None:
    """Show a model's layers and experts.

    Geometry, quantisation per layer, bytes per expert, how many experts fit into N GiB, and how many tokens
    of a prompt this machine computes at once. Only the file's header is read; --ram measures disk, memory
    and kernels for some seconds.
    """
    check_json_target(json_file)
    if threads is not None:
        check_int("-t", threads, 1)
    sizes = sorted({_vram_bytes(text) for text in vram} if vram else DEFAULT_VRAM)
    for text in ram or ():
        check_ram(text)
    path, _ = find_files(model, hf_repo)
    header = check_model_file(path)
    geometry = read_geometry(header)
    draft = None if model_draft is None else check_model_file(model_draft)
    n_ctx = choose_n_ctx(ctx_size, geometry)
    gpus = {size: _Gpu.of(header, draft, n_ctx, size) for size in sizes}
    host_n_ubatch = _host_n_ubatch(header, n_ctx)
    tier = _foresee(header, geometry, ram, threads) if ram and geometry.is_moe else None
    places = _places(geometry, gpus, ram) if vram and ram and geometry.is_moe else []
    if json_file is not None:
        found = {
            "fits": [_fit_dict(geometry, gpu) for gpu in gpus.values()],
            "needs": asdict(_shown(geometry, gpus).needs),
            "host_n_ubatch": host_n_ubatch,
            "tier": None if tier is None else tier.to_dict(),
            "places": [place.to_dict() for place in places],
        }
        write_json(json_file, geometry.to_dict() | found)
    if json_file != STDOUT:
        console = output_console()
        _show(console, geometry, gpus, note=drafting_note(header))
        if host_n_ubatch is not None:
            console.print(f"without a GPU this machine computes {host_n_ubatch} tokens of a prompt at once")
        if tier is not None:
            tier.show(console)
        if places:
            console.print(_places_table(places))


def _host_n_ubatch(header: GgufHeader, n_ctx: int) -> int | None:
    """How many tokens of a prompt this machine computes at once without a device, all experts in memory.

    None: nothing is built here. All else of `inspect` needs the file alone.
    """
    try:
        from pyspac.engine.engine import tokens_per_expert  # loads the native library
    except PyspacError:
        return None
    wanted = wanted_piece(read_geometry(header), "host", tokens_per_expert())
    return fit_piece(wanted, header, n_ctx, free_memory())


def _places(geometry: MoeGeometry, gpus: Gpus, ram: list[str]) -> list[Places]:
    """Of each size of the device's memory with each of the host's."""
    sizes = sorted({asked_bytes(text, geometry) for text in ram})
    each = ((gpu, size) for gpu in gpus.values() for size in sizes)
    return [Places.of(geometry, gpu.n_bytes, size, gpu.needs.total) for gpu, size in each]


def _places_table(places: list[Places]) -> Table:
    table = Table(
        "device", "memory", "on the device", "in memory", "on disk",
        box=None, padding=(0, 2, 0, 0), title_justify="left",
    )  # fmt: skip
    table.title = "\nwhere the experts are, with a device beside memory (--vram, --ram)"
    for found in places:
        table.add_row(
            size_text(found.vram_bytes), size_text(found.ram_bytes),
            str(found.n_on_device), str(found.n_in_memory), str(found.n_on_disk),
        )  # fmt: skip
    return table


def _foresee(header: GgufHeader, geometry: MoeGeometry, sizes: list[str], threads: int | None) -> TierView:
    n_threads = threads or default_n_threads()
    return TierView.measure(
        header, geometry, sorted(asked_bytes(text, geometry) for text in sizes), n_threads
    )


def _vram_bytes(text: str) -> int:
    n_bytes = read_size("--vram", text, 0)
    if n_bytes is None or "%" in text:
        raise ConfigError("--vram", text, "GiB (8G) or MiB (8000)")
    return n_bytes


def _fit_dict(geometry: MoeGeometry, gpu: _Gpu) -> dict[str, float]:
    """So many bytes for experts, and on a GPU with that much memory."""
    return {
        "gib": gpu.n_bytes / GIB,
        "n_experts": geometry.n_experts_in(gpu.n_bytes),
        "n_experts_of_gpu": geometry.n_experts_in(max(0, gpu.n_bytes - gpu.needs.total)),
        "n_ubatch": gpu.n_ubatch,
    }


def _shown(geometry: MoeGeometry, gpus: Gpus) -> _Gpu:
    """The largest that does not hold all of the model, or the smallest."""
    few = [gpu for gpu in gpus.values() if beside_device(geometry, gpu.n_bytes) == "device"]
    return few[-1] if few else next(iter(gpus.values()))


def _show(console: Console, geometry: MoeGeometry, gpus: Gpus, *, note: str | None) -> None:
    table = _summary(geometry)
    if note is not None:
        table.add_row("drafting", note)
    console.print(table)
    if not geometry.is_moe:
        console.print("\nA dense model: it has no experts to split.")
        return
    console.print(_layer_table(geometry))
    console.print(_fit_table(geometry, gpus))
    gpu = _shown(geometry, gpus)
    parts = ", ".join(f"{name} {n / MIB:.0f}" for name, n in asdict(gpu.needs).items() if n)
    console.print(
        f"beside the experts a GPU holds {gpu.needs.total / MIB:.0f} MiB: {parts}"
        f" (with {size_text(gpu.n_bytes)}, which computes {gpu.n_ubatch} tokens of a prompt at once)"
    )


def _summary(geometry: MoeGeometry) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    g = geometry
    table.add_row("model", f"{g.name} ({g.architecture}), {size_text(g.model_bytes)}")
    table.add_row(
        "layers", f"{g.n_layer}, of which {g.n_moe_layer} with experts; {g.n_leading_dense} leading dense"
    )
    table.add_row("width", f"{g.n_embd}, trained with a context of {g.n_ctx_train} tokens")
    if g.is_moe:
        table.add_row(
            "experts", f"{g.n_expert} per layer, {g.n_expert_used} used per token, {g.n_expert_shared} shared"
        )
        share = _share(g.experts_bytes, g.model_bytes)
        table.add_row("", f"{g.n_experts_total} in all, {size_text(g.experts_bytes)}, {share} of the model")
    return table


def _layer_table(geometry: MoeGeometry) -> Table:
    """One row per run of equal layers."""
    table = Table(
        "layers",
        "experts",
        "quantisation",
        "MiB per expert",
        box=None,
        padding=(0, 2, 0, 0),
        title_justify="left",
    )
    table.title = "\nexperts by layer"
    for (n_expert, layout, n_bytes), group in groupby(geometry.layers, key=_layer_key):
        layers = list(group)
        if n_expert:
            table.add_row(_range(layers), str(n_expert), layout, f"{n_bytes / MIB:.3f}")
        else:
            table.add_row(_range(layers), "-", "dense", "-")
    return table


def _layer_key(layer: LayerGeometry) -> tuple[int, str, int]:
    return layer.n_expert, layer.layout, layer.expert_bytes


def _range(layers: list[LayerGeometry]) -> str:
    first, last = layers[0].il, layers[-1].il
    return str(first) if first == last else f"{first}-{last}"


def _fit_table(geometry: MoeGeometry, gpus: Gpus) -> Table:
    heads = ("memory", "if all is for experts", "of all", "on a GPU of that size", "of all")
    table = Table(*heads, box=None, padding=(0, 2, 0, 0), title_justify="left")
    table.title = "\nhow many experts fit"
    for size, gpu in gpus.items():
        fit = _fit_dict(geometry, gpu)
        counts = (fit["n_experts"], fit["n_experts_of_gpu"])
        cells = (text for n in counts for text in (str(n), _share(n, geometry.n_experts_total)))
        table.add_row(size_text(size), *cells)
    return table


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"
