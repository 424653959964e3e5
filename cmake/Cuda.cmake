# CUDA or not, and for which GPUs. Before PatchedLlama, whose options it sets.
#
# GGML_CUDA given (by a preset, or -D) wins; then PYSPAC_CUDA=1 or =0 in the environment; else CUDA is built where the
# driver lists a GPU and nvcc is there.

execute_process(COMMAND nvidia-smi -L TIMEOUT 60 OUTPUT_VARIABLE gpus RESULT_VARIABLE result ERROR_QUIET)
set(has_gpu OFF)
if(result EQUAL 0 AND gpus MATCHES "^GPU")
    set(has_gpu ON)
endif()
find_program(PYSPAC_NVCC nvcc HINTS ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)

if(NOT DEFINED GGML_CUDA)
    if(NOT "$ENV{PYSPAC_CUDA}" STREQUAL "")
        set(GGML_CUDA "$ENV{PYSPAC_CUDA}" CACHE BOOL "CUDA backend")
    elseif(has_gpu AND PYSPAC_NVCC)
        set(GGML_CUDA ON CACHE BOOL "CUDA backend")
    else()
        set(GGML_CUDA OFF CACHE BOOL "CUDA backend")
    endif()
endif()

if(GGML_CUDA)
    if(PYSPAC_NVCC AND NOT DEFINED CMAKE_CUDA_COMPILER AND "$ENV{CUDACXX}" STREQUAL "")
        set(CMAKE_CUDA_COMPILER "${PYSPAC_NVCC}")
    endif()
    # ggml's own default is "native", which needs a GPU at build time; these run on every GPU since Turing
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND (PYSPAC_PORTABLE OR NOT has_gpu))
        set(CMAKE_CUDA_ARCHITECTURES 75-virtual 80-virtual 86-real 89-real 90-virtual CACHE STRING "CUDA architectures")
    endif()
endif()
