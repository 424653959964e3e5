// The target's hidden states that a head reads: a row for each token of the last batch, in buffers of n_batch rows.
#pragma once

#include "llama-ext.h"
#include "llama.h"

#include <algorithm>
#include <vector>

struct spac_target_states {
    spac_target_states() = default;

    // what an EAGLE-3 head reads (it names layers), or a head that predicts further tokens (NextN, MTP)
    spac_target_states(llama_context * target, const llama_model * head) :
        target(target) {
        const llama_model * model = llama_get_model(target);
        const uint32_t      n_ids = llama_model_target_layer_ids_n(head);
        width                     = n_ids > 0 ? llama_model_n_embd(model) : llama_model_n_embd_out(model);
        for (uint32_t k = 0; k < n_ids; k++) {
            const int32_t il = llama_model_target_layer_ids(head)[k];
            layers.push_back(il < llama_model_n_layer(model) ? il : NEXTN);
        }
        if (n_ids == 0) {
            layers.push_back(NEXTN);
        }
    }

    size_t row_size() const { return layers.size() * width; } // floats

    // append the last batch's rows [first, first + n_tokens): [n_tokens][layer][width]
    void save(int32_t first, int32_t n_tokens, std::vector<float> & rows) const {
        const size_t n = rows.size();
        rows.resize(n + n_tokens * row_size());
        for (size_t k = 0; k < layers.size(); k++) {
            const float * from = buffer(layers[k]) + first * width;
            for (int32_t i = 0; i < n_tokens; i++) {
                std::copy_n(from + i * width, width, rows.data() + n + (i * layers.size() + k) * width);
            }
        }
    }

    // as if a batch of these tokens had just been computed
    void restore(int32_t n_tokens, const float * rows) const {
        for (size_t k = 0; k < layers.size(); k++) {
            float * to = buffer(layers[k]);
            for (int32_t i = 0; i < n_tokens; i++) {
                std::copy_n(rows + (i * layers.size() + k) * width, width, to + i * width);
            }
        }
    }

  private:
    static constexpr int32_t NEXTN = -1; // behind the last layer

    float * buffer(int32_t il) const { return il == NEXTN ? llama_get_embeddings_nextn(target) : llama_get_embeddings_layer_inp(target, il); }

    llama_context *      target = nullptr;
    std::vector<int32_t> layers;
    size_t               width = 0;
};
