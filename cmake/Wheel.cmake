# What a wheel holds beside the Python files: libraries and programs in pyspac/bin, together as in a build, since ggml's
# programs look for its backends beside themselves.
# scikit-build-core installs only this component, into its folder `pyspac`.

set(libraries ${PYSPAC_LLAMA_LIBS} spac)
if(TARGET _ffi)
    list(APPEND libraries _ffi)
endif()
install(TARGETS ${libraries} LIBRARY DESTINATION bin COMPONENT pyspac)
if(PYSPAC_TOOLS)
    install(TARGETS ${PYSPAC_TOOLS} RUNTIME DESTINATION bin COMPONENT pyspac)
    install(FILES "${CMAKE_BINARY_DIR}/bin/pyspac-build.json" DESTINATION bin COMPONENT pyspac)
endif()
install(FILES "${PYSPAC_LLAMA_DIR}/LICENSE" DESTINATION bin RENAME LICENSE.llama.cpp COMPONENT pyspac)
