// States of tokens that a server's head reads later: while nothing is drafted it looks at no batch, and before it drafts
// again it reads all that it missed. States are kept by slot, of tokens that follow each other.
#pragma once

#include "target-states.h"

#include <map>
#include <memory>

struct spac_head_states {
    // of a slot; then the head reads them
    static constexpr size_t BYTES_MAX = 32 << 20;

    spac_head_states(llama_context * target, size_t bytes_max = BYTES_MAX) :
        target(target), bytes_max(bytes_max) {}

    // llama_moe_hook's, of the same names
    bool    keep(const llama_context * head, int32_t slot, llama_pos pos, int32_t row);
    int32_t give(const llama_context * head, int32_t slot, llama_pos * pos, llama_pos end);
    void    drop(int32_t slot) { slots.erase(slot); } // its text is another one

  private:
    struct kept {
        llama_pos          first = 0;
        std::vector<float> rows; // [n_tokens][row_size]
    };

    const spac_target_states * states_of(const llama_context * head);
    llama_pos                  end_of(const kept & k) const { return k.first + (llama_pos) (k.rows.size() / states->row_size()); }

    llama_context *                     target;
    const size_t                        bytes_max;
    std::unique_ptr<spac_target_states> states; // of the first head that asks; a context has one
    bool                                is_known = false;
    std::map<int32_t, kept>             slots;
};
