// Errors: thrown inside the engine, turned into a status and a text at the ABI.
#pragma once

#include "spac.h"

#include <stdexcept>
#include <string>
#include <system_error>

struct spac_error : std::runtime_error {
    spac_status status;

    spac_error(spac_status status, const std::string & text) :
        std::runtime_error(text), status(status) {}
};

// nothing to split, and no mistake: a program that asked for the engine by the environment goes on without
struct spac_stays_stock : spac_error {
    spac_stays_stock(const std::string & text) :
        spac_error(SPAC_STATUS_NOTHING_TO_SPLIT, text) {}
};

struct spac_dense_model : spac_stays_stock {
    spac_dense_model() :
        spac_stays_stock("the model has no Mixture-of-Experts layer: there is nothing to split") {}
};

// printf into a std::string
std::string spac_format(const char * fmt, ...) __attribute__((format(printf, 1, 2)));

void spac_set_last_error(const std::string & text);

// one line on stderr, prefixed with "spac: "
void spac_log(const char * fmt, ...) __attribute__((format(printf, 1, 2)));

// runs fn; nothing throws past it
template <typename F>
spac_status spac_guard(F && fn) {
    try {
        fn();
        return SPAC_STATUS_SUCCESS;
    } catch (const spac_error & e) {
        spac_set_last_error(e.what());
        return e.status;
    } catch (const std::bad_alloc &) {
        spac_set_last_error("out of memory");
        return SPAC_STATUS_OUT_OF_MEMORY;
    } catch (const std::system_error & e) {
        const bool no_thread = e.code() == std::errc::resource_unavailable_try_again;
        spac_set_last_error(no_thread ? spac_format("the system has no thread left for the engine (%s): raise the limit on processes (ulimit -u; of a container: its pids limit)", e.what()) : e.what());
        return SPAC_STATUS_INTERNAL;
    } catch (const std::exception & e) {
        spac_set_last_error(e.what());
        return SPAC_STATUS_INTERNAL;
    }
}
