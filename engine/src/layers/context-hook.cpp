#include "context-hook.h"

#include "base/status.h"

spac_context_hook::spac_context_hook(llama_context * ctx) :
    ctx(ctx) {
    if (llama_get_moe_hook(ctx)->build) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, "this context has an engine already: free that one first (with PYSPAC_CACHE in the "
                                                       "environment each context gets one when it is made: unset it)");
    }
}

void spac_context_hook::set(const llama_moe_hook & hook) {
    llama_set_moe_hook(ctx, &hook);
}

// may be called while another exception is on its way
void spac_context_hook::remove() {
    if (!ctx || !llama_get_moe_hook(ctx)->build) {
        return;
    }
    try {
        llama_set_moe_hook(ctx, nullptr);
    } catch (const std::exception & e) { // the hook is gone all the same
        spac_log("the context could not reserve its graphs without the engine: %s", e.what());
    }
}
