# The pinned llama.cpp with patches/ applied, as a subdirectory of this build.
# Sets PYSPAC_LLAMA_DIR, and PYSPAC_TOOLS: the programs that are built, if any.

find_package(Python3 3.9 REQUIRED COMPONENTS Interpreter)

# redo the tree when the pin or a patch changes; files whose content stays are not touched, hence not rebuilt
set(pin_json "${CMAKE_SOURCE_DIR}/cmake/pin.json")
file(GLOB patches CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/patches/*/*.patch" "${CMAKE_SOURCE_DIR}/tools/patches/*.py")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${patches} "${pin_json}")

execute_process(
    COMMAND "${Python3_EXECUTABLE}" -m tools.patches --build "${PYSPAC_WORK_DIR}" prepare
    WORKING_DIRECTORY "${CMAKE_SOURCE_DIR}"
    OUTPUT_VARIABLE PYSPAC_LLAMA_DIR OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE result)
if(NOT result EQUAL 0)
    message(FATAL_ERROR "the patched llama.cpp could not be made: see the message above")
endif()

# Names in llama.cpp's --version. It asks git too, and would get the commit of the repository around it, so that each
# of our commits would rebuild ggml: hide that repository.
set(ENV{GIT_CEILING_DIRECTORIES} "${PYSPAC_WORK_DIR}")
file(READ "${pin_json}" pin)
string(JSON commit GET "${pin}" llama_cpp commit)
string(JSON tag GET "${pin}" llama_cpp tag)
string(SUBSTRING "${commit}" 0 9 LLAMA_BUILD_COMMIT)
string(REGEX REPLACE "^b" "" LLAMA_BUILD_NUMBER "${tag}")

# nothing that needs a network, and no report of warnings in code that is not ours; a value given on the command line
# wins
foreach(name LLAMA_USE_PREBUILT_UI LLAMA_BUILD_TESTS LLAMA_BUILD_EXAMPLES LLAMA_BUILD_APP LLAMA_ALL_WARNINGS)
    set(${name} OFF CACHE BOOL "set by pyspac")
endforeach()
foreach(name LLAMA_BUILD_COMMON LLAMA_BUILD_TOOLS LLAMA_BUILD_SERVER)
    set(${name} ${PYSPAC_BUILD_TOOLS} CACHE BOOL "set by pyspac")
endforeach()
set(BUILD_SHARED_LIBS ON CACHE BOOL "set by pyspac")
set(GGML_RPC ON CACHE BOOL "set by pyspac")
# portable: ggml's CPU backend once per kind of CPU, each a plugin; the best one is loaded when a program starts
if(PYSPAC_PORTABLE)
    set(GGML_NATIVE OFF CACHE BOOL "set by pyspac" FORCE)
    set(GGML_BACKEND_DL ON CACHE BOOL "set by pyspac" FORCE)
    set(GGML_CPU_ALL_VARIANTS ON CACHE BOOL "set by pyspac" FORCE)
endif()
include(ServerExtras)

# EXCLUDE_FROM_ALL: of the many programs only those named below are built, and none of its install rules apply
add_subdirectory("${PYSPAC_LLAMA_DIR}" "${CMAKE_BINARY_DIR}/llama.cpp" EXCLUDE_FROM_ALL)

# With AVX512-FP16 ggml's attention adds up values 128 elements at a time, and the rest one by one through a table: heads of 64
# (gpt-oss) took a third of decoding after 1,261 tokens. Without, it takes 64 at a time, and its sums are no less exact.
include(CheckCXXCompilerFlag)
check_cxx_compiler_flag(-mno-avx512fp16 PYSPAC_HAS_NO_AVX512FP16)
if(PYSPAC_HAS_NO_AVX512FP16 AND TARGET ggml-cpu)
    set_source_files_properties("${PYSPAC_LLAMA_DIR}/ggml/src/ggml-cpu/ops.cpp" TARGET_DIRECTORY ggml-cpu
        PROPERTIES COMPILE_OPTIONS -mno-avx512fp16)
endif()

set(PYSPAC_LLAMA_LIBS llama ggml ggml-base)
foreach(name ggml-cpu ggml-rpc ggml-cuda ggml-hip ggml-vulkan ggml-metal ggml-sycl ggml-blas)
    if(TARGET ${name})
        list(APPEND PYSPAC_LLAMA_LIBS ${name})
    endif()
endforeach()
if(PYSPAC_PORTABLE)
    include(CpuVariants)
endif()
set(PYSPAC_TOOLS "")
if(PYSPAC_BUILD_TOOLS)
    set(PYSPAC_TOOLS llama-server llama-cli llama-completion llama-bench llama-perplexity llama-quantize
                     llama-imatrix llama-gguf-split ggml-rpc-server)
    foreach(name llama-common mtmd llama-server-impl llama-cli-impl llama-completion-impl llama-bench-impl
                 llama-perplexity-impl llama-quantize-impl)
        list(APPEND PYSPAC_LLAMA_LIBS ${name})
    endforeach()
    add_llama_download()
endif()
report_server_extras()

# plain names without versions, because a wheel cannot hold the symbolic links; and no headers to install
foreach(name ${PYSPAC_LLAMA_LIBS})
    foreach(property VERSION SOVERSION PUBLIC_HEADER PRIVATE_HEADER)
        set_property(TARGET ${name} PROPERTY ${property})
    endforeach()
endforeach()

add_custom_target(pyspac-llama ALL DEPENDS ${PYSPAC_LLAMA_LIBS} ${PYSPAC_TOOLS})
