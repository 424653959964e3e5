// The public header compiles as C, and the library is usable from C: also by a caller that was built against an older,
// shorter struct.
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

// spac_device_info as it would have been before its description was added
typedef struct older_device_info {
    size_t size;
    char   name[64];
} older_device_info;

static int test_an_older_caller(void) {
    struct {
        older_device_info info;
        unsigned char     behind[sizeof(spac_device_info)];
    } older;

    memset(&older, 0xAB, sizeof(older));
    older.info.size = sizeof(older.info);
    CHECK(spac_device_get_info(0, (spac_device_info *) (void *) &older) == SPAC_STATUS_SUCCESS);
    CHECK(older.info.size == sizeof(older.info));
    for (size_t i = 0; i < sizeof(older.behind); i++) {
        CHECK(older.behind[i] == 0xAB); // not a byte beyond its end
    }

    spac_device_info whole;
    whole.size = sizeof(whole);
    CHECK(spac_device_get_info(0, &whole) == SPAC_STATUS_SUCCESS);
    CHECK(strcmp(whole.name, older.info.name) == 0);
    CHECK(whole.handle != NULL);
    return 0;
}

static int test_a_newer_caller(void) {
    struct {
        spac_device_info info;
        unsigned char    newer[64];
    } newer;

    memset(&newer, 0xAB, sizeof(newer));
    newer.info.size = sizeof(newer);
    CHECK(spac_device_get_info(0, &newer.info) == SPAC_STATUS_SUCCESS);
    CHECK(newer.info.size == sizeof(newer));
    CHECK(newer.newer[0] == 0xAB);
    return 0;
}

static int test_what_is_refused(void) {
    spac_device_info info = { 0 };
    CHECK(spac_device_get_info(0, &info) == SPAC_STATUS_INVALID_ARGUMENT);
    CHECK(strstr(spac_last_error(), "sizeof(spac_device_info)") != NULL);
    info.size = sizeof(info);
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
    return test_an_older_caller() || test_a_newer_caller() || test_what_is_refused();
}
