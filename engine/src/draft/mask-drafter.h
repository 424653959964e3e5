// Drafts of a server's slots by mask tokens: the batch that verifies drafts makes the next ones, too.
//
// Behind each token of a slot that drafts, an anchor, stands a group of
// masks, which predict what follows the token after it. A group is a sequence of its own, which shares the cells of the slot's
// sequence up to its anchor (a unified cache). Masks come behind the batch's own tokens, whose indices stay.
#pragma once

#include "mtp-adapter.h"

#include <functional>

struct llama_batch_ext;

struct spac_mask_drafter {
    // the context has 2 + n_draft_max sequences for each slot, and the adapter at `path` is loaded into it
    // max_batch: tokens of the widest batch that gets masks; count_first: told how many tokens of a batch are no masks, or 0
    // throws SPAC_STATUS_INVALID_ARGUMENT
    spac_mask_drafter(llama_context * ctx, const std::string & path, int32_t n_draft_max, int32_t max_batch);

    // llama_moe_hook's, of the same names
    int32_t draft(int32_t slot, llama_token id_last, llama_pos pos, int32_t n_max, const llama_token ** drafted);
    int32_t process(llama_batch_ext * batch);
    void    forget(int32_t slot);

    // a step of the slot is done, whose logits can be read; returns how many masks it had
    int32_t end_step(int32_t slot, int32_t n_accepted);

    int32_t n_masks_in_batch() const { return n_in_batch; } // the last one's, of all slots

    std::function<void(int32_t)> count_first = [](int32_t) {};

  private:
    struct server_slot {
        std::vector<llama_token>             drafted;
        llama_pos                            pos     = -1;     // of the first anchor
        int32_t                              n_masks = 0;      // behind each anchor; 0: no group
        int32_t                              row     = -1;     // of the first mask in the batch; -1: it had none
        std::vector<llama_pos>               shared;           // [group] tokens of the sequence that it has
        std::vector<std::vector<spac_guess>> guesses;          // [mask] behind the last token
        llama_pos                            pos_guessed = -1; // where that token stands
    };

    llama_seq_id group(int32_t slot, int32_t j) const { return (llama_seq_id) slots.size() + slot * (1 + n_draft_max) + j; }
    bool         add_masks(int32_t slot, llama_batch_ext & batch);
    void         join(int32_t slot, int32_t n_groups);
    void         leave();

    llama_context *          ctx;
    const spac_mtp_adapter   adapter;
    const int32_t            n_draft_max;
    const size_t             max_batch;
    std::vector<server_slot> slots;
    int32_t                  n_in_batch = 0;
};
