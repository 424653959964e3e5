# The Python module of the engine: spac.h -> build_ffi.py -> C -> _ffi.abi3.so, beside the libraries.

find_package(Python3 3.11 COMPONENTS Interpreter Development.Module)
if(NOT Python3_Development.Module_FOUND)
    message(FATAL_ERROR "Python 3.11 or newer with its header files is needed (Debian, Ubuntu: python3-dev)")
endif()
execute_process(COMMAND "${Python3_EXECUTABLE}" -c "import cffi" RESULT_VARIABLE result OUTPUT_QUIET ERROR_QUIET)
if(NOT result EQUAL 0)
    message(FATAL_ERROR "${Python3_EXECUTABLE} has no cffi. Use `make build`, or install it: python -m pip install cffi")
endif()

set(build_ffi "${CMAKE_SOURCE_DIR}/pyspac/_native/build_ffi.py")
set(spac_h "${CMAKE_SOURCE_DIR}/engine/include/spac.h")
set(ffi_c "${CMAKE_BINARY_DIR}/_ffi.c")
add_custom_command(
    OUTPUT "${ffi_c}"
    COMMAND "${Python3_EXECUTABLE}" "${build_ffi}" "${spac_h}" "${ffi_c}"
    DEPENDS "${build_ffi}" "${spac_h}"
    VERBATIM)

add_library(_ffi MODULE "${ffi_c}")
target_include_directories(_ffi PRIVATE ${Python3_INCLUDE_DIRS} "${CMAKE_SOURCE_DIR}/engine/include")
target_link_libraries(_ffi PRIVATE spac)
# cffi's generated code keeps to the limited API, so one module serves every later Python
set_target_properties(_ffi PROPERTIES PREFIX "" OUTPUT_NAME "_ffi.abi3" SUFFIX ".so" C_VISIBILITY_PRESET hidden)
