// CUDA C++ on the CPU, for tests: what ggml's kernels need of the language. One fiber per CUDA thread.
// Included before every source that translate.py made. EMULATED_ARCH: compute capability times 100, such as 900.
#pragma once

#include <cublas_v2.h>
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp4.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <type_traits>

// --- qualifiers ---

#undef __constant__
#undef __device__
#undef __forceinline__
#undef __global__
#undef __host__
#undef __launch_bounds__
#undef __shared__
#define __constant__ static
#define __device__
#define __forceinline__ inline
#define __global__
#define __host__
#define __launch_bounds__(...)
#define __shared__ static // blocks run one after another
#define __builtin_assume(x)
#define __CUDA_ARCH__      EMULATED_ARCH
#define __CUDA_ARCH_LIST__ EMULATED_ARCH

// --- threads: kernels.cpp ---

struct emu_thread {
    uint3 index; // threadIdx
    int   lane, warp;
};

extern emu_thread * emu_self;
extern uint3        emu_block_index;
extern dim3         emu_block_dim, emu_grid_dim;
extern char *       emu_dynamic_shared;

static constexpr int EMU_WARP = 32, EMU_SLOT = 32; // lanes, bytes that each may give

// each live lane of the warp gives `size` bytes at `mine`; all get the table [EMU_WARP][EMU_SLOT]
const char * emu_exchange(const void * mine, size_t size);
uint32_t     emu_live_lanes(); // of the warp
void         emu_sync_warp();
void         emu_sync_block();
bool         emu_any_of_block(bool value);
void         emu_run_grid(dim3 grid, dim3 block, size_t n_shared, const char * name, const std::function<void()> & thread);

// --- launches ---

void emu_enqueue(cudaStream_t stream, std::function<void()> job);
void emu_called(const char * name, bool blocks);

struct emu_launch {
    dim3         grid, block;
    size_t       n_shared;
    cudaStream_t stream;

    emu_launch(dim3 grid, dim3 block, size_t n_shared = 0, cudaStream_t stream = nullptr) :
        grid(grid), block(block), n_shared(n_shared), stream(stream) {}

    template <class Kernel, class... Args>
    void run(const char * name, Kernel kernel, Args... args) const {
        emu_called("kernel", false);
        emu_enqueue(stream, [=, launch = *this] {
            emu_run_grid(launch.grid, launch.block, launch.n_shared, name, [&] { kernel(args...); });
        });
    }
};

template <class... Params, class... Args>
cudaError_t emu_launch_ex(const cudaLaunchConfig_t * c, void (*kernel)(Params...), Args &&... args) {
    emu_launch(c->gridDim, c->blockDim, c->dynamicSmemBytes, c->stream).run("?", kernel, Params(args)...);
    return cudaSuccess;
}

template <class Kernel>
cudaError_t emu_function_attributes(cudaFuncAttributes * attributes, Kernel) {
    *attributes                    = {};
    attributes->ptxVersion         = EMULATED_ARCH / 10;
    attributes->binaryVersion      = EMULATED_ARCH / 10;
    attributes->maxThreadsPerBlock = 1024;
    return cudaSuccess;
}

template <class Kernel>
cudaError_t emu_occupancy(int * n_blocks, Kernel, int, size_t) {
    *n_blocks = 1;
    return cudaSuccess;
}

#define cudaLaunchKernelEx                            emu_launch_ex
#define cudaFuncGetAttributes                         emu_function_attributes
#define cudaFuncSetAttribute(...)                     cudaSuccess
#define cudaOccupancyMaxActiveBlocksPerMultiprocessor emu_occupancy
#define cudaLaunchCooperativeKernel(...)              cudaErrorNotSupported
#define cudaGridDependencySynchronize()
#define cudaTriggerProgrammaticLaunchCompletion()

// cooperative launches are refused, so kernels for them are compiled only
namespace cooperative_groups {

struct grid_group {
    void sync() const { abort(); }
};

inline grid_group this_grid() {
    return {};
}

} // namespace cooperative_groups

// --- warps and blocks: CUDA C++ Programming Guide, "Warp Shuffle Functions" and "Warp Vote Functions" ---

template <class T>
T emu_of_lane(const char * table, int lane) {
    T value;
    memcpy(&value, table + lane * EMU_SLOT, sizeof(T));
    return value;
}

// the value of `lane` if it is in this lane's group of `width`, else the own one
template <class T>
T emu_shuffle(T value, int lane, int width) {
    const int  own   = emu_self->lane;
    const auto table = emu_exchange(&value, sizeof(T));
    return emu_of_lane<T>(table, lane >= 0 && lane / width == own / width ? lane : own);
}

template <class T>
T __shfl_sync(unsigned, T value, int lane, int width = EMU_WARP) {
    return emu_shuffle(value, emu_self->lane / width * width + lane % width, width);
}

template <class T>
T __shfl_xor_sync(unsigned, T value, int mask, int width = EMU_WARP) {
    return emu_shuffle(value, emu_self->lane ^ mask, width);
}

template <class T>
T __shfl_up_sync(unsigned, T value, unsigned n, int width = EMU_WARP) {
    return emu_shuffle(value, emu_self->lane - (int) n, width);
}

template <class T, class Op>
T emu_reduce(T value, T start, Op op) {
    const uint32_t live  = emu_live_lanes();
    const auto     table = emu_exchange(&value, sizeof(T));
    for (int lane = 0; lane < EMU_WARP; lane++) {
        start = live >> lane & 1 ? op(start, emu_of_lane<T>(table, lane)) : start;
    }
    return start;
}

template <class T>
T __reduce_add_sync(unsigned, T value) {
    return emu_reduce(value, T(0), [](T a, T b) { return a + b; });
}

inline unsigned __ballot_sync(unsigned, int value) {
    return __reduce_add_sync(~0u, value ? 1u << emu_self->lane : 0u);
}

inline int __any_sync(unsigned mask, int value) {
    return __ballot_sync(mask, value) != 0;
}

inline int __all_sync(unsigned mask, int value) {
    return __ballot_sync(mask, !value) == 0;
}

inline void __syncwarp(unsigned = ~0u) {
    emu_sync_warp();
}

inline void __syncthreads() {
    emu_sync_block();
}

inline int __syncthreads_or(int value) {
    return emu_any_of_block(value);
}

inline void __threadfence_system() {}

inline void __nanosleep(unsigned) {}

[[noreturn]] inline void __trap() {
    fprintf(stderr, "cuda-emulator: code that is not there for this architecture\n");
    abort();
}

// kernels run one at a time, and so do their threads
template <class T, class U>
T atomicAdd(T * at, U value) {
    const T old = *at;
    *at         = old + (T) value;
    return old;
}

template <class T>
T __ldg(const T * at) {
    return *at;
}

// --- integers: CUDA Math API, "SIMD Intrinsics" ---

template <class Op>
unsigned emu_each_byte(unsigned a, unsigned b, Op op) {
    unsigned r = 0;
    for (int i = 0; i < 32; i += 8) {
        r |= (unsigned) (uint8_t) op(a >> i & 255, b >> i & 255) << i;
    }
    return r;
}

inline unsigned __vsub4(unsigned a, unsigned b) {
    return emu_each_byte(a, b, [](int x, int y) { return x - y; });
}

inline unsigned __vcmpeq4(unsigned a, unsigned b) {
    return emu_each_byte(a, b, [](int x, int y) { return x == y ? 255 : 0; });
}

inline unsigned __vcmpne4(unsigned a, unsigned b) {
    return ~__vcmpeq4(a, b);
}

inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 32; i += 8) {
        c += (int8_t) (a >> i) * (int8_t) (b >> i);
    }
    return c;
}

inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const uint64_t bytes = (uint64_t) y << 32 | x;
    unsigned       r     = 0;
    for (int i = 0; i < 4; i++) {
        const unsigned s = selector >> 4 * i & 7; // unlike prmt, it has no fourth bit for the sign
        r |= (bytes >> 8 * s & 255u) << 8 * i;
    }
    return r;
}

inline int __popc(unsigned x) {
    return __builtin_popcount(x);
}

inline unsigned __umulhi(unsigned a, unsigned b) {
    return (uint64_t) a * b >> 32;
}

// --- floats ---

template <class To, class From>
To emu_bits(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To r;
    memcpy(&r, &value, sizeof(To));
    return r;
}

inline unsigned __float_as_uint(float x) {
    return emu_bits<unsigned>(x);
}

inline float __uint_as_float(unsigned x) {
    return emu_bits<float>(x);
}

inline int __float2int_rn(float x) {
    return (int) nearbyintf(x);
}

inline float __expf(float x) {
    return expf(x);
}

inline float __frcp_rn(float x) {
    return 1 / x;
}

inline float rsqrtf(float x) {
    return 1 / sqrtf(x);
}

inline float max(float a, float b) {
    return fmaxf(a, b);
}

inline float min(float a, float b) {
    return fminf(a, b);
}

template <class A, class B>
auto max(A a, B b) {
    using T = std::common_type_t<A, B>;
    return std::max<T>(a, b);
}

template <class A, class B>
auto min(A a, B b) {
    using T = std::common_type_t<A, B>;
    return std::min<T>(a, b);
}

using std::isinf;

// --- tensor cores: PTX ISA, "Matrix Fragments for mma.m16n8k..." and "ldmatrix" ---
// In 32-bit words a fragment is the same for all types: group = lane / 4, member = lane % 4; A: rows group and group + 8,
// words member and member + 4; B: column group, the same words; C: rows as A, columns 2*member and 2*member + 1.

struct emu_fragments {
    uint32_t a[4], b[2];
};

inline float emu_half_of(uint32_t word, int i) {
    return __half2float(emu_bits<__half>((uint16_t) (word >> 16 * i)));
}

inline float emu_bfloat_of(uint32_t word, int i) {
    return __uint_as_float(word >> 16 * i << 16);
}

struct emu_s8 {
    using sum_type = int;

    static int dot(uint32_t a, uint32_t b) { return __dp4a((int) a, (int) b, 0); }
};

struct emu_f16 {
    using sum_type = float;

    static float dot(uint32_t a, uint32_t b) {
        return emu_half_of(a, 0) * emu_half_of(b, 0) + emu_half_of(a, 1) * emu_half_of(b, 1);
    }
};

struct emu_bf16 {
    using sum_type = float;

    static float dot(uint32_t a, uint32_t b) {
        return emu_bfloat_of(a, 0) * emu_bfloat_of(b, 0) + emu_bfloat_of(a, 1) * emu_bfloat_of(b, 1);
    }
};

struct emu_tf32 {
    using sum_type = float;

    static float part(uint32_t word) { return __uint_as_float(word & ~0x1fffu); }

    static float dot(uint32_t a, uint32_t b) { return part(a) * part(b); }
};

template <class Type>
void emu_multiply(typename Type::sum_type c[4], const emu_fragments & mine, int n_words) {
    const auto table    = emu_exchange(&mine, sizeof(mine));
    const auto of_lane  = [&](int lane) { return (const emu_fragments *) (table + lane * EMU_SLOT); };
    const int  first_a  = emu_self->lane / 4 * 4; // lane that has the first word of this row
    const int  column_0 = emu_self->lane % 4 * 2;
    for (int i = 0; i < 4; i++) {
        const int first_b = (column_0 + i % 2) * 4;
        for (int word = 0; word < n_words; word++) {
            const uint32_t a = of_lane(first_a + word % 4)->a[word / 4 * 2 + i / 2];
            c[i] += Type::dot(a, of_lane(first_b + word % 4)->b[word / 4]);
        }
    }
}

// mma.m16n8k32 of bytes, m16n8k16 of half words, m16n8k8 of words
template <class Type, class D, class S>
void emu_mma(D & d0, D & d1, D & d2, D & d3, S a0, S a1, S a2, S a3, S b0, S b1) {
    using T = typename Type::sum_type;
    T c[]   = { emu_bits<T>(d0), emu_bits<T>(d1), emu_bits<T>(d2), emu_bits<T>(d3) };
    emu_multiply<Type>(c, {
                              { (uint32_t) a0, (uint32_t) a1, (uint32_t) a2, (uint32_t) a3 },
                              { (uint32_t) b0, (uint32_t) b1 }
    },
                       8);
    d0 = emu_bits<D>(c[0]), d1 = emu_bits<D>(c[1]), d2 = emu_bits<D>(c[2]), d3 = emu_bits<D>(c[3]);
}

// of half as many
template <class Type, class D, class S>
void emu_mma(D & d0, D & d1, D & d2, D & d3, S a0, S a1, S b0) {
    using T = typename Type::sum_type;
    T c[]   = { emu_bits<T>(d0), emu_bits<T>(d1), emu_bits<T>(d2), emu_bits<T>(d3) };
    emu_multiply<Type>(c, {
                              { (uint32_t) a0, (uint32_t) a1 },
                              { (uint32_t) b0 }
    },
                       4);
    d0 = emu_bits<D>(c[0]), d1 = emu_bits<D>(c[1]), d2 = emu_bits<D>(c[2]), d3 = emu_bits<D>(c[3]);
}

// one 8 x 8 matrix of 16-bit elements: lane 8 * matrix + row gives the address of the row
inline int emu_matrix_word(const char * table, int matrix, bool transposed) {
    const int  lane = emu_self->lane;
    const auto row  = [&](int i) { return emu_of_lane<const uint16_t *>(table, 8 * matrix + i); };
    if (transposed) {
        return row(lane % 4 * 2)[lane / 4] | row(lane % 4 * 2 + 1)[lane / 4] << 16;
    }
    return row(lane / 4)[lane % 4 * 2] | row(lane / 4)[lane % 4 * 2 + 1] << 16;
}

inline void emu_ldmatrix(int & r0, int & r1, const void * row) {
    const auto table = emu_exchange(&row, sizeof(row));
    r0 = emu_matrix_word(table, 0, false), r1 = emu_matrix_word(table, 1, false);
}

inline void emu_ldmatrix(int & r0, int & r1, int & r2, int & r3, const void * row, bool transposed = false) {
    const auto table = emu_exchange(&row, sizeof(row));
    r0 = emu_matrix_word(table, 0, transposed), r1 = emu_matrix_word(table, 1, transposed);
    r2 = emu_matrix_word(table, 2, transposed), r3 = emu_matrix_word(table, 3, transposed);
}
