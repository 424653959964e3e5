"""Which models fit, and how fast: sizes against what was published, times by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from pyspac.model.checks import check_model_file
from pyspac.model.disk_probe import DiskSpeed
from pyspac.model.geometry import read_geometry
from pyspac.model.known_models import RECIPES, Weights, all_weights, known_models
from pyspac.model.memory_tier import MARGIN_BYTES
from pyspac.model.speed_forecast import (
    BUFFERS_BYTES,
    CARD_GB_S,
    CARD_MARGIN_BYTES,
    Forecast,
    KernelSpeed,
    Machine,
    forecast,
)
from pyspac.units import GIB

N_CTX = 4096
DISK = DiskSpeed(path="x", piece_bytes=1 << 20, is_direct=True, depth_1_gb_s=1.0, depth_32_gb_s=1.0)
HEAD = BUFFERS_BYTES + MARGIN_BYTES  # of memory, beside the model


def machine(ram_bytes: int, vram_bytes: int = 0) -> Machine:
    kernels = {
        "Q4_K": KernelSpeed((10.0, 4.0, 0.8, 0.8 * 40 / 136)),
        "Q8_0": KernelSpeed((20.0, 8.0, 1.6, 1.6 * 40 / 136)),
    }
    return Machine(
        ram_bytes=ram_bytes,
        vram_bytes=vram_bytes,
        memory_gb_s=40.0,
        kernels=kernels,
        disk=DISK,
        reached=1.0,
        layer_us=0.0,
        prompt_layer_mop=0.0,
    )


def weights(n_expert: int = 10) -> Weights:
    """10 layers, each with experts of 10 MB of which a token uses 2; 100 MB for every token."""
    return Weights(
        name="a", quantisation="Q4_K", n_layer=10, n_layer_moe=10, n_expert=n_expert, n_expert_used=2,
        dense=Counter({"Q8_0": 100_000_000}), output=Counter(), expert=Counter({"Q4_K": 10_000_000}),
        table_bytes=50_000_000, kv={N_CTX: 50_000_000}, query_width=0,
        kv_row_bytes=0,
    )  # fmt: skip


def tps(found: Forecast) -> tuple[float, float]:
    assert found.decode_tps is not None
    assert found.prompt_tps is not None
    return found.decode_tps, found.prompt_tps


@pytest.mark.parametrize("name", [name for name, model in known_models().items() if model.total_b])
def test_weights_in_all_are_those_published(name: str) -> None:
    """So no matrix is missing, or counted twice."""
    model = known_models()[name]
    n_expert = model.n_layer_moe * model.n_expert * 3 * model.n_embd * model.n_ff_exp
    n_shared = model.n_layer_moe * 3 * model.n_embd * model.n_ff_shared
    n_dense = model.n_layer_dense * 3 * model.n_embd * model.n_ff_dense
    n_table = model.n_vocab * model.n_embd * (1 if model.has_tied_output else 2)
    total = n_expert + n_shared + n_dense + n_table + model.n_attention
    assert total == pytest.approx(model.total_b * 1e9, rel=0.01)
    assert set(model.quantisations) <= set(RECIPES)
    assert model.source


def test_size_by_hand() -> None:
    """Q8_0: 8.5 bits for each of the 30.5 billion weights; the routers are F32."""
    found = Weights.of_known(known_models()["qwen3-30b-a3b"], "Q8_0", N_CTX)
    assert found.model_bytes == pytest.approx(30.52e9 * 8.5 / 8 + 48 * 128 * 2048 * 4, rel=0.002)
    assert found.kv[N_CTX] == 48 * 2 * 4 * 128 * 2 * N_CTX


def test_rows_that_k_quants_do_not_fit() -> None:
    """1,408 values are no whole blocks of 256: the down matrices are Q5_0 and Q8_0 then."""
    found = Weights.of_known(known_models()["deepseek-v2-lite"], "Q4_K_M", N_CTX)
    assert set(found.expert) == {"Q4_K", "Q5_0", "Q8_0"}


def test_a_pass_between_two_widths() -> None:
    """1 MB takes 0.1, 0.25, 1.25 and 4.25 ms with 1, 8, 40 and 136 tokens."""
    speed = machine(0).kernels["Q4_K"]
    times = [speed.pass_us(1e6, n) for n in (1, 4.5, 8, 24, 40, 136, 232)]
    assert times == pytest.approx([100, 175, 250, 750, 1250, 4250, 7250])


def test_in_memory_by_hand() -> None:
    """100 MB at 20 GB/s: 5 ms; 10 layers x 2 x 10 MB at 10 GB/s: 20. 102.4 of 512 tokens meet an expert."""
    found = forecast(weights(), machine(8 * GIB), N_CTX)
    assert found.place == "memory"
    assert found.needed_bytes == 1_200_000_000 + HEAD
    decode, prompt = tps(found)
    assert decode == pytest.approx(1 / (0.005 + 0.020))
    experts_s = 9 * 10 * 10 * 0.0032  # per MB, between 40 and 136 tokens; of the last layer one token's
    dense_s = 100 * 0.008  # beyond 136
    assert prompt == pytest.approx(512 / (experts_s + dense_s))


def test_kernels_do_not_reach_their_speed_in_a_model() -> None:
    here = machine(8 * GIB)
    found = [tps(forecast(weights(), one, N_CTX)) for one in (here, replace(here, reached=0.8))]
    assert found[1] == pytest.approx([0.8 * each for each in found[0]])


def test_a_prompt_needs_the_output_once() -> None:
    wide = replace(weights(), output=Counter({"Q8_0": 200_000_000}))
    without, found = (tps(forecast(one, machine(8 * GIB), N_CTX)) for one in (weights(), wide))
    assert 1 / found[0] - 1 / without[0] == pytest.approx(0.010)  # each token when decoding
    assert 512 / found[1] - 512 / without[1] == pytest.approx(0.010)


def test_on_disk_by_hand() -> None:
    """Half of 1 GB of experts in memory, 80 % of those in use found: 4 MB of 20 a layer at 1 GB/s,
    which are computed at 10 GB/s once they are there; reading costs two threads 60 us. A prompt waits for its
    first expert."""
    here = machine(HEAD + 200_000_000 + 500_000_000)
    here = replace(here, disk=replace(DISK, cpu_s_per_gb=0.03), n_threads=2)
    found = forecast(weights(), here, N_CTX, found=0.8)
    assert found.place == "disk"
    assert found.share_in_memory == pytest.approx(0.5)
    decode, prompt = tps(found)
    assert decode == pytest.approx(1 / (0.005 + 10 * (0.004 + 0.0004 + 0.00006)))
    assert prompt == pytest.approx(512 / (2.88 + 0.8 + 0.015 + 0.010))  # reading takes 1 s meanwhile


def test_a_short_prompt_waits_for_the_disk() -> None:
    """10 tokens choose 8.9 of 10 experts; where memory has room for one layer all else waits, 15.6 ms."""
    read_s = 10 * 10 * (1 - 0.8**10) * 0.010
    for experts_bytes, others_s in ((500_000_000, 0.0), (150_000_000, 0.0), (100_000_000, 100 * 0.00015625)):
        here = machine(HEAD + 200_000_000 + experts_bytes)
        _, short = tps(forecast(weights(), here, N_CTX, found=0.8, n_text=10))
        assert short == pytest.approx(10 / (read_s + others_s))


def test_a_prompts_last_tokens_on_their_own() -> None:
    """4 tokens use 5.904 of 10 experts, 1.355 tokens each; what they all use takes 8.2 ms."""
    found = tps(forecast(replace(weights(), has_tail=True), machine(8 * GIB), N_CTX, n_text=516))[1]
    experts_s = 10 * 5.904 * 10 * (0.0001 + 0.00015 * 0.355014 / 7)
    assert found == pytest.approx(516 / (2.88 + 0.8 + experts_s + 0.1 * (0.05 + 0.075 * 3 / 7)))


def test_a_prompt_as_short_as_its_tail() -> None:
    for n_text in (1, 4, 5):
        tailed, plain = (
            tps(forecast(replace(weights(), has_tail=has), machine(8 * GIB), N_CTX, n_text=n_text))[1]
            for has in (True, False)
        )
        assert tailed is not None
        assert plain is not None
        assert 0 < tailed <= plain * 1.5


def test_kernels_that_want_many_tokens() -> None:
    """Of 2,000 tokens 200 for an expert at once, in pieces of 1,000, instead of 100."""
    kernels = machine(0).kernels | {"Q4_K": KernelSpeed((10.0, 4.0, 1.0, 0.5))}
    for per_expert, pass_s, n_pieces in ((0, 0.001 + 0.001 * 60 / 96, 4), (200, 0.002 + 0.001 * 64 / 96, 2)):
        here = replace(machine(8 * GIB), kernels=kernels, per_expert=per_expert)
        found = tps(forecast(weights(), here, N_CTX, n_text=2000))[1]
        assert found == pytest.approx(2000 / (n_pieces * 9 * 10 * 10 * pass_s + 4 * 0.78125))


def test_more_memory_is_never_slower() -> None:
    speeds = [forecast(weights(), machine(HEAD + n * 100_000_000), N_CTX) for n in range(1, 15)]
    decoded = [one.decode_tps for one in speeds if one.decode_tps is not None]
    assert decoded == sorted(decoded)
    assert speeds[0].place == "nowhere"
    assert speeds[0].least_bytes == HEAD + 200_000_000 + 100_000_000
    assert speeds[-1].place == "memory"


def test_a_card_by_hand() -> None:
    """It holds all but the experts: 100 MB at its speed, and says that nothing was measured."""
    vram = CARD_MARGIN_BYTES + BUFFERS_BYTES + 200_000_000
    found = forecast(weights(), machine(8 * GIB, vram), N_CTX)
    assert found.place == "card and memory"
    assert found.share_on_card == pytest.approx(0.0)
    assert tps(found)[0] == pytest.approx(1 / (0.1 / CARD_GB_S + 0.020))
    assert found.to_dict()["basis"] == "predicted, never measured on a GPU"
    all_there = forecast(weights(), machine(2 * GIB, vram + 1_000_000_000), N_CTX)
    assert all_there.place == "card"
    small = forecast(weights(), machine(8 * GIB, vram - 1_000_000), N_CTX)
    assert small.place == "memory"
    assert small.to_dict()["basis"] == "predicted"


def test_a_file_and_its_geometry() -> None:
    path = Path(__file__).parents[2] / "pyspac/models/demo-moe.gguf"
    header = check_model_file(path)
    geometry = read_geometry(header)
    found = Weights.of_file(header, geometry, {N_CTX: 0})
    assert found.model_bytes == pytest.approx(geometry.model_bytes, rel=0.001)
    assert found.experts_bytes == pytest.approx(geometry.experts_bytes, rel=0.001)
    assert found.n_expert == geometry.n_expert


def test_embeddings_count_where_they_are_the_output() -> None:
    """Of the demo's file, with and without a matrix for the output."""
    header = check_model_file(Path(__file__).parents[2] / "pyspac/models/demo-moe.gguf")
    others = [t for t in header.tensors if t.name not in ("token_embd.weight", "output.weight")]
    embd = next(t for t in header.tensors if t.name == "token_embd.weight")
    geometry = read_geometry(header)
    tied = Weights.of_file(replace(header, tensors=(*others, embd)), geometry, {})
    assert (tied.output, tied.table_bytes) == (Counter({embd.type_name: embd.n_bytes}), 0)
    output = replace(embd, name="output.weight")
    untied = Weights.of_file(replace(header, tensors=(*others, embd, output)), geometry, {})
    assert (untied.output, untied.table_bytes) == (tied.output, embd.n_bytes)
    assert untied.dense == tied.dense


def test_all_models_have_an_answer() -> None:
    for one in all_weights(N_CTX):
        for ram in (8, 64, 1024):
            found = forecast(one, machine(ram * GIB, 8 * GIB), N_CTX)
            assert (found.decode_tps is None) == (found.place == "nowhere")
    assert found.place == "card and memory"


def test_attention_looks_at_the_text_so_far() -> None:
    """2 ms: ten billion operations a second, and 4 for each element of a query and token of the text."""
    wide, here = (
        replace(weights(), query_width=10_000),
        replace(machine(8 << 30), attention_gop_s=(10.0, 80.0)),
    )
    without = tps(forecast(weights(), here, N_CTX))
    found = tps(forecast(wide, here, N_CTX, n_text=500))
    decode_ms, prompt_ms = (1e3 / new - 1e3 / old for new, old in zip(found, without, strict=True))
    assert decode_ms == pytest.approx(2.0)
    assert prompt_ms == pytest.approx(2.0 / 2 / 8)
    longer = forecast(wide, here, N_CTX, n_text=1 << 30)
    assert longer == forecast(wide, here, N_CTX, n_text=N_CTX)  # a text is no longer than the context


def test_keys_and_values_come_at_a_quarter_of_the_speed_of_memory() -> None:
    """1 MB of 100 tokens at 10 of 40 GB/s: 0.1 ms; prompts find theirs in a cache."""
    wide = replace(weights(), kv_row_bytes=10_000)
    without, found = (tps(forecast(one, machine(8 * GIB), N_CTX, n_text=100)) for one in (weights(), wide))
    assert 1e3 / found[0] - 1e3 / without[0] == pytest.approx(0.1)
    assert found[1] == without[1]


def test_keys_and_values_of_a_token() -> None:
    known = Weights.of_known(known_models()["olmoe-1b-7b"], "Q8_0", N_CTX)
    assert known.kv_row_bytes == 16 * 16 * 128 * 2 * 2
    assert known.kv[N_CTX] == N_CTX * known.kv_row_bytes


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("qwen3-30b-a3b", 48 * 32 * 128), ("deepseek-v2-lite", 27 * 16 * (1088 // 2))],
)
def test_queries_of_known_models(name: str, wanted: int) -> None:
    assert known_models()[name].query_width == wanted


def test_a_kernel_measured_with_one_token_says_only_that() -> None:
    assert KernelSpeed((10.0,)).pass_us(1e6, 1) == 100.0
    assert KernelSpeed((10.0, 4.0, 1.0, 0.25)).pass_us(1e6, 1) == 100.0
