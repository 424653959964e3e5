# cmake -DUI_H=FILE -P: fails unless the header that llama.cpp generated says that the page is in.

file(READ "${UI_H}" text)
if(NOT text MATCHES "define LLAMA_UI_HAS_ASSETS 1")
    message(FATAL_ERROR "PYSPAC_UI: the web page could not be built, see npm's messages above. PYSPAC_UI=0 builds without it.")
endif()
