"""CUDA C++ to C++: kernel launches, built-in variables, dynamic shared memory and inline PTX.

In: a .cu or .cuh file's text. Out: the text that a C++ compiler takes behind emulator.h. What is not one of
these four is left as it is, but for headers of libraries that are not emulated; PTX that emulator.h has no
function for becomes a trap.
"""

from __future__ import annotations

import re
from collections.abc import Callable

VARIABLES = {
    "threadIdx": "emu_self->index",
    "blockIdx": "emu_block_index",
    "blockDim": "emu_block_dim",
    "gridDim": "emu_grid_dim",
}
STRINGS = re.compile(r'\s*(?:"(?:[^"\\]|\\.)*"\s*)+', re.DOTALL)
SPACE = " \t\n\\"  # with what continues a macro's line

Operands = list[str]
# PTX instruction -> the function that does the same with its outputs and inputs
PTX: tuple[tuple[str, Callable[[Operands], str]], ...] = (
    (r"ldmatrix\S*\.trans\.", lambda ops: f"emu_ldmatrix({', '.join(ops)}, true)"),
    (r"ldmatrix\.", lambda ops: f"emu_ldmatrix({', '.join(ops)})"),
    (r"mma\.\S*\.m16n8k(16|32)\.row\.col\.s32\.s8\.", lambda ops: f"emu_mma<emu_s8>({', '.join(ops)})"),
    (r"mma\.\S*\.m16n8k(8|16)\.row\.col\.f32\.f16\.", lambda ops: f"emu_mma<emu_f16>({', '.join(ops)})"),
    (r"mma\.\S*\.m16n8k16\.row\.col\.f32\.bf16\.", lambda ops: f"emu_mma<emu_bf16>({', '.join(ops)})"),
    (r"mma\.\S*\.m16n8k8\.row\.col\.f32\.tf32\.", lambda ops: f"emu_mma<emu_tf32>({', '.join(ops)})"),
    (r"prefetch\.", lambda ops: "(void) 0"),
)


def translate(text: str) -> str:
    text = translate_assembly(text)
    text = translate_launches(text)
    text = re.sub(r"extern __shared__ (\w+) (\w+)\[\];", r"\1 * \2 = (\1 *) emu_dynamic_shared;", text)
    text = re.sub(r"#\s*include <(cooperative_groups|cub)\b.*>", "", text)
    text = text.replace("define GGML_CUDA_USE_CUB", "")
    for name, value in VARIABLES.items():
        text = re.sub(rf"(?<![\w.]){name}\b", value, text)
    return text


def closing(text: str, at: int) -> int:
    """The index of the parenthesis that closes the one at `at`."""
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    raise ValueError(f"no parenthesis closes: {text[at : at + 60]!r}")


# ---- inline assembly -----------------------------------------------------------------------------


def translate_assembly(text: str) -> str:
    """asm("instruction" : outputs : inputs) -> a call, with the outputs first."""
    out, done = [], 0
    for match in re.finditer(r"\basm(?:\s+volatile)?\s*(\()", text):
        code = STRINGS.match(text, match.end())
        if code is None:  # a word in a comment
            continue
        end = closing(text, match.start(1))
        out += [text[done : match.start()], call_of(code.group(), text[code.end() : end])]
        done = end + 1
    return "".join(out) + text[done:]


def call_of(code: str, rest: str) -> str:
    instruction = next((call for pattern, call in PTX if re.search(pattern, code)), None)
    return instruction(operands(rest)) if instruction else "__trap()"


def operands(text: str) -> Operands:
    """The expressions of `"constraint"(expression), ...`."""
    starts = [match.end() - 1 for match in re.finditer(r'"[^"]*"\s*\(', text)]
    return [text[at + 1 : closing(text, at)] for at in starts]


# ---- launches ------------------------------------------------------------------------------------


def translate_launches(text: str) -> str:
    """kernel<<<configuration>>>(arguments) -> a launch of a lambda: templates are deduced as before."""
    while (at := text.find("<<<")) >= 0:
        start = start_of_kernel(text, at)
        kernel = text[start:at].rstrip(SPACE)
        end_of_configuration = text.index(">>>", at)
        opening = text.index("(", end_of_configuration)
        end = closing(text, opening)
        configuration = text[at + 3 : end_of_configuration]
        arguments = text[opening + 1 : end]
        name = re.sub(r'[\s\\"]+', " ", kernel)
        function = f"[=](auto... emu_args) {{ {kernel}(emu_args...); }}"
        call = f'emu_launch({configuration}).run("{name}", {function}, {arguments})'
        text = text[:start] + call + text[end + 1 :]
    return text


def start_of_kernel(text: str, at: int) -> int:
    """Where `name<template arguments>` before `at` begins."""
    while text[at - 1] in SPACE:
        at -= 1
    if text[at - 1] == ">":
        depth = 0
        while True:
            at -= 1
            depth += (text[at] == ">") - (text[at] == "<")
            if depth == 0:
                break
    while re.match(r"[\w:]", text[at - 1]):
        at -= 1
    return at
