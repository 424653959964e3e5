"""Phase `model`: a synthetic GGUF as by make_synthetic_gguf.py, but written by all cores at once."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from settings import REPOSITORY, Settings

sys.path.insert(0, str(REPOSITORY / "scripts"))
import make_synthetic_gguf as maker
from gguf import GGUFWriter
from rich.progress import Progress, TimeElapsedColumn

N_VOCAB = 8192
MEMORY_COPIES = 3.2  # the file's pages, two loaded models, and some room
DISK_COPIES = 1.1


def geometry_of(s: Settings, n_layer: int | None) -> maker.Geometry:
    if s.like not in maker.GEOMETRIES:
        raise ValueError(f"--like {s.like}: unknown; known: {', '.join(maker.GEOMETRIES)}")
    g = maker.GEOMETRIES[s.like]
    return g if n_layer is None else dataclasses.replace(g, n_layer=n_layer)


def choose_layers(s: Settings, left_s: float, folder: Path) -> tuple[int, str | None]:
    """(layers, why there are fewer than the model has)."""
    whole = geometry_of(s, None).n_layer
    if s.layers is not None:
        return s.layers, None
    per_layer = model_bytes(geometry_of(s, 2)) - model_bytes(geometry_of(s, 1))
    room = min(
        psutil.virtual_memory().available / MEMORY_COPIES, shutil.disk_usage(folder).free / DISK_COPIES
    )
    fits = max(1, int(room / per_layer) - 1)
    if fits < whole:
        return fits, f"{fits} of {whole} layers: memory or disk has no room for more"
    if left_s < 240:
        return max(1, whole // 2), f"{whole // 2} of {whole} layers: {left_s:.0f} s are left"
    return whole, None


def model_bytes(g: maker.Geometry) -> int:
    return sum(tensor.n_bytes for tensor in maker.plan_tensors(g, N_VOCAB, 0))


def model_path(folder: Path, like: str, n_layer: int) -> Path:
    return folder / f"{like}-{n_layer}-layers.gguf"


def make_model(path: Path, s: Settings, n_layer: int, n_processes: int) -> None:
    """Header first, then every tensor at its own offset; under a temporary name until it is whole."""
    g = geometry_of(s, n_layer)
    partial = path.with_name(path.name + ".part")
    tensors = list(maker.plan_tensors(g, N_VOCAB, 0))
    try:
        offsets = write_head(partial, s.like, g, tensors)
        with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), transient=True) as bar:
            task = bar.add_task(path.name, total=sum(tensor.n_bytes for tensor in tensors))
            with ProcessPoolExecutor(n_processes) as pool:
                jobs = {
                    pool.submit(fill_tensor, str(partial), s.like, n_layer, index, offsets[index]): index
                    for index in by_size(tensors)
                }
                for job in as_completed(jobs):
                    job.result()
                    bar.advance(task, tensors[jobs[job]].n_bytes)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def by_size(tensors: list[Any]) -> list[int]:
    """Largest first, so that no process is left with a large one at the end."""
    return sorted(range(len(tensors)), key=lambda index: -tensors[index].n_bytes)


def write_head(path: Path, like: str, g: maker.Geometry, tensors: list[Any]) -> list[int]:
    """Everything but the data; return each tensor's offset in the file."""
    writer = GGUFWriter(path, g.arch)
    maker._write_header(writer, f"synthetic {like}", g, N_VOCAB)
    for tensor in tensors:
        maker._add_tensor_info(writer, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    align = writer.data_alignment
    at = padded(path.stat().st_size, align)
    offsets = []
    for tensor in tensors:
        offsets.append(at)
        at += padded(tensor.n_bytes, align)
    os.truncate(path, at)
    return offsets


def padded(n: int, align: int) -> int:
    return -(-n // align) * align


def fill_tensor(path: str, like: str, n_layer: int, index: int, offset: int) -> None:
    """In a process of its own: make tensor `index` and write it at its place."""
    g = dataclasses.replace(maker.GEOMETRIES[like], n_layer=n_layer)
    tensor = list(maker.plan_tensors(g, N_VOCAB, 0))[index]
    data = np.ascontiguousarray(tensor.fill(np.random.default_rng([1, index])))
    assert data.nbytes == tensor.n_bytes, tensor.name
    with Path(path).open("r+b") as file:
        file.seek(offset)
        file.write(data.data)


def run(s: Settings, left_s: float) -> dict[str, Any]:
    """Phase `model`: {path, note}; a file that is there already is taken."""
    if s.model:
        return {"path": s.model, "result": f"{Path(s.model).name}, as given"}
    folder = Path(s.work)
    folder.mkdir(parents=True, exist_ok=True)
    n_layer, why = choose_layers(s, left_s, folder)
    path = model_path(folder, s.like, n_layer)
    existed = path.is_file()
    if not existed:
        make_model(path, s, n_layer, psutil.cpu_count() or 1)
    skipped = [] if why is None else [["layers of the model", why]]
    how = "kept" if existed else "written"
    return {
        "path": str(path),
        "result": f"{path.name}, {path.stat().st_size / 1e9:.2f} GB, {how}; random weights",
        "skipped": skipped,
    }
