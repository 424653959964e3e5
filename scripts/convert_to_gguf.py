#!/usr/bin/env python3
"""Convert a Hugging Face folder to GGUF, in any quantisation, and check that the result works.

    folder -> llama.cpp's own converter -> 16-bit GGUF -> llama-quantize -> load, tokenise, generate -> OUT

The result appears under its name only after the check, so OUT is either complete or as it was before.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for tools/
from pyspac.train.packages import missing_packages

ROOT = Path(__file__).resolve().parent.parent
CONVERTER = "convert_hf_to_gguf.py"
QUANTIZER = "llama-quantize"
LIBRARIES = ("libllama.so", "libllama.dylib", "llama.dll")

# What the converter writes by itself; every other type is made by llama-quantize from "auto" (16 bits).
CONVERTER_TYPES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}

# llama.cpp's name of a pre-tokenizer, by the regular expression that defines it. The converter knows
# published tokenizers by a hash of their output, and that hash depends on the vocabulary too; so a new
# vocabulary over a known regular expression needs this second way to be told apart.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = {WORDS % r"\p{N}": "qwen2", WORDS % r"\p{N}{1,3}": "llama-bpe"}

CHECK_PROMPT = 'def main(path: str) -> int:\n    """Read the file\'s 12 lines."""\n    with open(path):\n'
N_CHECK_TOKENS = 16


class UserError(Exception):
    """What the user gave cannot be used; the text says what failed, with which values, and what to do."""


# ---------------------------------------------------------------------------------------------------------
# What to work with


def find_converter(llama_cpp: Path | None) -> Path:
    """The converter in `llama_cpp`, else in the patched tree of this repository's build."""
    folder = llama_cpp or ROOT / "build" / "llama.cpp"
    if not (folder / CONVERTER).is_file():
        raise UserError(
            f"no {CONVERTER} in {folder}; build pyspac first, or name a llama.cpp tree: --llama-cpp DIR"
        )
    return folder.resolve() / CONVERTER


def has_library(folder: Path) -> bool:
    return any((folder / name).is_file() for name in LIBRARIES)


def find_bin_dir(bin_dir: Path | None) -> Path:
    """Folder of libllama and the tools: `bin_dir`, else $PYSPAC_BIN_DIR, else the newest build's bin."""
    named = bin_dir or (Path(os.environ["PYSPAC_BIN_DIR"]) if "PYSPAC_BIN_DIR" in os.environ else None)
    tools = ROOT.glob(f"build/*/bin/{QUANTIZER}*")  # a sanitizer's build has libraries but no tools
    built = sorted({path.parent for path in tools}, key=lambda p: p.stat().st_mtime, reverse=True)
    for folder in [named] if named else built:
        if has_library(folder):
            return folder.resolve()
    raise UserError(
        f"no libllama in {named or ROOT / 'build' / '*' / 'bin'}; build pyspac first, or name the "
        "folder of a build's libraries and tools: --bin-dir DIR"
    )


def find_quantizer(bin_dir: Path) -> Path:
    for name in (QUANTIZER, QUANTIZER + ".exe"):
        if (bin_dir / name).is_file():
            return bin_dir / name
    raise UserError(f"no {QUANTIZER} in {bin_dir}; build that target, or name another build: --bin-dir DIR")


def read_json(path: Path) -> Any:
    if not path.is_file():
        raise UserError(
            f"no {path.name} in {path.parent}; give a folder made by Hugging Face's save_pretrained"
        )
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON ({error}); fetch or save the model again") from None


def check_input(folder: Path) -> None:
    """The three things a model folder has: sizes, weights, vocabulary."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give the folder with the model's config.json")
    if not read_json(folder / "config.json").get("architectures"):
        raise UserError(f'{folder / "config.json"} names no architecture; add "architectures": [...]')
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise UserError(f"no *.safetensors in {folder}; the weights are missing")


def check_packages(*others: str) -> None:
    """Raise UserError unless what llama.cpp's converter imports is there, and `others`."""
    if missing := missing_packages(("torch", "transformers", *others)):
        raise UserError(missing)


def find_pre_tokenizer(folder: Path) -> str | None:
    """llama.cpp's name for the folder's pre-tokenizer, None when our table lacks its regular expression."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    pre = read_json(path).get("pre_tokenizer") or {}
    steps = pre.get("pretokenizers", [pre])
    patterns = [step["pattern"].get("Regex") for step in steps if step.get("type") == "Split"]
    return PRE_TOKENIZERS.get(patterns[0]) if len(patterns) == 1 else None


# ---------------------------------------------------------------------------------------------------------
# The converter, unchanged, in a process of its own


def with_fallback(ask: Callable[..., str], pre: str | None) -> Callable[..., str]:
    """`ask`, the converter's question for the pre-tokenizer's name, answered with `pre` if it knows none."""

    def get_vocab_base_pre(model: object, tokenizer: object) -> str:
        with contextlib.suppress(NotImplementedError):
            return ask(model, tokenizer)
        if pre is None:
            raise NotImplementedError("unknown pre-tokenizer; name llama.cpp's equivalent with --pre NAME")
        return pre

    return get_vocab_base_pre


def run_converter(converter: Path, argv: list[str], pre: str | None, log: Path) -> None:
    """Child process: run the converter as a program, its output going to `log`."""
    with log.open("wb") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    sys.path[:0] = [str(converter.parent), str(converter.parent / "gguf-py")]
    from conversion.base import TextModel

    TextModel.get_vocab_base_pre = with_fallback(TextModel.get_vocab_base_pre, pre)
    sys.argv = [str(converter), *argv]
    runpy.run_path(str(converter), run_name="__main__")


def convert(folder: Path, out: Path, out_type: str, converter: Path, pre: str | None) -> None:
    log = out.with_suffix(".log")
    argv = [str(folder), "--outfile", str(out), "--outtype", out_type]
    run_child(run_converter, converter, argv, pre, log)
    if not out.is_file():
        raise UserError(f"{CONVERTER} could not convert {folder}; its last words:\n{tail(log)}")


def run_child(target: Callable[..., None], *args: object) -> int:
    """Run `target` in a fresh interpreter; returns its exit code."""
    process = multiprocessing.get_context("spawn").Process(target=target, args=args)
    process.start()
    try:
        process.join()
    except KeyboardInterrupt:
        process.terminate()
        process.join()
        raise
    return process.exitcode or 0


def tail(log: Path, n_line: int = 8) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    return "\n".join("    " + line for line in lines[-n_line:])


def quantize(source: Path, out: Path, quant: str, quantizer: Path, options: list[str]) -> None:
    log = out.with_suffix(".log")
    with log.open("wb") as stream:
        command = [str(quantizer), *options, str(source), str(out), quant]
        done = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, check=False)
    if done.returncode or not out.is_file():
        advice = f"`{quantizer} --help` lists the types. Its last words:"
        raise UserError(f"{QUANTIZER} could not make {quant}; {advice}\n{tail(log)}")


# ---------------------------------------------------------------------------------------------------------
# The check


def run_check(gguf: Path, folder: Path, bin_dir: Path, report: Path) -> None:
    """Child process: load, tokenise and generate with libllama; writes what it saw to `report` as JSON."""
    os.environ["LLAMA_CPP_LIB_PATH"] = str(bin_dir)
    with Path(os.devnull).open("wb") as null:
        os.dup2(null.fileno(), 2)
    import llama_cpp.llama_cpp as llama

    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(str(gguf).encode(), llama.llama_model_default_params())
    if not model:
        report.write_text(json.dumps({"error": "llama.cpp cannot load it"}))
        return
    ids = tokenize(llama, model, CHECK_PROMPT)
    expected = reference_tokens(folder, CHECK_PROMPT)
    if expected is not None and ids != expected:
        how = f"{ids[:12]}... and not {expected[:12]}..."
        seen = {"error": f"llama.cpp splits text differently: {how}; try --pre NAME"}
    else:
        seen = {"text": generate(llama, model, ids)}
    report.write_text(json.dumps(seen))


def tokenize(llama: Any, model: Any, text: str) -> list[int]:
    vocab, raw = llama.llama_model_get_vocab(model), text.encode()
    ids = (llama.llama_token * (len(raw) + 8))()
    n_token = llama.llama_tokenize(vocab, raw, len(raw), ids, len(ids), False, False)
    return list(ids[:n_token])


def reference_tokens(folder: Path, text: str) -> list[int] | None:
    """The same text through the folder's own tokenizer, None where it has no tokenizer.json."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    from tokenizers import Tokenizer

    return list(Tokenizer.from_file(str(path)).encode(text, add_special_tokens=False).ids)


def generate(llama: Any, model: Any, ids: list[int]) -> str:
    """Greedy continuation of N_CHECK_TOKENS tokens."""
    params = llama.llama_context_default_params()
    params.n_ctx = params.n_batch = 256
    ctx = llama.llama_init_from_model(model, params)
    vocab, sampler = llama.llama_model_get_vocab(model), llama.llama_sampler_init_greedy()
    raw = b""
    for _ in range(N_CHECK_TOKENS):
        tokens = (llama.llama_token * len(ids))(*ids)
        if llama.llama_decode(ctx, llama.llama_batch_get_one(tokens, len(ids))):
            raise RuntimeError("llama_decode failed")
        ids = [llama.llama_sampler_sample(sampler, ctx, -1)]
        raw += piece(llama, vocab, ids[0])
    return raw.decode(errors="replace")


def piece(llama: Any, vocab: Any, token: int) -> bytes:
    buffer = ctypes.create_string_buffer(256)
    n_byte = llama.llama_token_to_piece(vocab, token, buffer, len(buffer), 0, True)
    return buffer.raw[: max(0, n_byte)]


def check(gguf: Path, folder: Path, bin_dir: Path) -> str:
    """The text the model generates; UserError when it does not."""
    if importlib.util.find_spec("llama_cpp") is None:
        raise UserError("the check needs llama_cpp; install pyspac, or leave the check out: --no-check")
    report = gguf.with_suffix(".json")
    code = run_child(run_check, gguf, folder, bin_dir, report)
    seen = {"error": f"the check ended with code {code}"}
    if report.is_file():
        seen = json.loads(report.read_text())
    if "error" in seen:
        raise UserError(f"the converted model failed its check: {seen['error']}")
    return seen["text"]


# ---------------------------------------------------------------------------------------------------------
# All together


def make_gguf(args: argparse.Namespace, part: Path) -> str:
    """Everything up to the finished file `part`, in the same folder; returns the generated text."""
    converter, pre = find_converter(args.llama_cpp), args.pre or find_pre_tokenizer(args.folder)
    direct = CONVERTER_TYPES.get(args.quant)
    bin_dir = None if direct and args.no_check else find_bin_dir(args.bin_dir)
    quantizer = None if direct or bin_dir is None else find_quantizer(bin_dir)
    with tqdm(total=3, bar_format="{desc:<12} {bar:24} {n_fmt}/{total_fmt} {elapsed}", leave=False) as bar:
        bar.set_description("converting")
        base = part if direct else part.with_name("base.gguf")
        convert(args.folder, base, direct or "auto", converter, pre)
        bar.update()
        if quantizer:
            bar.set_description("quantising")
            quantize(base, part, args.quant, quantizer, args.quantize_options)
            base.unlink()
        bar.update()
        bar.set_description("checking")
        return "" if args.no_check or bin_dir is None else check(part, args.folder, bin_dir)


def run(args: argparse.Namespace) -> None:
    check_input(args.folder)
    check_packages()
    if not args.out.parent.is_dir():
        raise UserError(f"no folder {args.out.parent}; create it first")
    with tempfile.TemporaryDirectory(prefix=f".{args.out.name}.", dir=args.out.parent) as scratch:
        part = Path(scratch) / "result.gguf"
        text = make_gguf(args, part)
        size_mb = part.stat().st_size / 1e6
        part.replace(args.out)
    print(f"{args.out}: {args.quant}, {size_mb:.1f} MB" + (f"; it goes on: {text!r}" if text else ""))


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""examples:
  python scripts/convert_to_gguf.py Qwen3-30B-A3B qwen3-30b-a3b-q4_k_m.gguf --quant Q4_K_M
  python scripts/convert_to_gguf.py my-model my-model.gguf --quant F16
  python scripts/convert_to_gguf.py my-model my-model.gguf --quant Q5_K_M --tensor-type ffn_down_exps=q8_0
exit codes: 0 done, 2 something given cannot be used (the message says what)""",
    )
    parser.add_argument("folder", type=Path, help="model folder: config.json, *.safetensors, tokenizer files")
    parser.add_argument("out", type=Path, help="GGUF to write; an existing one is replaced at the very end")
    parser.add_argument(
        "--quant",
        default="Q4_K_M",
        type=str.upper,
        metavar="TYPE",
        help="F32, F16, BF16, or any type of llama-quantize (default: %(default)s)",
    )
    parser.add_argument(
        "--tensor-type",
        action="append",
        default=[],
        metavar="NAME=TYPE",
        help="another type for tensors whose name contains NAME; may be given more than once",
    )
    parser.add_argument("--token-embedding-type", metavar="TYPE", help="another type for the token embedding")
    parser.add_argument(
        "--pre",
        metavar="NAME",
        help="llama.cpp's name of the pre-tokenizer, for a tokenizer that is not known "
        f"(found by itself: {', '.join(PRE_TOKENIZERS.values())})",
    )
    parser.add_argument(
        "--llama-cpp",
        type=Path,
        metavar="DIR",
        help=f"llama.cpp tree with {CONVERTER} (default: build/llama.cpp)",
    )
    parser.add_argument(
        "--bin-dir",
        type=Path,
        metavar="DIR",
        help="libllama and llama-quantize (default: $PYSPAC_BIN_DIR, else newest build/*/bin)",
    )
    parser.add_argument("--no-check", action="store_true", help="do not load and run the result")
    args = parser.parse_args(argv)
    args.quantize_options = [x for value in args.tensor_type for x in ("--tensor-type", value)]
    if args.token_embedding_type:
        args.quantize_options += ["--token-embedding-type", args.token_embedding_type]
    return args


def main(argv: list[str] | None = None) -> int:
    try:
        run(parse_args(argv))
    except UserError as error:
        print(f"convert_to_gguf: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
