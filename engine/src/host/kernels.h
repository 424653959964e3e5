// Dot products of the rows of a weight matrix with activations: what one instruction set offers.
//
// Activations are prepared once per token, those of tiles once for each expert of it. For quantised weights they become blocks of 32 int8 with an f32 scale: finer
// than ggml's Q8_K and without the fp16 rounding of its Q8_0, so that one form serves every format, at no larger error.
// Their order in memory is each instruction set's own. Rows of f16 and bf16 take f32; panels name their own form.
#pragma once

#include "ggml.h"

#include <vector>

// most tokens that one pass over the weights serves
static constexpr int SPAC_DOT_TOKENS = 8;

enum spac_act_form {
    SPAC_ACT_Q8,
    SPAC_ACT_F32,
    SPAC_ACT_I16,       // of panels of 16-bit weights
    SPAC_ACT_BF16,      // of tiles, in groups of SPAC_ACT_GROUP
    SPAC_ACT_GGML_Q8_0, // of ggml's own kernels
    SPAC_ACT_GGML_Q8_K,
    SPAC_N_ACT_FORMS,
};

// activations of tiles that lie interleaved; those of one call begin with a group
static constexpr int SPAC_ACT_GROUP = 16;

// rows of a panel, and most tokens of one call
static constexpr int SPAC_PANEL_ROWS   = 32;
static constexpr int SPAC_PANEL_TOKENS = 64;

// out[t][r] = row r . act[t], for n_rows rows of n_cols weights, row_bytes apart, and 1 to SPAC_DOT_TOKENS activations
typedef void (*spac_dot)(const char * rows, size_t row_bytes, int64_t n_rows, int64_t n_cols, const char * const * acts, int n_acts,
                         float * const * out);

// Rows of a weight matrix that become a panel: unpacked once for many tokens, in memory that stays in the second cache.
struct spac_panel_rows {
    const char * rows; // at most SPAC_PANEL_ROWS
    size_t       row_bytes;
    int64_t      n_rows, n_cols;
    char *       panel; // on an address that is a multiple of 64

    int64_t row = 0, col = 0; // the next piece to unpack, 256 columns of a row: those of all rows before the next columns

    bool is_unpacked() const { return col >= n_cols; }
};

struct spac_panel {
    spac_act_form form;         // of the activations
    int           n_tokens_min; // fewer are left to spac_dot

    size_t (*bytes)(int64_t n_cols); // of SPAC_PANEL_ROWS rows; a multiple of 64

    // out[t][r] = row r . act[t], for at most SPAC_PANEL_TOKENS activations; unpacks what is not yet
    void (*multiply)(spac_panel_rows & w, const char * const * acts, int n_acts, float * const * out);
};

// Attention of a wide batch (GGML_OP_FLASH_ATTN_EXT): the queries of all heads that share keys, in blocks.
struct spac_attention {
    int n_rows;   // of a block: a token's query of one head each, the heads of a token beside each other
    int n_blocks; // at most, of one call

    size_t (*bytes)(int64_t n_k, int64_t n_v, int n_blocks); // of memory; on addresses that are multiples of 64

    // n_blocks from row `first` on, of the heads with keys `head`
    void (*compute)(const ggml_tensor * op, int64_t head, int64_t first, int n_blocks, char * memory);
};

struct spac_kernels {
    const char * name;

    void (*quantise)(const float * x, int64_t n_cols, char * act); // to SPAC_ACT_Q8
    spac_dot (*dot)(ggml_type type);                               // NULL: not here
    void (*swish)(float * x, int64_t n, float alpha);              // x / (1 + exp(-alpha x)), in place

    const spac_panel * (*panel)(ggml_type type); // NULL: not here

    const spac_attention * attention; // NULL: not here

    int n_tokens_full = 0; // of one expert, from which a panel's products take much longer than its unpacking; 0: few

    void (*quantise_i16)(const float * x, int64_t n_cols, char * act) = nullptr; // to SPAC_ACT_I16; NULL: no panel takes it

    void (*interleave_bf16)(const float * const * x, int n, int64_t n_cols, char * acts) = nullptr; // a group of SPAC_ACT_BF16; the same
};

// NULL where they were not compiled in; the machine may lack the instructions all the same
const spac_kernels * spac_kernels_amx();
const spac_kernels * spac_kernels_avx512();
const spac_kernels * spac_kernels_avxvnni();
const spac_kernels * spac_kernels_avx2();
const spac_kernels * spac_kernels_neon();

// those that this machine can run, the best first
std::vector<const spac_kernels *> spac_kernels_here();

// the first of them, or NULL; PYSPAC_KERNELS names another one (for tests and measurements)
// throws: spac_error, where it names none of these
const spac_kernels * spac_kernels_best();

// true: weights are prefetched into L2, and from there into L1; false: into L1 at once. One token, from memory, AVX-512: the first
// is 1.1 times as fast on a Xeon (Q8_0; others the same), the second on a Zen 5 (Q8_0, Q4_K).
bool spac_prefetch_by_l2();

// What the tables above lack ggml's own dot products compute, a row at a time (ggml-dot.cpp): F32.
bool spac_has_dot(const spac_kernels & kernels, ggml_type type); // of one of the two
void spac_dot_rows(const spac_kernels & kernels, ggml_type type, const char * rows, size_t row_bytes, int64_t n_rows, int64_t n_cols,
                   const char * const * acts, int n_acts, float * const * out);

// who multiplies n_acts activations at once: a panel, or, where it is NULL, spac_dot_rows()
const spac_panel * spac_panel_for(const spac_kernels & kernels, ggml_type type, int64_t n_acts);

spac_act_form spac_act_form_of(const spac_kernels & kernels, ggml_type type);
size_t        spac_act_bytes(spac_act_form form, int64_t n_cols); // a multiple of 64

// how many lie interleaved
inline int spac_act_group(spac_act_form form) {
    return form == SPAC_ACT_BF16 ? SPAC_ACT_GROUP : 1;
}

// of the i-th of those at `acts`, act_bytes each, which begin with a group
inline const char * spac_act_at(spac_act_form form, const char * acts, size_t act_bytes, int64_t i) {
    const int64_t n = spac_act_group(form);
    return acts + i / n * n * act_bytes + i % n * sizeof(uint32_t);
}

// x[0] to x[n - 1], of n_cols floats, in the given form; at most a group
void spac_prepare_acts(const spac_kernels & kernels, spac_act_form form, const float * const * x, int n, int64_t n_cols, char * acts);
