// A plain model of AMX's tiles, in place of the processor's.
#pragma once

#include "check.h"

#include <cmath>
#include <cstdint>
#include <cstring>

// Intel's "Intrinsics Guide": tdpbf16ps adds the products of even and of odd columns apart, and then both to the sum. A tile
// that was not configured, or does not fit, is an error there; so is here.
struct model_tiles {
    static inline uint32_t words[8][16][16];
    static inline bool     is_configured = false;

    static void configure() {
        memset(words, 0xff, sizeof(words)); // NaN: what is not loaded is not used
        is_configured = true;
    }

    template <int T>
    static void zero() {
        CHECK(is_configured);
        memset(words[T], 0, sizeof(words[T]));
    }

    template <int T>
    static void load(const void * from) {
        CHECK(is_configured);
        memcpy(words[T], from, sizeof(words[T]));
    }

    static float bf16(uint32_t word, int odd) {
        const uint32_t bits = odd ? word & 0xffff0000 : word << 16;
        float          x;
        memcpy(&x, &bits, sizeof(x));
        return x;
    }

    template <int C, int A, int B>
    static void dot() {
        CHECK(is_configured);
        for (int m = 0; m < 16; m++) {
            for (int n = 0; n < 16; n++) {
                float sums[2] = {}, sum;
                for (int k = 0; k < 16; k++) {
                    for (int odd = 0; odd < 2; odd++) {
                        sums[odd] = fmaf(bf16(words[A][m][k], odd), bf16(words[B][k][n], odd), sums[odd]);
                    }
                }
                memcpy(&sum, &words[C][m][n], sizeof(sum));
                sum += sums[0] + sums[1];
                memcpy(&words[C][m][n], &sum, sizeof(sum));
            }
        }
    }

    template <int T>
    static void store(void * to) {
        CHECK(is_configured);
        memcpy(to, words[T], sizeof(words[T]));
    }

    static void release() {
        CHECK(is_configured);
        is_configured = false;
    }
};
