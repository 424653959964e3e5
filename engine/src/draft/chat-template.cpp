// The ABI of chat templates: checks arguments, turns exceptions into a status.
#include "chat-template.h"

#include "base/status.h"
#include "common-library.h"

#include <stdexcept>

// whatever a template or its messages make llama.cpp throw is about these
template <typename F>
static void tell_as_argument(F && fn) {
    try {
        fn();
    } catch (const std::runtime_error & e) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, e.what());
    } catch (const std::logic_error & e) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, e.what());
    }
}

spac_status spac_chat_template_open(const char * source, const char * bos, const char * eos, spac_chat_template ** chat) {
    return spac_guard([&] {
        if (!source || !*source || !bos || !eos || !chat) {
            throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, "spac_chat_template_open: an empty template, or nowhere to put it");
        }
        *chat           = nullptr;
        const auto make = (spac_chat_template_make_fn) spac_common_function("spac_chat_template_make");
        tell_as_argument([&] { *chat = make(source, bos, eos); });
    });
}

void spac_chat_template_close(spac_chat_template * chat) {
    delete chat;
}

spac_status spac_chat_template_apply(spac_chat_template * chat, const char * messages, const char ** text, int64_t * n_bytes) {
    return spac_guard([&] {
        if (!chat || !messages || !text || !n_bytes) {
            throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, "spac_chat_template_apply: no template, no messages, or nowhere to put the text");
        }
        tell_as_argument([&] { chat->text = chat->apply(messages); });
        *text    = chat->text.c_str();
        *n_bytes = (int64_t) chat->text.size();
    });
}
