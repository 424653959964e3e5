#include "status.h"

#include <cstdarg>
#include <cstdio>

static thread_local std::string last_error;

static std::string format_v(const char * fmt, va_list args) {
    va_list copy;
    va_copy(copy, args);
    const int n = vsnprintf(nullptr, 0, fmt, copy);
    va_end(copy);

    std::string text(n, '\0');
    vsnprintf(text.data(), n + 1, fmt, args);
    return text;
}

std::string spac_format(const char * fmt, ...) {
    va_list args;
    va_start(args, fmt);
    std::string text = format_v(fmt, args);
    va_end(args);
    return text;
}

void spac_set_last_error(const std::string & text) {
    last_error = text;
}

const char * spac_last_error(void) {
    return last_error.c_str();
}

void spac_log(const char * fmt, ...) {
    va_list args;
    va_start(args, fmt);
    const std::string text = format_v(fmt, args);
    va_end(args);
    fprintf(stderr, "spac: %s\n", text.c_str());
}
