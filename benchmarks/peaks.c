// What one core does at most, in operations per second (a multiplication and an addition are two): registers only, so that
// nothing but the instructions is measured. Built by peaks.py for the processor it runs on; 0: the processor cannot.
#include <stdint.h>
#include <time.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

// operations of n rounds of STATEMENT, whose sums live in registers s[0..11]
#define RATE(SUM, INIT, OPS, STATEMENT)                             \
    SUM s[12];                                                      \
    _Pragma("GCC unroll 12") for (int i = 0; i < 12; i++) {         \
        s[i] = INIT;                                                \
    }                                                               \
    const int    n = 2000000;                                       \
    const double t = now();                                         \
    for (int k = 0; k < n; k++) {                                   \
        _Pragma("GCC unroll 12") for (int i = 0; i < 12; i++) {     \
            STATEMENT;                                              \
            __asm__ volatile("" : "+x"(s[i]));                      \
        }                                                           \
    }                                                               \
    return n * 12.0 * (OPS) / (now() - t)

#if defined(__AVX512F__)
#    include <immintrin.h>
double peak_f32(void) {
    const __m512 x = _mm512_set1_ps(0.5f);
    RATE(__m512, x, 32, s[i] = _mm512_fmadd_ps(s[i], x, x));
}
#elif defined(__AVX2__) && defined(__FMA__)
#    include <immintrin.h>
double peak_f32(void) {
    const __m256 x = _mm256_set1_ps(0.5f);
    RATE(__m256, x, 16, s[i] = _mm256_fmadd_ps(s[i], x, x));
}
#else
double peak_f32(void) {
    return 0;
}
#endif

// bytes times bytes: one instruction with VNNI, else products of pairs added in 16 bits
#if defined(__AVX512VNNI__)
double peak_int8(void) {
    const __m512i x = _mm512_set1_epi8(1);
    RATE(__m512i, x, 128, s[i] = _mm512_dpbusd_epi32(s[i], x, x));
}
#elif defined(__AVXVNNI__)
double peak_int8(void) {
    const __m256i x = _mm256_set1_epi8(1);
    RATE(__m256i, x, 64, s[i] = _mm256_dpbusd_avx_epi32(s[i], x, x));
}
#elif defined(__AVX2__)
double peak_int8(void) {
    __m256i x = _mm256_set1_epi8(1);
    RATE(__m256i, x, 64, __asm__ volatile("" : "+x"(x)); s[i] = _mm256_add_epi16(s[i], _mm256_maddubs_epi16(x, x)));
}
#else
double peak_int8(void) {
    return 0;
}
#endif

// products of bf16 in tiles; arch_prctl: Linux wants to be asked for them
#if defined(__AMX_BF16__) && defined(__linux__)
#    include <sys/syscall.h>
#    include <unistd.h>
double peak_bf16(void) {
    if (syscall(SYS_arch_prctl, 0x1023, 18) != 0) {
        return 0;
    }
    struct {
        uint8_t  palette, rest[15];
        uint16_t row_bytes[16];
        uint8_t  rows[16];
    } config = { 1, { 0 }, { 64, 64, 64, 64, 64, 64, 64, 64 }, { 16, 16, 16, 16, 16, 16, 16, 16 } };
    _tile_loadconfig(&config);
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
    const int    n = 1000000;
    const double t = now();
    for (int k = 0; k < n; k++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    const double s = now() - t;
    _tile_release();
    return n * 4.0 * 2 * 16 * 16 * 32 / s;
}
#else
double peak_bf16(void) {
    return 0;
}
#endif
