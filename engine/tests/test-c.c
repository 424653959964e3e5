// The public header compiles as C, and the library links from C.
#include "spac.h"

int main(void) {
    return spac_abi_version() == SPAC_ABI_VERSION ? 0 : 1;
}
