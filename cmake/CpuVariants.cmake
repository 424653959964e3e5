# Which of ggml's CPU variants a portable build has: adds their targets to PYSPAC_LLAMA_LIBS.

get_property(targets DIRECTORY "${PYSPAC_LLAMA_DIR}/ggml/src" PROPERTY BUILDSYSTEM_TARGETS)
list(FILTER targets INCLUDE REGEX "^ggml-cpu-")
list(FILTER targets EXCLUDE REGEX "-feats$")

if(NOT PYSPAC_CPU_VARIANTS STREQUAL "all")
    list(TRANSFORM PYSPAC_CPU_VARIANTS PREPEND "ggml-cpu-" OUTPUT_VARIABLE wanted)
    foreach(name ${wanted})
        if(NOT name IN_LIST targets)
            message(FATAL_ERROR "PYSPAC_CPU_VARIANTS: there is no ${name}; ggml has ${targets}")
        endif()
    endforeach()
    # ggml has no list of its own, and its target builds all of them: those that are not wanted become empty
    file(WRITE "${CMAKE_BINARY_DIR}/empty.c" "")
    foreach(name ${targets})
        if(NOT name IN_LIST wanted)
            set_target_properties(${name} PROPERTIES SOURCES "${CMAKE_BINARY_DIR}/empty.c"
                LIBRARY_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/unused")
        endif()
    endforeach()
    set(targets ${wanted})
endif()
list(APPEND PYSPAC_LLAMA_LIBS ${targets})
