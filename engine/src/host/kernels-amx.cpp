// AMX: tiles of bf16 for wide batches; all else is AVX-512's. Built with these instructions: nothing in here may be inline
// elsewhere.
#include "kernels.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)

#    include "attention-amx.h"
#    include "formats-512.h"
#    include "panel-amx.h"

namespace {

struct alignas(64) tile_config { // what ldtilecfg reads
    uint8_t  palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t  rows[16]      = {};
};

static_assert(sizeof(tile_config) == 64, "padding");

// ggml configures a thread's tiles once, for all that it will ever multiply with them (ggml-cpu/amx/mmq.cpp)
thread_local tile_config found;

struct amx_tiles {
    static SPAC_INLINE void configure() {
        static const tile_config whole = [] {
            tile_config c;
            for (int i = 0; i < 8; i++) {
                c.rows[i]      = TILE_SIDE;
                c.row_bytes[i] = 64;
            }
            return c;
        }();
        __asm__ volatile("sttilecfg %0" : "=m"(found));
        __asm__ volatile("ldtilecfg %0" ::"m"(whole));
    }

    template <int T>
    static SPAC_INLINE void zero() {
        __asm__ volatile("tilezero %%tmm%c0" ::"i"(T));
    }

    template <int T>
    static SPAC_INLINE void load(const void * from) {
        __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"((int64_t) 64), "i"(T) : "memory");
    }

    template <int C, int A, int B>
    static SPAC_INLINE void dot() {
        __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
    }

    template <int T>
    static SPAC_INLINE void store(void * to) {
        __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"((int64_t) 64), "i"(T) : "memory");
    }

    static SPAC_INLINE void release() {
        if (found.palette != 0) {
            __asm__ volatile("ldtilecfg %0" ::"m"(found));
        } else { // none were configured
            __asm__ volatile("tilerelease");
        }
    }
};

} // namespace

// measured (Q4_K): 1.9 times the speed of 32, of which unpacking takes most; 256: 2.1 times
static constexpr int N_TOKENS_FULL = 128;

const spac_kernels * spac_kernels_amx() {
    const spac_kernels * narrow = spac_kernels_avx512();
    if (!narrow) {
        return nullptr;
    }
    static const spac_kernels kernels = { "amx", narrow->quantise, narrow->dot, narrow->swish, find_tile_panel<amx_tiles>, tile_attention<amx_tiles>(), N_TOKENS_FULL, nullptr, interleave_bf16 };
    return &kernels;
}

#else

const spac_kernels * spac_kernels_amx() {
    return nullptr;
}

#endif
