// Structs of the ABI begin with their size: an older caller's shorter struct is filled as far as it goes.
#pragma once

#include "status.h"

#include <algorithm>
#include <cstring>

static constexpr size_t SPAC_STRUCT_SIZE_MAX = 4096; // of a size that was set; what is not set is likely more

// throws SPAC_STATUS_INVALID_ARGUMENT; `name` is the struct's type
inline void spac_check_size(size_t size, const char * name) {
    const bool cuts_a_field = size % sizeof(void *) != 0; // of every version they end so
    if (size < sizeof(size_t) || size > SPAC_STRUCT_SIZE_MAX || cuts_a_field) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_format("size %zu: set it to sizeof(%s)", size, name));
    }
}

// copies what the caller's struct has room for; its size stays
template <typename T>
void spac_fill_struct(T * to, const T & from, const char * name) {
    const size_t size = to->size;
    spac_check_size(size, name);
    memcpy((void *) to, &from, std::min(size, sizeof(T)));
    to->size = size;
}

// copies what the caller's struct has, over defaults of the whole; `to` keeps the whole's size
template <typename T>
void spac_read_struct(T * to, const T & from, const char * name) {
    spac_check_size(from.size, name);
    memcpy((void *) to, &from, std::min(from.size, sizeof(T)));
    to->size = sizeof(T);
}
