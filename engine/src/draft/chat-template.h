// A chat template: what libspac asks libspac-common for. The functions throw std::exception; chat-template.cpp checks what
// they get.
#pragma once

#include "spac.h"

#include <string>

struct spac_chat_template {
    virtual ~spac_chat_template() = default;

    // the messages, and the beginning of an answer
    virtual std::string apply(const char * messages) const = 0;

    std::string text; // of the last messages
};

// what libspac-common exports
using spac_chat_template_make_fn = spac_chat_template * (*) (const char * source, const char * bos, const char * eos);
