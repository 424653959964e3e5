#include "common-library.h"

#include "base/status.h"

#include <dlfcn.h>

void * spac_common_function(const char * name) {
    static void * library = dlopen("libspac-common.so", RTLD_NOW); // it lies beside this one
    void *        found   = library ? dlsym(library, name) : nullptr;
    if (!found) {
        const char * why = dlerror(); // of this thread's last failure; none where another call failed to load it
        throw spac_error(SPAC_STATUS_INTERNAL, spac_format("libspac-common.so cannot be used (%s): build with PYSPAC_BUILD_TOOLS=ON", why ? why : "it was not loaded"));
    }
    return found;
}
