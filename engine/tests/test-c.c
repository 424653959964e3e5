// The public header compiles as C, and the library is usable from C.
#include "spac.h"

#include <stdio.h>
#include <string.h>

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #condition, spac_last_error()); \
            return 1;                                                                              \
        }                                                                                          \
    } while (0)

static int test_a_board_of_no_engine(void) {
    const spac_board_geometry geometry = { 2, 4, 1, 3, 16, 1 };
    spac_board *              board    = NULL;
    CHECK(spac_board_make(&geometry, &board) == SPAC_STATUS_SUCCESS);
    const spac_board_view * view = spac_board_get_view(board);
    CHECK(view->geometry.n_expert == 4 && *view->byte_budget == UINT64_MAX);

    spac_board_field field;
    int32_t          n = 0;
    for (; spac_board_get_field(board, n, &field); n++) {
        CHECK(strlen(field.name) > 0 && field.n_bytes > 0);
    }
    CHECK(n > 0 && field.data == (void *) view->fallback); // the last one
    spac_board_close(board);

    const spac_board_geometry nothing = { 0, 4, 1, 3, 16, 1 };
    CHECK(spac_board_make(&nothing, &board) == SPAC_STATUS_INVALID_ARGUMENT && board == NULL);
    return 0;
}

static int test_what_is_refused(void) {
    spac_device_info info = { 0 };
    CHECK(spac_device_get_info(0, &info) == SPAC_STATUS_SUCCESS && strlen(info.name) > 0 && info.handle != NULL);
    CHECK(spac_device_get_info(spac_device_count(), &info) == SPAC_STATUS_INVALID_ARGUMENT);
    CHECK(spac_device_get_info(-1, &info) == SPAC_STATUS_INVALID_ARGUMENT);
    CHECK(spac_device_get_info(0, NULL) == SPAC_STATUS_INVALID_ARGUMENT);

    double gb_s = 0;
    CHECK(spac_measure_host_gb_s(SPAC_MAX_THREADS + 1, &gb_s) == SPAC_STATUS_INVALID_ARGUMENT);
    return 0;
}

int main(void) {
    CHECK(spac_abi_version() == SPAC_ABI_VERSION);
    CHECK(spac_backend_load_all() == SPAC_STATUS_SUCCESS);
    CHECK(spac_device_count() > 0);
    return test_a_board_of_no_engine() || test_what_is_refused();
}
