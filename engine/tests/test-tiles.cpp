// Panels of bf16 tiles (AMX) on a plain model of the instructions, against a reference in double precision and beside
// ggml's dot products: each format, numbers of rows, columns and tokens that fill no tile. Runs wherever AVX512-BF16 does.
#include "check.h"
#include "ggml-cpu.h"
#include "host/kernels.h"

#if defined(__AVX512BF16__)

#    include "host/formats-512.h"
#    include "host/panel-amx.h"
#    include "model-tiles.h"
#    include "random-blocks.h"

#    include <algorithm>
#    include <cmath>
#    include <random>

#    include <sys/mman.h>

typedef std::vector<float> floats;

struct aligned_bytes {
    std::vector<char> bytes;
    char *            data;

    explicit aligned_bytes(size_t n) :
        bytes(n + 64), data((char *) GGML_PAD((uintptr_t) bytes.data(), 64)) {}
};

static floats random_floats(int64_t n, std::mt19937 & rng) {
    std::normal_distribution<float> normal(0, 1);
    floats                          x(n);
    for (float & v : x) {
        v = normal(rng);
    }
    return x;
}

// what ggml's kernels give for row . x
static float ggml_dot(ggml_type type, const char * row, int64_t n_cols, const float * x) {
    const ggml_type_traits_cpu * traits = ggml_get_type_traits_cpu(type);
    std::vector<char>            act(ggml_row_size(traits->vec_dot_type, n_cols));
    ggml_get_type_traits_cpu(traits->vec_dot_type)->from_float(x, act.data(), n_cols);
    float sum;
    traits->vec_dot((int) n_cols, &sum, 0, row, 0, act.data(), 0, 1);
    return sum;
}

// ---- unpacking, to the bit

// a page behind it that nobody may touch, as behind the last weights of a mapped file
struct guarded_bytes {
    static constexpr size_t PAGE = 4096;

    const size_t n_mapped;
    char * const mapped;
    char * const data;

    explicit guarded_bytes(size_t n) :
        n_mapped(GGML_PAD(n, PAGE) + PAGE), mapped((char *) mmap(nullptr, n_mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)), data(mapped + n_mapped - PAGE - n) {
        CHECK(mapped != MAP_FAILED && mprotect(mapped + n_mapped - PAGE, PAGE, PROT_NONE) == 0);
    }

    ~guarded_bytes() { munmap(mapped, n_mapped); }
};

// to the nearest, of equally near ones the even one, as the processor does; without subnormal numbers
static uint16_t to_bf16_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return (uint16_t) (std::fpclassify(x) == FP_SUBNORMAL || x == 0 ? 0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// of sizes far apart from row to row
static std::vector<char> rows_of(ggml_type type, int64_t n_rows, int64_t n_cols, std::mt19937 & rng) {
    static const float SIZES[] = { 1, 1e-7f, 1e4f, 0, 1e-4f };
    std::vector<char>  rows;
    for (int64_t r = 0; r < n_rows; r++) {
        const float       size = SIZES[r % 5];
        std::vector<char> row(ggml_row_size(type, n_cols));
        if (has_random_blocks(type)) {
            row = random_blocks(type, n_cols, size, rng);
        } else {
            floats values = random_floats(n_cols, rng);
            std::transform(values.begin(), values.end(), values.begin(), [&](float x) { return x * size; });
            ggml_quantize_chunk(type, values.data(), row.data(), 0, 1, n_cols, nullptr);
        }
        rows.insert(rows.end(), row.begin(), row.end());
    }
    return rows;
}

static void test_unpacked(ggml_type type, unpack_pieces unpack, int64_t n_rows, int64_t n_cols) {
    std::mt19937            rng(n_rows + n_cols);
    const spac_panel &      panel     = *find_tile_panel<model_tiles>(type);
    const size_t            row_bytes = ggml_row_size(type, n_cols);
    const std::vector<char> content   = rows_of(type, n_rows, n_cols, rng);
    guarded_bytes           rows(content.size()), memory(panel.bytes(n_cols));
    memcpy(rows.data, content.data(), content.size());
    memset(memory.data, 0xa5, panel.bytes(n_cols));
    spac_panel_rows w = { rows.data, row_bytes, n_rows, n_cols, memory.data };
    unpack(w, 1 + n_rows / 2); // in the middle of the first columns
    CHECK(w.row == 1 + n_rows / 2 || n_rows <= 2);
    unpack(w, INT64_MAX);
    CHECK(w.is_unpacked());

    const int64_t n_tiles = n_tiles_of(n_cols);
    const auto *  tiles   = (const weight_tile *) memory.data;
    floats        values(n_cols);
    for (int64_t r = 0; r < SPAC_PANEL_ROWS; r++) {
        if (r < n_rows) {
            ggml_get_type_traits(type)->to_float(rows.data + r * row_bytes, values.data(), n_cols);
        }
        for (int64_t i = 0; i < n_tiles * TILE_COLS; i++) {
            const uint16_t found  = tiles[r / TILE_SIDE * n_tiles + i / TILE_COLS].w[r % TILE_SIDE][i % TILE_COLS];
            const uint16_t value  = i < n_cols ? to_bf16_bits(values[i]) : 0;
            const uint16_t wanted = r < n_rows ? value : 0xa5a5;
            CHECK(found == wanted || (wanted == 0 && (found & 0x7fff) == 0));
        }
    }
}

// every number of rows, and blocks that fill no 256 columns
static void test_all_unpacked(ggml_type type, unpack_pieces unpack) {
    if (!find_tile_panel<model_tiles>(type)) { // F16
        return;
    }
    for (const int64_t n_cols : { 32, 64, 96, 160, 256, 288, 768, 2080 }) {
        for (int64_t n_rows = 1; n_rows <= SPAC_PANEL_ROWS && n_cols % ggml_blck_size(type) == 0; n_rows++) {
            test_unpacked(type, unpack, n_rows, n_cols);
        }
    }
}

// ---- products

struct errors {
    double ours = 0, ggmls = 0, size = 0;
};

static void test_shape(const spac_panel & panel, ggml_type type, int64_t n_rows, int64_t n_cols, int n_acts, errors & total) {
    std::mt19937      rng(7);
    const size_t      row_bytes = ggml_row_size(type, n_cols), act_bytes = spac_act_bytes(panel.form, n_cols);
    const floats      values = random_floats(n_rows * n_cols, rng), x = random_floats(n_acts * n_cols, rng);
    std::vector<char> rows(n_rows * row_bytes);
    ggml_quantize_chunk(type, values.data(), rows.data(), 0, n_rows, n_cols, nullptr);
    floats w(n_rows * n_cols);
    ggml_get_type_traits(type)->to_float(rows.data(), w.data(), n_rows * n_cols);

    aligned_bytes memory(panel.bytes(n_cols)), acts(GGML_PAD(n_acts, SPAC_ACT_GROUP) * act_bytes);
    memset(memory.data, 0xff, panel.bytes(n_cols));
    std::vector<const char *>  act(n_acts);
    std::vector<const float *> inputs(n_acts);
    floats                     y(n_acts * n_rows + 1, -1);
    std::vector<float *>       out(n_acts);
    for (int t = 0; t < n_acts; t++) {
        inputs[t] = &x[t * n_cols];
        act[t]    = spac_act_at(panel.form, acts.data, act_bytes, t);
        out[t]    = &y[t * n_rows];
    }
    for (int t = 0; t < n_acts; t += SPAC_ACT_GROUP) {
        interleave_bf16(&inputs[t], std::min(n_acts - t, SPAC_ACT_GROUP), n_cols, acts.data + t * act_bytes);
    }
    spac_panel_rows rows_at = { rows.data(), row_bytes, n_rows, n_cols, memory.data };
    panel.multiply(rows_at, act.data(), n_acts, out.data());
    CHECK(y.back() == -1 && !model_tiles::is_configured && rows_at.is_unpacked());

    for (int t = 0; t < n_acts; t++) {
        for (int64_t r = 0; r < n_rows; r++) {
            double sum = 0;
            for (int64_t i = 0; i < n_cols; i++) {
                sum += (double) w[r * n_cols + i] * x[t * n_cols + i];
            }
            const double ggml = ggml_dot(type, &rows[r * row_bytes], n_cols, &x[t * n_cols]);
            total.ours += (out[t][r] - sum) * (out[t][r] - sum);
            total.ggmls += (ggml - sum) * (ggml - sum);
            total.size += sum * sum;
        }
    }
}

static void test_format(ggml_type type) {
    const spac_panel * panel = find_tile_panel<model_tiles>(type);
    CHECK(panel && panel->form == SPAC_ACT_BF16);
    const int64_t block = ggml_blck_size(type), odd = block == 256 ? 768 : block == 32 ? 288
                                                                                       : 123;
    errors        total;
    for (const int64_t n_cols : { (int64_t) 512, odd }) {
        for (const int64_t n_rows : { 1, 9, 16, 17, 32 }) {
            for (const int n_acts : { 1, 15, 16, 17, 32 }) {
                test_shape(*panel, type, n_rows, n_cols, n_acts, total);
            }
        }
    }
    for (const int n_acts : { 33, 48, 63, SPAC_PANEL_TOKENS }) { // sums are put beside other tokens' products
        test_shape(*panel, type, 23, 512, n_acts, total);
    }
    const double ours = sqrt(total.ours / total.size), ggmls = sqrt(total.ggmls / total.size);
    printf("%-7s error %.3e, ggml %.3e\n", ggml_type_name(type), ours, ggmls);
    CHECK(ours <= ggmls * 1.01 + 1e-6);
}

int main() {
    if (!__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl")) {
        printf("skipped: no AVX512-BF16\n");
        return 0;
    }
    ggml_cpu_init();
    for (const ggml_type type : { GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1, GGML_TYPE_IQ4_NL, GGML_TYPE_MXFP4,
                                  GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K, GGML_TYPE_IQ4_XS, GGML_TYPE_BF16 }) {
        test_format(type);
    }
#    define SPAC_UNPACKED(type, kernel, format) test_all_unpacked(type, unpack_##kernel<format>);
    SPAC_FOR_EACH_FORMAT(SPAC_UNPACKED)
#    undef SPAC_UNPACKED
    CHECK(!find_tile_panel<model_tiles>(GGML_TYPE_F16)); // its error would be larger than ggml's
    CHECK(!find_tile_panel<model_tiles>(GGML_TYPE_F32));
    return 0;
}

#else

int main() {
    printf("skipped: no AVX512-BF16\n");
    return 0;
}

#endif
