// The hook that llama.cpp keeps for a context, and asks about each MoE layer of a graph that it builds.
#pragma once

#include "llama-moe-hook.h"

struct spac_context_hook {
    // throws SPAC_STATUS_INVALID_ARGUMENT where one is set already: two engines would overwrite each other's
    explicit spac_context_hook(llama_context * ctx);
    ~spac_context_hook() { remove(); }

    spac_context_hook(const spac_context_hook &) = delete;

    // the context reserves its graphs, which shows every layer to hook.build before this returns
    void set(const llama_moe_hook & hook);
    void remove();
    void forget_context() { ctx = nullptr; } // it is going away, and the hook with it

    llama_context * ctx;
};
