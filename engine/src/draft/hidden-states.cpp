// Inputs of a model's layers, read out batch by batch: what a head that drafts is trained on.
#include "base/status.h"
#include "llama-ext.h"
#include "llama.h"

#include "spac.h"

#include <cstring>
#include <vector>

struct spac_hidden_states {
    llama_context *       ctx;
    std::vector<uint32_t> layers;
    size_t                n_embd;

    spac_hidden_states(llama_context * ctx, const int32_t * first, int32_t n_layers) :
        ctx(ctx),
        layers(first, first + n_layers),
        n_embd(llama_model_n_embd(llama_get_model(ctx))) {
        set(true);
    }

    ~spac_hidden_states() {
        set(false);
    }

    void set(bool on) {
        for (uint32_t il : layers) {
            llama_set_embeddings_layer_inp(ctx, il, on);
        }
    }
};

static void require(bool ok, const std::string & what) {
    if (!ok) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, what);
    }
}

static bool is_empty(llama_context * ctx) {
    for (uint32_t i = 0; i < llama_n_seq_max(ctx); i++) {
        if (llama_memory_seq_pos_max(llama_get_memory(ctx), i) >= 0) {
            return false;
        }
    }
    return true;
}

spac_status spac_hidden_states_open(struct llama_context * ctx, const int32_t * layers, int32_t n_layers, spac_hidden_states ** states) {
    return spac_guard([&] {
        require(ctx && layers && n_layers > 0 && states, "spac_hidden_states_open: no context, no layers, or nowhere to put the handle");
        *states             = nullptr;
        const int32_t n_all = llama_model_n_layer(llama_get_model(ctx));
        for (int32_t i = 0; i < n_layers; i++) {
            require(layers[i] >= 0 && layers[i] < n_all, spac_format("the layer %d cannot be read: give 0 to %d", layers[i], n_all - 1));
        }
        require(is_empty(ctx), "hidden states are kept from an empty context on: clear its memory first");
        *states = new spac_hidden_states(ctx, layers, n_layers);
    });
}

spac_status spac_hidden_states_read(spac_hidden_states * states, int32_t n_tokens, float * out) {
    return spac_guard([&] {
        require(states && out && n_tokens >= 0, "spac_hidden_states_read: no handle, nowhere to put the rows, or fewer than no tokens");
        const int32_t n_batch = llama_n_batch(states->ctx);
        require(n_tokens <= n_batch, spac_format("%d tokens cannot be read: a batch has %d at most", n_tokens, n_batch));
        require(!is_empty(states->ctx), "there are no hidden states: no batch has been computed"); // llama.cpp would abort
        const size_t n_layers = states->layers.size(), n_embd = states->n_embd;
        for (size_t k = 0; k < n_layers; k++) {
            const float * rows = llama_get_embeddings_layer_inp(states->ctx, states->layers[k]);
            for (int32_t i = 0; i < n_tokens; i++) {
                memcpy(out + (i * n_layers + k) * n_embd, rows + i * n_embd, n_embd * sizeof(float));
            }
        }
    });
}

void spac_hidden_states_close(spac_hidden_states * states) {
    delete states;
}
