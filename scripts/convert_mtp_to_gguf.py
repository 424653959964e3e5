#!/usr/bin/env python3
"""Convert what scripts/train_mtp.py trained to a GGUF adapter, for the GGUF of the same model.

    WORK_DIR/adapter.pt -> LoRA as Hugging Face writes it -> llama.cpp's own converter -> keys -> OUT

The model may be quantised in any way. OUT is a LoRA adapter as llama.cpp loads it, with keys `pyspac.mtp.*`:
pyspac/model/mtp.py says what they mean. It appears under its name when it is complete.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import gguf
from convert_to_gguf import UserError, check_packages, find_converter, tail

from pyspac.errors import ModelError
from pyspac.model import mtp
from pyspac.model.gguf_header import GgufHeader, read_header

CONVERTER: Final = "convert_lora_to_gguf.py"
PREFIX: Final = "base_model.model."
EMBEDDING: Final = "token_embd.weight"


def read_checkpoint(folder: Path) -> dict[str, Any]:
    """What train_mtp.py saved. Raises UserError where nothing is, or something else."""
    import torch

    path = folder / "adapter.pt"
    for needed in (path, folder / "config.json"):
        if not needed.is_file():
            raise UserError(f"there is no {needed}; give the --work-dir of scripts/train_mtp.py")
    try:
        saved: dict[str, Any] = torch.load(path, map_location="cpu")
        saved["sizes"]["mask_ids"], saved["adapter"]["embedding"]
        is_finite = all(bool(weight.isfinite().all()) for weight in saved["adapter"].values())
    except Exception as error:  # torch has no class of its own for a file that is not one of its files
        raise UserError(f"{path} is no checkpoint of scripts/train_mtp.py ({error}); train again") from error
    if not is_finite:
        raise UserError(
            f"{path}: the training has diverged, as numbers are not finite; train with a smaller --lr"
        )
    return saved


def write_lora(saved: dict[str, Any], folder: Path) -> None:
    """The adapter as Hugging Face's `peft` writes one.

    The masks' embeddings are a change of rank n_masks of the embedding table: one row per mask. Alpha 0 says
    that nothing is scaled.
    """
    import torch
    from safetensors.torch import save_file

    sizes, adapter = saved["sizes"], saved["adapter"]
    rows = torch.zeros(len(sizes["mask_ids"]), sizes["n_vocab"])
    rows[torch.arange(len(rows)), torch.tensor(sizes["mask_ids"])] = 1
    embedding = f"{PREFIX}{sizes['embedding']}.lora_embedding_"
    tensors = {f"{embedding}A": rows, f"{embedding}B": adapter["embedding"].T.contiguous()}
    for key, weight in adapter.items():
        side, _, name = key.partition(".")
        if side in ("a", "b"):
            tensors[f"{PREFIX}{name.replace('/', '.')}.lora_{side.upper()}.weight"] = weight
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"lora_alpha": 0, "r": sizes["rank"]}))


def convert(lora: Path, config_folder: Path, out: Path, llama_cpp: Path | None) -> None:
    """llama.cpp's converter knows how each architecture's tensors are named, ordered and shaped."""
    log = lora / "converter.log"
    command = [sys.executable, find_converter(llama_cpp).with_name(CONVERTER), "--outtype", "f16"]
    command += ["--base", config_folder.resolve(), "--outfile", out, lora]
    with log.open("wb") as stream:
        done = subprocess.run(list(map(str, command)), stdout=stream, stderr=subprocess.STDOUT, check=False)
    if done.returncode or not out.is_file():
        raise UserError(f"{CONVERTER} could not convert the adapter; its last words:\n{tail(log)}")


def check_fits(adapter: GgufHeader, model: GgufHeader) -> None:
    """Raise UserError unless the model has every tensor that the adapter changes, in the same shape."""
    if adapter.architecture != model.architecture:
        raise UserError(
            f"the adapter was trained for a model of architecture {adapter.architecture!r}, and {model.path} "
            f"is {model.architecture!r}; give the GGUF of the model that it was trained for"
        )
    shapes = {tensor.name: tensor.shape for tensor in adapter.tensors}
    of_model = {tensor.name: tensor.shape for tensor in model.tensors}
    for name in sorted({name.rpartition(".lora_")[0] for name in shapes}):
        a, b = shapes[f"{name}.lora_a"], shapes[f"{name}.lora_b"]
        shape = (b[1], a[1]) if name == EMBEDDING else (a[0], b[1])
        if shape != of_model.get(name):
            raise UserError(
                f"the adapter changes a tensor {name} of shape {shape}, which in {model.path} is "
                f"{of_model.get(name, 'missing')}; give the GGUF of the model that it was trained for"
            )


def write_keys(plain: Path, out: Path, saved: dict[str, Any], base: str) -> None:
    """Copy a GGUF and add the keys pyspac.mtp.*"""
    reader = gguf.GGUFReader(plain)
    kinds, arch = gguf.GGUFValueType, gguf.Keys.General.ARCHITECTURE
    writer = gguf.GGUFWriter(out, reader.fields[arch].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != arch:
            items = field.types[-1] if field.types[0] == kinds.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=items)
    ids = saved["sizes"]["mask_ids"]
    writer.add_uint32(mtp.N_MASKS, len(ids))
    writer.add_key_value(mtp.MASK_IDS, ids, kinds.ARRAY, sub_type=kinds.INT32)
    writer.add_string(mtp.BASE, base)
    if saved["has_sampler"] is not False:  # None: not known yet
        writer.add_uint32(mtp.SAMPLER_RANK, saved["sampler"]["next"].shape[1])
        writer.add_uint32(mtp.SAMPLER_TOP, mtp.N_TOP)
        for key, name in ((mtp.SAMPLER_PREVIOUS, "previous"), (mtp.SAMPLER_NEXT, "next")):
            bits = saved["sampler"][name].half().numpy().view("uint16").flatten().tolist()
            writer.add_key_value(key, bits, kinds.ARRAY, sub_type=kinds.UINT16)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def run(args: argparse.Namespace) -> None:
    """Raises UserError and ModelError; OUT is then as it was before."""
    check_packages("safetensors")
    if args.out.exists() and not args.out.is_file():
        raise UserError(f"{args.out} is no file that could be replaced: give the name of a GGUF file")
    if not args.out.parent.is_dir():
        raise UserError(f"no folder {args.out.parent}; create it first")
    model = read_header(args.model)
    base = mtp.base_id(model)
    saved = read_checkpoint(args.work_dir)
    with tempfile.TemporaryDirectory(prefix=f".{args.out.name}.", dir=args.out.parent) as scratch:
        folder = Path(scratch)
        write_lora(saved, folder)
        convert(folder, args.work_dir, folder / "plain.gguf", args.llama_cpp)
        check_fits(read_header(folder / "plain.gguf"), model)
        write_keys(folder / "plain.gguf", folder / "result.gguf", saved, base)
        adapter = mtp.read_adapter(folder / "result.gguf")
        n_bytes = (folder / "result.gguf").stat().st_size
        (folder / "result.gguf").replace(args.out)
    said = "with a sampler" if adapter.sampler else "without a sampler"
    if saved["has_sampler"] is None:
        said += " (whose worth is not known: training did not come to its last report)"
    print(f"{args.out}: {adapter.n_masks} masks, {said}, {n_bytes / 1e6:.2f} MB")


def main(argv: list[str] | None = None) -> int:
    """The exit code: 0 written, 2 something given cannot be used."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""example:
  python scripts/convert_mtp_to_gguf.py build/demo-mtp pyspac/models/demo-moe.gguf demo-mtp.gguf
exit codes: 0 done, 2 something given cannot be used (the message says what)""",
    )
    parser.add_argument("work_dir", type=Path, help="the --work-dir of train_mtp.py")
    parser.add_argument("model", type=Path, help="GGUF of the model that it was trained for")
    parser.add_argument("out", type=Path, help="GGUF to write; an existing one is replaced at the very end")
    parser.add_argument(
        "--llama-cpp", type=Path, metavar="DIR", help=f"tree with {CONVERTER} (default: build/llama.cpp)"
    )
    try:
        run(parser.parse_args(argv))
    except (UserError, ModelError) as error:
        print(f"convert_mtp_to_gguf: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # a folder that cannot be written to, a full disk
        print(f"convert_mtp_to_gguf: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
