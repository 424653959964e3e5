"""What CUDA C++ becomes before it is compiled for the CPU."""

from __future__ import annotations

import pytest

from tools.cuda_emulator.translate import translate

LAUNCHES = {
    "k<<<g, b>>>(x, y);": 'emu_launch(g, b).run("k", [=](auto... emu_args) { k(emu_args...); }, x, y);',
    "if (a < b) f<T, g<int>>\n  <<<1, dim3(2, 3)>>>(h(x));": (
        'if (a < b) emu_launch(1, dim3(2, 3)).run("f<T, g<int>>", '
        "[=](auto... emu_args) { f<T, g<int>>(emu_args...); }, h(x));"
    ),
}
ASSEMBLY = {
    'asm volatile("prefetch.global.L2 [%0];" :: "l"(p));': "(void) 0;",
    'asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0}, {%1}, {%2}, {%0};"\n'
    ' : "+r"(D.x[0]) : "r"(A.x[(i)]), "r"(B));': "emu_mma<emu_s8>(D.x[0], A.x[(i)], B);",
    'asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.b16 {%0}, [%1];" : "=r"(a) : "l"(f<true>(b, c)));': (
        "emu_ldmatrix(a, f<true>(b, c), true);"
    ),
    'asm("unheard.of %0;" : "=r"(a));': "__trap();",
    "// what asm (assembly) does": "// what asm (assembly) does",
}


@pytest.mark.parametrize(("cuda", "expected"), [*LAUNCHES.items(), *ASSEMBLY.items()])
def test_launches_and_assembly_become_calls(cuda: str, expected: str) -> None:
    assert translate(cuda) == expected


def test_members_keep_their_names() -> None:
    assert translate("cfg.gridDim = gridDim;") == "cfg.gridDim = emu_grid_dim;"
    assert translate("threadIdx.x + my_threadIdx") == "emu_self->index.x + my_threadIdx"


def test_dynamic_shared_memory_becomes_a_pointer() -> None:
    text = translate("extern __shared__ char data[];\n__shared__ int tile[32];")
    assert text == "char * data = (char *) emu_dynamic_shared;\n__shared__ int tile[32];"


def test_a_launch_that_does_not_end_is_said() -> None:
    with pytest.raises(ValueError, match="no parenthesis closes"):
        translate("k<<<1, 1>>>(x;")
