# What llama-server has only where more than a compiler is installed: HTTPS, for downloads (-hf), and its web page.
# Included before llama.cpp, whose options it sets; the functions are called after it. What came of it is said, and
# written to bin/pyspac-build.json for pyspac.

if(NOT "$ENV{PYSPAC_UI}" STREQUAL "")
    set(PYSPAC_UI "$ENV{PYSPAC_UI}" CACHE BOOL "llama-server's web page" FORCE)
endif()

# a wheel takes its libssl with it (tools/wheels)
if(PYSPAC_BUILD_TOOLS)
    find_package(OpenSSL 3.0 QUIET)
endif()
set(LLAMA_OPENSSL "${OPENSSL_FOUND}" CACHE BOOL "set by pyspac" FORCE)
set(LLAMA_BUILD_UI "${PYSPAC_UI}" CACHE BOOL "set by pyspac" FORCE)

if(PYSPAC_UI)
    find_program(PYSPAC_NPM npm)
    find_program(PYSPAC_NODE node)
    set(node_version "none")
    if(PYSPAC_NPM AND PYSPAC_NODE)
        execute_process(COMMAND "${PYSPAC_NODE}" --version OUTPUT_VARIABLE node_version OUTPUT_STRIP_TRAILING_WHITESPACE)
        string(REGEX REPLACE "^v" "" node_version "${node_version}")
    endif()
    if(node_version VERSION_LESS 20.19)
        message(FATAL_ERROR "PYSPAC_UI: llama-server's web page needs npm and Node.js 20.19 or newer (found: ${node_version}). "
                            "Install them, or build without the page: PYSPAC_UI=0")
    endif()
endif()

# fetches what -hf, -mu and -dr name and prints where it is; llama.cpp has it only inside its big `llama` program
function(add_llama_download)
    add_executable(llama-download "${PYSPAC_LLAMA_DIR}/app/download.cpp" "${CMAKE_SOURCE_DIR}/cmake/llama-download.cpp")
    target_link_libraries(llama-download PRIVATE llama-common)
    target_compile_features(llama-download PRIVATE cxx_std_17)
    list(APPEND PYSPAC_TOOLS llama-download)
    set(PYSPAC_TOOLS "${PYSPAC_TOOLS}" PARENT_SCOPE)
endfunction()

# npm may fail, and the build of the page then goes on without it: not where it was asked for
function(require_web_page)
    add_custom_target(pyspac-web-page ALL
        COMMAND "${CMAKE_COMMAND}" "-DUI_H=${CMAKE_BINARY_DIR}/llama.cpp/tools/ui/ui.h"
                -P "${CMAKE_SOURCE_DIR}/cmake/require_web_page.cmake"
        COMMENT "Checking that the web page is in"
        VERBATIM)
    add_dependencies(pyspac-web-page llama-ui-assets)
endfunction()

function(report_server_extras)
    if(NOT PYSPAC_BUILD_TOOLS)
        return()
    endif()
    get_target_property(definitions cpp-httplib INTERFACE_COMPILE_DEFINITIONS)
    set(https false)
    if("${definitions}" MATCHES CPPHTTPLIB_OPENSSL_SUPPORT)
        set(https true)
    else()
        message(NOTICE "-- llama-server without HTTPS, so without -hf: for it, install OpenSSL's headers (Debian, Ubuntu: "
                       "libssl-dev), then `make configure build`")
    endif()
    set(ui false)
    if(PYSPAC_UI)
        set(ui true)
        require_web_page()
    else()
        message(NOTICE "-- llama-server without its web page: for it, `PYSPAC_UI=1 make build` (needs npm and 170 MB from its registry)")
    endif()
    file(WRITE "${CMAKE_BINARY_DIR}/bin/pyspac-build.json" "{ \"https\": ${https}, \"ui\": ${ui} }\n")
endfunction()
