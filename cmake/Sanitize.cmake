# Sanitizers for everything in the process: a race between the engine and ggml shows only if both are instrumented.

if(PYSPAC_SANITIZE)
    if(NOT PYSPAC_SANITIZE MATCHES "^(address|thread)$")
        message(FATAL_ERROR "PYSPAC_SANITIZE is '${PYSPAC_SANITIZE}'; allowed: address, thread, or nothing")
    endif()
    add_compile_options(-fsanitize=${PYSPAC_SANITIZE} -fno-omit-frame-pointer)
    add_link_options(-fsanitize=${PYSPAC_SANITIZE})
    if(PYSPAC_SANITIZE STREQUAL "thread")
        # OpenMP's own synchronisation is not instrumented and would be reported as races
        set(GGML_OPENMP OFF CACHE BOOL "" FORCE)
    endif()
endif()

# Prefix of a test's command line. ThreadSanitizer of older compilers cannot map its shadow memory when the kernel
# randomises addresses with many bits, so the tests run without randomisation where that is allowed. Tests for another
# processor run on an emulator.
set(PYSPAC_TEST_LAUNCHER ${CMAKE_CROSSCOMPILING_EMULATOR})
if(PYSPAC_SANITIZE STREQUAL "thread")
    execute_process(COMMAND setarch ${CMAKE_HOST_SYSTEM_PROCESSOR} -R true RESULT_VARIABLE result
                    OUTPUT_QUIET ERROR_QUIET)
    if(result EQUAL 0)
        set(PYSPAC_TEST_LAUNCHER setarch ${CMAKE_HOST_SYSTEM_PROCESSOR} -R)
    endif()
endif()
