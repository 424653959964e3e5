#include "iq-grids.h"

#define GGML_COMMON_IMPL_CPP
#define GGML_COMMON_DECL_CPP
#include "ggml-common.h" // ggml's tables: the grids are part of the file format

#include <cstddef>

// to[i] = from[i] with f applied to each byte
template <typename T, size_t N, typename F>
static void convert(const T (&from)[N], T (&to)[N], F f) {
    for (size_t i = 0; i < N; i++) {
        to[i] = 0;
        for (size_t b = 0; b < sizeof(T); b++) {
            to[i] |= (T) f((int8_t) (from[i] >> (8 * b))) << (8 * b);
        }
    }
}

static spac_iq_grids make_grids() {
    const auto plus = [](int offset) { return [offset](int8_t v) { return (uint8_t) (v + offset); }; };

    spac_iq_grids grids;
    convert(iq2xxs_grid, grids.iq2_xxs, plus(SPAC_IQ2_OFFSET));
    convert(iq2xs_grid, grids.iq2_xs, plus(SPAC_IQ2_OFFSET));
    convert(iq2s_grid, grids.iq2_s, plus(SPAC_IQ2_OFFSET));
    convert(iq3xxs_grid, grids.iq3_xxs, [](int8_t v) { return (uint8_t) (v / 2 + SPAC_IQ3_XXS_OFFSET); });
    convert(iq3s_grid, grids.iq3_s, [](int8_t v) { return (uint8_t) ((v + 15) / 2); });
    convert(iq1s_grid, grids.iq1, plus(1));
    return grids;
}

const spac_iq_grids spac_grids = make_grids();
