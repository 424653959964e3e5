#!/usr/bin/env python3
"""Write a MoE model of random weights in a real model's geometry, to measure speed without downloading one.

Only speed, memory and routing locality mean anything; the text is meaningless. Locality follows published
traces of Qwen3-30B-A3B, where neighbouring tokens share 38 % of their experts and 9 tokens in a row use 4.2
times the experts of one. Here it comes from the token embeddings (see token_embeddings), because the layers'
outputs are kept small beside them: tokens with neighbouring ids are alike, and the greedy continuation of
token t is token t + 1. Measured on "small" by reading ffn_moe_topk in all layers over 448 tokens: in order of
ids 38 % and 4.1 times, in random order (as llama-bench draws them) 22 % and 4.9 times.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType, GGUFWriter, TokenType
from gguf.quants import quantize
from random_blocks import SUPPORTED, random_blocks, row_bytes
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from pyspac.model.known_models import KnownModel, known_models

# shares of the variance of a token's embedding: common to all tokens, common to neighbouring ids, its own
COMMON_SHARE, NEAR_SHARE = 0.42, 0.32
NEAR_DECAY = 0.75  # correlation of the neighbouring part from one token id to the next
RESIDUAL_STD = (
    0.05  # of what a layer adds, beside embeddings of 1: routing follows the embeddings in every layer
)
N_RESERVED = 259  # 3 control and 256 byte tokens; the rest are words


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Sizes of a model; `qtype` is the experts' type unless --type says otherwise."""

    arch: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    n_head_dim: int
    n_ff_exp: int
    n_expert: int
    n_expert_used: int
    qtype: Type = Type.Q4_K


WRITABLE = ("qwen3moe", "olmoe", "llama", "gpt-oss")  # architectures whose tensors are known here


def geometries() -> dict[str, Geometry]:
    """Of the known models that can be written, by name; `small` is made up."""
    return {name: _geometry(model) for name, model in known_models().items() if model.arch in WRITABLE}


def _geometry(model: KnownModel) -> Geometry:
    return Geometry(
        arch=model.arch, n_layer=model.n_layer, n_embd=model.n_embd, n_head=model.heads["n"],
        n_head_kv=model.heads["n_kv"], n_head_dim=model.heads["dim"], n_ff_exp=model.n_ff_exp,
        n_expert=model.n_expert, n_expert_used=model.n_expert_used,
        qtype=Type.MXFP4 if model.quantisations == ["MXFP4"] else Type.Q4_K,
    )  # fmt: skip


GEOMETRIES = geometries()


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor to be written: `shape` has the slowest dimension first, `fill` makes its data."""

    name: str
    shape: tuple[int, ...]
    qtype: Type
    fill: Callable[[np.random.Generator], np.ndarray]

    @property
    def n_bytes(self) -> int:
        return int(np.prod(self.shape[:-1], dtype=np.int64)) * row_bytes(self.qtype, self.shape[-1])


# ---- weights -------------------------------------------------------------------------------------


def token_embeddings(rng: np.random.Generator, n_vocab: int, n_embd: int) -> np.ndarray:
    """[n_vocab, n_embd] float32 of variance 1; rows with ids close to each other are alike.

    Correlation at distance d: COMMON_SHARE + NEAR_SHARE * NEAR_DECAY ** d. So tokens in a row choose similar
    experts.
    """
    common = rng.standard_normal(n_embd, dtype=np.float32)
    near = rng.standard_normal(n_embd, dtype=np.float32)
    rows = rng.standard_normal((n_vocab, n_embd), dtype=np.float32)
    rows *= np.float32((1 - COMMON_SHARE - NEAR_SHARE) ** 0.5)
    fresh = np.float32((1 - NEAR_DECAY**2) ** 0.5)
    for row in rows:
        near = np.float32(NEAR_DECAY) * near + fresh * rng.standard_normal(n_embd, dtype=np.float32)
        row += np.float32(COMMON_SHARE**0.5) * common + np.float32(NEAR_SHARE**0.5) * near
    return rows


def output_head(embeddings: np.ndarray) -> np.ndarray:
    """[n_vocab, n_embd] float32 that continues token t with t + 1, the last one with the first word."""
    head = np.roll(embeddings, 1, axis=0) * np.float32(40 / embeddings.shape[1])  # the best logit is about 40
    first_word = min(N_RESERVED, len(head) - 1)
    head[first_word] = embeddings[-1] * np.float32(40 / embeddings.shape[1])
    head[:3] = 0
    return head


def _random(name: str, shape: tuple[int, ...], std: float, qtype: Type) -> Tensor:
    return Tensor(name, shape, qtype, lambda rng: random_blocks(rng, qtype, shape, std))


def _matrix(name: str, n_in: int, n_out: int, std: float = 1.0, qtype: Type = Type.Q8_0) -> Tensor:
    """`std` is that of an output for inputs of standard deviation 1."""
    return _random(f"{name}.weight", (n_out, n_in), std * n_in**-0.5, qtype)


def _ones(name: str, n: int) -> Tensor:
    return Tensor(f"{name}.weight", (n,), Type.F32, lambda rng: np.ones(n, np.float32))


def _bias(name: str, *shape: int) -> Tensor:
    return _random(f"{name}.bias", shape, 0.01, Type.F32)


# ---- tensors -------------------------------------------------------------------------------------


def plan_tensors(g: Geometry, n_vocab: int, seed: int) -> Iterator[Tensor]:
    """All tensors of the model, in file order; nothing is allocated before a tensor's `fill` is called."""
    shape = (n_vocab, g.n_embd)

    def embeddings() -> np.ndarray:
        return token_embeddings(np.random.default_rng(seed), n_vocab, g.n_embd)

    yield Tensor("token_embd.weight", shape, Type.Q8_0, lambda rng: quantize(embeddings(), Type.Q8_0))
    yield Tensor(
        "output.weight", shape, Type.Q8_0, lambda rng: quantize(output_head(embeddings()), Type.Q8_0)
    )
    yield _ones("output_norm", g.n_embd)
    for il in range(g.n_layer):
        yield from _attention(g, f"blk.{il}")
        yield from _experts(g, f"blk.{il}")


def _attention(g: Geometry, layer: str) -> Iterator[Tensor]:
    n_q, n_kv = g.n_head * g.n_head_dim, g.n_head_kv * g.n_head_dim
    yield _ones(f"{layer}.attn_norm", g.n_embd)
    for name, n_out in (("q", n_q), ("k", n_kv), ("v", n_kv)):
        yield _matrix(f"{layer}.attn_{name}", g.n_embd, n_out)
        if g.arch == "gpt-oss":
            yield _bias(f"{layer}.attn_{name}", n_out)
    yield _matrix(f"{layer}.attn_output", n_q, g.n_embd, RESIDUAL_STD)
    if g.arch == "gpt-oss":
        yield _bias(f"{layer}.attn_output", g.n_embd)
        yield _random(f"{layer}.attn_sinks.weight", (g.n_head,), 1.0, Type.F32)
    norm_sizes = {"qwen3moe": (g.n_head_dim, g.n_head_dim), "olmoe": (n_q, n_kv)}
    for name, n in zip(("q", "k"), norm_sizes.get(g.arch, ()), strict=False):
        yield _ones(f"{layer}.attn_{name}_norm", n)


def _experts(g: Geometry, layer: str) -> Iterator[Tensor]:
    has_bias = g.arch == "gpt-oss"
    yield _ones(f"{layer}.{'post_attention_norm' if has_bias else 'ffn_norm'}", g.n_embd)
    yield _matrix(f"{layer}.ffn_gate_inp", g.n_embd, g.n_expert, 2.0, Type.F32)
    if has_bias:
        yield _bias(f"{layer}.ffn_gate_inp", g.n_expert)
    sizes = {"gate": (g.n_embd, g.n_ff_exp), "up": (g.n_embd, g.n_ff_exp), "down": (g.n_ff_exp, g.n_embd)}
    for name, (n_in, n_out) in sizes.items():
        std = (RESIDUAL_STD if name == "down" else 1.0) * n_in**-0.5
        yield _random(f"{layer}.ffn_{name}_exps.weight", (g.n_expert, n_out, n_in), std, g.qtype)
        if has_bias:
            yield _bias(f"{layer}.ffn_{name}_exps", g.n_expert, n_out)


def metadata(g: Geometry, n_vocab: int) -> dict[str, int | float]:
    """Keys without the "{arch}." prefix."""
    values: dict[str, int | float] = {
        "context_length": 32768, "vocab_size": n_vocab, "embedding_length": g.n_embd,
        "block_count": g.n_layer,
        "feed_forward_length": g.n_ff_exp, "expert_feed_forward_length": g.n_ff_exp,
        "expert_count": g.n_expert, "expert_used_count": g.n_expert_used,
        "attention.head_count": g.n_head, "attention.head_count_kv": g.n_head_kv,
        "attention.key_length": g.n_head_dim, "attention.value_length": g.n_head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6,
    }  # fmt: skip
    if g.arch == "gpt-oss":
        values["attention.sliding_window"] = 128
    return values


# ---- file ----------------------------------------------------------------------------------------


def write_gguf(
    path: Path, name: str, g: Geometry, n_vocab: int, seed: int, progress: Callable[[int], None]
) -> None:
    """Write the model tensor by tensor under a temporary name, then rename; `progress` gets bytes written."""
    partial = path.with_name(path.name + ".part")
    writer = GGUFWriter(partial, g.arch)
    try:
        _write_header(writer, name, g, n_vocab)
        rng = np.random.default_rng(seed + 1)
        tensors = list(plan_tensors(g, n_vocab, seed))
        for tensor in tensors:
            _add_tensor_info(writer, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            writer.write_tensor_data(tensor.fill(rng))
            progress(tensor.n_bytes)
        writer.close()
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _add_tensor_info(writer: GGUFWriter, tensor: Tensor) -> None:
    if tensor.qtype == Type.F32:
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.n_bytes)
    else:
        rows = (*tensor.shape[:-1], row_bytes(tensor.qtype, tensor.shape[-1]))
        writer.add_tensor_info(tensor.name, rows, np.dtype(np.uint8), tensor.n_bytes, raw_dtype=tensor.qtype)


def _write_header(writer: GGUFWriter, name: str, g: Geometry, n_vocab: int) -> None:
    writer.add_name(name)
    for key, value in metadata(g, n_vocab).items():
        kind = GGUFValueType.UINT32 if isinstance(value, int) else GGUFValueType.FLOAT32
        writer.add_key_value(f"{g.arch}.{key}", value, kind)
    words = [f" word{i}".encode() for i in range(n_vocab - N_RESERVED)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(
        [b"<unk>", b"<s>", b"</s>", *(f"<0x{byte:02X}>".encode() for byte in range(256)), *words]
    )
    writer.add_token_scores([0.0] * n_vocab)
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    writer.add_token_types([*kinds, *[TokenType.NORMAL] * len(words)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(False)


# ---- command line --------------------------------------------------------------------------------


class UsageError(Exception):
    """A wrong value on the command line; the text says what to do."""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    lines = [
        f"  {name:14} {g.arch:9} {g.n_layer:3} layers x {g.n_expert:3} experts, top-{g.n_expert_used}, "
        f"{_size(g) / 1e9:5.1f} GB as {g.qtype.name}"
        for name, g in GEOMETRIES.items()
    ]
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="geometries:\n" + "\n".join(lines) + "\n\nexamples:\n"
        "  make_synthetic_gguf.py small.gguf                                 # 1.4 GB\n"
        "  make_synthetic_gguf.py qwen.gguf --like qwen3-30b-a3b             # the whole model, 17 GB\n"
        "  make_synthetic_gguf.py qwen.gguf --like qwen3-30b-a3b --layers 6  # the same speed per layer\n"
        "  make_synthetic_gguf.py mix.gguf --like mixtral-8x7b --layers 2 --type IQ4_XS",
    )
    parser.add_argument(
        "path", type=Path, help="file to write; an existing one is kept unless --force is given"
    )
    parser.add_argument(
        "--like", default="small", metavar="NAME", help="geometry, see below (default: small)"
    )
    parser.add_argument("--layers", type=int, help="number of layers (default: the geometry's)")
    parser.add_argument("--experts", type=int, help="experts per layer (default: the geometry's)")
    parser.add_argument(
        "--type", metavar="TYPE", help="type of the experts' weights, for example Q4_K or Q8_0"
    )
    parser.add_argument("--vocab", type=int, default=8192, help="tokens of the vocabulary (default: 8192)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same file (default: 0)")
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    return parser.parse_args(argv)


def chosen_geometry(args: argparse.Namespace) -> Geometry:
    """The geometry of --like with --layers, --experts and --type applied; UsageError if they do not fit."""
    if args.like not in GEOMETRIES:
        raise UsageError(f"--like {args.like}: unknown geometry. Known: {', '.join(GEOMETRIES)}.")
    g = GEOMETRIES[args.like]
    if args.layers is not None and args.layers < 1:
        raise UsageError(f"--layers {args.layers}: must be at least 1.")
    if args.experts is not None and not g.n_expert_used <= args.experts <= 512:
        raise UsageError(
            f"--experts {args.experts}: must be {g.n_expert_used} (the experts per token) to 512."
        )
    if args.vocab <= N_RESERVED:
        raise UsageError(f"--vocab {args.vocab}: must be more than the {N_RESERVED} control and byte tokens.")
    return dataclasses.replace(
        g,
        n_layer=args.layers or g.n_layer,
        n_expert=args.experts or g.n_expert,
        qtype=_chosen_type(args.type, g),
    )


def _chosen_type(name: str | None, g: Geometry) -> Type:
    fitting = [t.name for t in SUPPORTED if _fits(t, g)]
    if name is None:
        return g.qtype
    if name.upper() not in fitting:
        raise UsageError(
            f"--type {name}: not a type that fits rows of {g.n_embd} and {g.n_ff_exp} values. "
            f"Fitting: {', '.join(fitting)}."
        )
    return Type[name.upper()]


def _fits(qtype: Type, g: Geometry) -> bool:
    try:
        row_bytes(qtype, g.n_embd)
        row_bytes(qtype, g.n_ff_exp)
    except ValueError:
        return False
    return True


def _size(g: Geometry, n_vocab: int = 8192) -> int:
    return sum(tensor.n_bytes for tensor in plan_tensors(g, n_vocab, seed=0))


def _check_target(path: Path, n_bytes: int, force: bool) -> None:
    if path.exists() and not force:
        raise UsageError(f"{path} exists. Choose another name, or overwrite it with --force.")
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent} is not a folder. Create it first.")
    free = shutil.disk_usage(path.parent).free
    if free < n_bytes:
        raise UsageError(
            f"{path.parent} has {free / 1e9:.1f} GB free, the model needs {n_bytes / 1e9:.1f} GB. "
            "Use fewer --layers, a smaller --type or another folder."
        )


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    try:
        g = chosen_geometry(args)
        n_bytes = _size(g, args.vocab)
        _check_target(args.path, n_bytes, args.force)
    except UsageError as error:
        print(f"make_synthetic_gguf: {error}", file=sys.stderr)
        return 2
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as bar:
        task = bar.add_task(args.path.name, total=n_bytes)
        name = f"synthetic {args.like}"
        write_gguf(args.path, name, g, args.vocab, args.seed, lambda n: bar.advance(task, n))
    print(
        f"{args.path}: {g.arch}, {g.n_layer} layers x {g.n_expert} experts (top-{g.n_expert_used}), "
        f"{g.qtype.name}, {n_bytes / 1e9:.2f} GB. Random weights: for speed only."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
