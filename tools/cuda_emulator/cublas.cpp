// The products of cuBLAS that ggml-cuda asks for, plainly: column-major, summed in float32.
#include "emulator.h"

static float read(const void * at, size_t i, cudaDataType type) {
    switch (type) {
        case CUDA_R_32F:
            return ((const float *) at)[i];
        case CUDA_R_16F:
            return __half2float(((const __half *) at)[i]);
        case CUDA_R_16BF:
            return __bfloat162float(((const __nv_bfloat16 *) at)[i]);
        default:
            __trap();
    }
}

static void write(void * at, size_t i, cudaDataType type, float value) {
    switch (type) {
        case CUDA_R_32F:
            ((float *) at)[i] = value;
            break;
        case CUDA_R_16F:
            ((__half *) at)[i] = __float2half(value);
            break;
        case CUDA_R_16BF:
            ((__nv_bfloat16 *) at)[i] = __float2bfloat16(value);
            break;
        default:
            __trap();
    }
}

// C [m, n] = scale * op(A) * op(B)
struct product {
    cublasOperation_t op_a, op_b;
    size_t            m, n, k;
    float             scale;
    cudaDataType      type_a, type_b, type_c;
    size_t            lda, ldb, ldc;

    void compute(const void * a, const void * b, void * c) const {
        for (size_t j = 0; j < n; j++) {
            for (size_t i = 0; i < m; i++) {
                float sum = 0;
                for (size_t l = 0; l < k; l++) {
                    sum += read(a, op_a == CUBLAS_OP_N ? l * lda + i : i * lda + l, type_a) *
                           read(b, op_b == CUBLAS_OP_N ? j * ldb + l : l * ldb + j, type_b);
                }
                write(c, j * ldc + i, type_c, scale * sum);
            }
        }
    }
};

static float scalar(const void * at, cublasComputeType_t compute) {
    return read(at, 0, compute == CUBLAS_COMPUTE_16F ? CUDA_R_16F : CUDA_R_32F);
}

// ggml adds nothing to a product
static float scale_of(const void * alpha, const void * beta, cublasComputeType_t compute) {
    if (scalar(beta, compute) != 0) {
        __trap();
    }
    return scalar(alpha, compute);
}

static cublasStatus_t enqueue(cublasHandle_t handle, std::function<void()> job) {
    emu_called("cublas", false);
    emu_enqueue(*(cudaStream_t *) handle, std::move(job));
    return CUBLAS_STATUS_SUCCESS;
}

static size_t size_of(cudaDataType type) {
    return type == CUDA_R_32F ? 4 : 2;
}

extern "C" {

cublasStatus_t cublasCreate_v2(cublasHandle_t * out) {
    *out = (cublasHandle_t) new cudaStream_t{};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
    delete (cudaStream_t *) handle;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
    *(cudaStream_t *) handle = stream;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetMathMode(cublasHandle_t, cublasMath_t) {
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t, void *, size_t) {
    return CUBLAS_STATUS_SUCCESS;
}

const char * cublasGetStatusString(cublasStatus_t) {
    return "not emulated";
}

cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n, int k, const void * alpha,
                            const void * a, cudaDataType type_a, int lda, const void * b, cudaDataType type_b, int ldb, const void * beta,
                            void * c, cudaDataType type_c, int ldc, cublasComputeType_t compute, cublasGemmAlgo_t) {
    const product p = { op_a, op_b, (size_t) m, (size_t) n, (size_t) k, scale_of(alpha, beta, compute),
                        type_a, type_b, type_c, (size_t) lda, (size_t) ldb, (size_t) ldc };
    return enqueue(handle, [=] { p.compute(a, b, c); });
}

cublasStatus_t cublasSgemm_v2(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n, int k,
                              const float * alpha, const float * a, int lda, const float * b, int ldb, const float * beta, float * c,
                              int ldc) {
    return cublasGemmEx(handle, op_a, op_b, m, n, k, alpha, a, CUDA_R_32F, lda, b, CUDA_R_32F, ldb, beta, c, CUDA_R_32F, ldc,
                        CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
}

cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n, int k,
                                          const void * alpha, const void * a, cudaDataType type_a, int lda, long long stride_a,
                                          const void * b, cudaDataType type_b, int ldb, long long stride_b, const void * beta, void * c,
                                          cudaDataType type_c, int ldc, long long stride_c, int count, cublasComputeType_t compute,
                                          cublasGemmAlgo_t) {
    const product p = { op_a, op_b, (size_t) m, (size_t) n, (size_t) k, scale_of(alpha, beta, compute),
                        type_a, type_b, type_c, (size_t) lda, (size_t) ldb, (size_t) ldc };
    return enqueue(handle, [=] {
        for (int i = 0; i < count; i++) {
            p.compute((const char *) a + i * stride_a * size_of(type_a), (const char *) b + i * stride_b * size_of(type_b),
                      (char *) c + i * stride_c * size_of(type_c));
        }
    });
}

// the pointers themselves are in device memory
cublasStatus_t cublasGemmBatchedEx(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n, int k,
                                   const void * alpha, const void * const a[], cudaDataType type_a, int lda, const void * const b[],
                                   cudaDataType type_b, int ldb, const void * beta, void * const c[], cudaDataType type_c, int ldc,
                                   int count, cublasComputeType_t compute, cublasGemmAlgo_t) {
    const product p = { op_a, op_b, (size_t) m, (size_t) n, (size_t) k, scale_of(alpha, beta, compute),
                        type_a, type_b, type_c, (size_t) lda, (size_t) ldb, (size_t) ldc };
    return enqueue(handle, [=] {
        for (int i = 0; i < count; i++) {
            p.compute(a[i], b[i], c[i]);
        }
    });
}
}
