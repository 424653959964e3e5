// Attention in tiles (AMX) on a plain model of the instructions, against a reference in double precision. Runs wherever
// AVX512-BF16 does.
#include "attention-cases.h"
#include "check.h"
#include "ggml-cpu.h"

#include <cstdio>

#if defined(__AVX512BF16__)

#    include "host/attention-amx.h"
#    include "model-tiles.h"

// [n_v, n_heads, n_tokens], n_blocks at a time, in memory that nothing was written to
static floats attention(const attention_case & c, const inputs & in, int n_blocks) {
    const spac_attention & tiles = *tile_attention<model_tiles>();
    std::vector<uint16_t>  k(in.k.size()), v(in.v.size()), mask(in.mask.size());
    ggml_fp32_to_fp16_row(in.k.data(), k.data(), (int64_t) k.size());
    ggml_fp32_to_fp16_row(in.v.data(), v.data(), (int64_t) v.size());
    ggml_fp32_to_fp16_row(in.mask.data(), mask.data(), (int64_t) mask.size());
    floats y(c.n_v * c.n_heads * c.n_tokens, -1);

    ggml_context * ctx    = ggml_init({ 16 * ggml_tensor_overhead(), nullptr, true });
    const auto     tensor = [&](ggml_type type, int64_t n, int64_t n_heads, int64_t n_lines, const void * data) {
        ggml_tensor * t = ggml_new_tensor_3d(ctx, type, n, n_heads, n_lines);
        t->data         = (void *) data;
        return ggml_permute(ctx, t, 0, 2, 1, 3);
    };
    ggml_tensor * q     = tensor(GGML_TYPE_F32, c.n_k, c.n_heads, c.n_tokens, in.q.data());
    ggml_tensor * m     = c.has_mask ? ggml_new_tensor_2d(ctx, GGML_TYPE_F16, c.n_keys, c.n_tokens) : nullptr;
    ggml_tensor * sinks = c.has_sinks ? ggml_new_tensor_1d(ctx, GGML_TYPE_F32, c.n_heads) : nullptr;
    if (m) {
        m->data = mask.data();
    }
    if (sinks) {
        sinks->data = (void *) in.sinks.data();
    }
    ggml_tensor * op = ggml_flash_attn_ext(ctx, q, tensor(GGML_TYPE_F16, c.n_k, c.n_heads_kv, c.n_keys, k.data()),
                                           tensor(GGML_TYPE_F16, c.n_v, c.n_heads_kv, c.n_keys, v.data()), m, 1 / sqrtf((float) c.n_k), 0, 0);
    ggml_flash_attn_ext_add_sinks(op, sinks);
    op->data = y.data();

    std::vector<char> memory(tiles.bytes(c.n_k, c.n_v, n_blocks) + 64, (char) 0xff); // NaN
    const int64_t     n_all = (c.n_tokens * c.n_heads / c.n_heads_kv + tiles.n_rows - 1) / tiles.n_rows;
    for (int64_t head = 0; head < c.n_heads_kv; head++) {
        for (int64_t first = 0; first < n_all; first += n_blocks) {
            tiles.compute(op, head, first * tiles.n_rows, (int) std::min<int64_t>(n_blocks, n_all - first), (char *) GGML_PAD((uintptr_t) memory.data(), 64));
            CHECK(!model_tiles::is_configured);
        }
    }
    ggml_free(ctx);
    return y;
}

int main() {
    if (!__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl")) {
        printf("skipped: no AVX512-BF16\n");
        return 0;
    }
    ggml_cpu_init();
    const attention_case cases[] = {
        { "one key head", 128, 128, 8, 1, 34, 300 },
        { "no sharing", 80, 112, 2, 2, 33, 129 },
        { "three heads of a key", 64, 64, 6, 2, 40, 257 },
        { "no mask", 48, 16, 4, 2, 50, 77, false },
        { "one key", 64, 64, 2, 1, 32, 1, false },
        { "sinks, a window", 64, 64, 8, 2, 45, 300, true, true, 20 },
        { "biases, large scores", 96, 96, 4, 2, 40, 140, true, false, INT64_MAX, 1, 0, 0, GGML_TYPE_F16, true, 8 },
    };
    for (const attention_case & c : cases) {
        const inputs in(c);
        const floats y     = attention(c, in, 1);
        const auto   x     = references(c, in);
        const double error = error_of(x, y), lost = error_of(references(c, exact_inputs(c)), x);
        printf("%-22s error %.2e, f16 %.2e\n", c.what.c_str(), error, lost);
        CHECK(error < lost / 30);
        CHECK(attention(c, in, 3) == y);
    }
    return 0;
}

#else

int main() {
    printf("skipped: no AVX512-BF16\n");
    return 0;
}

#endif
