// libspac-common: what libspac takes from llama.cpp's `common`, loaded when it is asked for.
#pragma once

#include "spac.h"

// one of its functions; throws where the library is missing. It stays loaded
void * spac_common_function(const char * name);
