"""Random weights in any GGUF tensor type: (type, shape, standard deviation) in, raw rows of blocks out.

Quantised types are filled with random bits, except for the scale fields, which are set so that the values are
finite and have about the standard deviation asked for. That is much faster than quantising, and every bit
pattern occurs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize

Array = npt.NDArray[Any]

# byte offsets of the fp16 scale fields of a block: (d, minimum, minimum / d that makes the mean about zero)
_SCALE_FIELDS: dict[Type, tuple[int, int | None, float]] = {
    Type.Q4_0: (0, None, 0.0),
    Type.Q4_1: (0, 2, -7.5),
    Type.Q5_0: (0, None, 0.0),
    Type.Q5_1: (0, 2, -15.5),
    Type.Q8_0: (0, None, 0.0),
    Type.Q1_0: (0, None, 0.0),
    Type.Q2_K: (80, 82, 1.5),
    Type.Q3_K: (108, None, 0.0),
    Type.Q4_K: (0, 2, 7.5),
    Type.Q5_K: (0, 2, 15.5),
    Type.Q6_K: (208, None, 0.0),
    Type.TQ1_0: (52, None, 0.0),
    Type.TQ2_0: (64, None, 0.0),
    Type.IQ1_S: (0, None, 0.0),
    Type.IQ2_XXS: (0, None, 0.0),
    Type.IQ2_XS: (0, None, 0.0),
    Type.IQ2_S: (0, None, 0.0),
    Type.IQ3_XXS: (0, None, 0.0),
    Type.IQ3_S: (0, None, 0.0),
    Type.IQ4_NL: (0, None, 0.0),
    Type.IQ4_XS: (0, None, 0.0),
}
_MXFP4_EXPONENT = 0  # byte offset of MXFP4's power-of-two scale
_NVFP4_N_SCALES = 4  # first bytes of a block: 4 bits of exponent, 3 of mantissa
_IQ1_M_SCALES = 48  # 4 words, whose highest 4 bits are an fp16
_FLOAT_TYPES = (Type.F32, Type.F16, Type.BF16)

SUPPORTED = (*_FLOAT_TYPES, *_SCALE_FIELDS, Type.MXFP4, Type.NVFP4, Type.IQ1_M)


def row_bytes(qtype: Type, n_per_row: int) -> int:
    """Bytes of one row of `n_per_row` values; ValueError if the type's blocks do not fit the row."""
    block, size = GGML_QUANT_SIZES[qtype]
    if n_per_row % block:
        raise ValueError(
            f"rows of {n_per_row} values do not divide into {qtype.name} blocks of {block} values"
        )
    return int(n_per_row // block * size)


def random_blocks(rng: np.random.Generator, qtype: Type, shape: tuple[int, ...], std: float) -> Array:
    """Values of `shape` (slowest dimension first, rows last) with about the given standard deviation.

    Returns float32/float16 of `shape` for F32/F16, else uint8 of [*shape[:-1], row_bytes].
    """
    if qtype not in SUPPORTED:
        raise ValueError(
            f"no random blocks for type {qtype.name}; known: {', '.join(t.name for t in SUPPORTED)}"
        )
    n_bytes = row_bytes(qtype, shape[-1])
    if qtype in _FLOAT_TYPES:
        return _random_floats(rng, qtype, shape, std)
    n_blocks = int(np.prod(shape[:-1], dtype=np.int64)) * n_bytes // GGML_QUANT_SIZES[qtype][1]
    scale = std / _unit_std(qtype)
    return _random_bits(rng, qtype, n_blocks, scale).reshape(*shape[:-1], n_bytes)


def _random_floats(rng: np.random.Generator, qtype: Type, shape: tuple[int, ...], std: float) -> Array:
    values = rng.standard_normal(shape, dtype=np.float32)
    values *= np.float32(std)
    if qtype == Type.F32:
        return values
    if qtype == Type.F16:
        return values.astype(np.float16)
    return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16).view(np.uint8)  # BF16: the upper half


def _random_bits(rng: np.random.Generator, qtype: Type, n_blocks: int, scale: float) -> Array:
    """[n_blocks, block_bytes] uint8; random bits with the blocks' scales within 25 % of `scale`."""
    size = GGML_QUANT_SIZES[qtype][1]
    words = rng.bit_generator.random_raw(-(-n_blocks * size // 8))  # uint64
    blocks: Array = words.view(np.uint8)[: n_blocks * size].reshape(n_blocks, size)
    if qtype == Type.MXFP4:
        blocks[:, _MXFP4_EXPONENT] = 127 + round(float(np.log2(scale)))
        return blocks
    if qtype == Type.NVFP4:
        exponent = int(np.clip(8 + round(float(np.log2(scale))), 1, 14))  # of half the numbers' scale
        blocks[:, :_NVFP4_N_SCALES] = blocks[:, :_NVFP4_N_SCALES] % 8 + 8 * exponent
        return blocks
    scales = rng.random((n_blocks, 1), dtype=np.float32) * np.float32(0.5 * scale) + np.float32(0.75 * scale)
    if qtype == Type.IQ1_M:
        _set_iq1_m_scales(blocks, scales.astype(np.float16).view(np.uint16))
        return blocks
    at_d, at_min, min_ratio = _SCALE_FIELDS[qtype]
    blocks[:, at_d : at_d + 2] = scales.astype(np.float16).view(np.uint8)
    if at_min is not None:
        blocks[:, at_min : at_min + 2] = (scales * np.float32(min_ratio)).astype(np.float16).view(np.uint8)
    return blocks


def _set_iq1_m_scales(blocks: Array, scales: Array) -> None:
    """scales: [n_blocks, 1], the bits of fp16, 4 of which go to each word, the lowest to the first."""
    words = blocks[:, _IQ1_M_SCALES:].copy().view("<u2")  # [n_blocks, 4]
    words = (words & 0x0FFF) | (scales >> np.array([0, 4, 8, 12], np.uint16) << 12)
    blocks[:, _IQ1_M_SCALES:] = words.astype("<u2").view(np.uint8)


@cache
def _unit_std(qtype: Type) -> float:
    """Root mean square of random blocks of scale 1, measured on 256 blocks."""
    if qtype == Type.Q1_0:
        return 1.0  # each value is d or -d; the gguf package cannot dequantise it
    blocks = _random_bits(np.random.default_rng(0), qtype, 256, 1.0)
    return float(np.sqrt(np.mean(np.square(dequantize(blocks, qtype)))))
