#include "mask-drafter.h"

#include "base/status.h"

#include "llama-batch.h"
#include "llama-moe-hook.h"

#include <algorithm>

static int32_t checked_length(const spac_mtp_adapter & adapter, const std::string & path, int32_t n_draft_max) {
    const int32_t n_masks = (int32_t) adapter.mask_ids.size();
    if (n_draft_max < 1 || n_draft_max > n_masks) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_format("%d drafts: give 1 to %d, as many as the adapter %s has masks", n_draft_max, n_masks, path.c_str()));
    }
    return n_draft_max;
}

spac_mask_drafter::spac_mask_drafter(llama_context * ctx, const std::string & path, int32_t n_draft_max, int32_t max_batch) :
    ctx(ctx),
    adapter(path),
    n_draft_max(checked_length(adapter, path, n_draft_max)),
    max_batch(std::min({ (uint32_t) max_batch, llama_n_batch(ctx), llama_n_ubatch(ctx) })) {
    const uint32_t n_slots = llama_n_seq_max(ctx) / (2 + n_draft_max);
    if (n_slots == 0 || llama_n_ctx_seq(ctx) != llama_n_ctx(ctx) || llama_model_is_recurrent(llama_get_model(ctx)) || llama_model_is_hybrid(llama_get_model(ctx))) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, "mask tokens need a unified cache with sequences for them, and a model without recurrent layers: "
                                                       "set PYSPAC_MASKS, give --kv-unified, or draft in another way");
    }
    slots.resize(n_slots);
    for (server_slot & s : slots) {
        s.shared.resize(1 + n_draft_max, 0);
    }
}

// ---- before the batch

int32_t spac_mask_drafter::draft(int32_t slot, llama_token id_last, llama_pos pos, int32_t n_max, const llama_token ** drafted) {
    server_slot &       s     = slots.at(slot);
    const llama_vocab * vocab = llama_model_get_vocab(llama_get_model(ctx));
    s.drafted.clear();
    if (s.pos_guessed == pos) {
        for (const std::vector<spac_guess> & guesses : s.guesses) {
            if ((int32_t) s.drafted.size() == n_max || llama_vocab_is_eog(vocab, id_last)) {
                break; // nothing follows the end
            }
            id_last = adapter.choose(guesses, id_last);
            s.drafted.push_back(id_last);
        }
    }
    s.pos         = pos;
    s.n_masks     = std::min(n_max, n_draft_max);
    s.row         = -1;
    s.pos_guessed = -1;
    *drafted      = s.drafted.data();
    return (int32_t) s.drafted.size();
}

// ---- the batch

int32_t spac_mask_drafter::process(llama_batch_ext * batch) {
    llama_batch_ext wide(*batch);
    n_in_batch = 0;
    for (int32_t i = 0; i < (int32_t) slots.size(); i++) {
        if (slots[i].n_masks > 0 && !add_masks(i, wide)) {
            slots[i].n_masks = 0;
        }
    }
    n_in_batch = (int32_t) (wide.tokens.size() - batch->tokens.size());
    count_first(n_in_batch > 0 ? (int32_t) batch->tokens.size() : 0);
    if (n_in_batch == 0) {
        return llama_process(ctx, LLAMA_PROCESS_TYPE_DECODE, batch);
    }
    llama_set_lora_gate(ctx, group(0, 0));
    int32_t status = llama_process(ctx, LLAMA_PROCESS_TYPE_DECODE, &wide);
    llama_set_lora_gate(ctx, -1);
    leave();
    if (status == 1) { // no cells for so many: as it was asked for
        for (server_slot & s : slots) {
            s.n_masks = 0;
            s.row     = -1;
        }
        status = process(batch);
    }
    return status;
}

// whether there are anchors of the slot, and room for masks behind them
bool spac_mask_drafter::add_masks(int32_t slot, llama_batch_ext & batch) {
    server_slot &        s         = slots[slot];
    const int32_t        n_anchors = 1 + (int32_t) s.drafted.size();
    std::vector<int32_t> anchors;
    for (int32_t i = 0; i < (int32_t) batch.tokens.size(); i++) {
        const auto & t = batch.tokens[i];
        if (t.seq_ids.count(slot) && t.output && t.pos[0] >= s.pos && t.pos[0] < s.pos + n_anchors) {
            anchors.push_back(i);
        }
    }
    const size_t room = max_batch - std::min(max_batch, batch.tokens.size());
    s.n_masks         = std::min(s.n_masks, (int32_t) room / n_anchors);
    if ((int32_t) anchors.size() != n_anchors || s.n_masks == 0) {
        return false; // a prompt fills the batch, or the batch was cut
    }
    join(slot, n_anchors);
    s.row = (int32_t) batch.tokens.size();
    for (int32_t j = 0; j < n_anchors; j++) {
        for (int32_t i = 0; i <= j; i++) {
            llama_batch_ext_add_seq(&batch, anchors[i], group(slot, j));
        }
        for (int32_t k = 0; k < s.n_masks; k++) {
            const llama_pos pos[GGML_MROPE_SECTIONS] = { s.pos + j + k + 1 };
            const int32_t   i                        = llama_batch_ext_add_token(&batch, group(slot, j), adapter.mask_ids[k]);
            llama_batch_ext_set_pos(&batch, i, pos);
            llama_batch_ext_set_output_logits(&batch, i, true);
        }
    }
    return true;
}

// have the groups share what the sequence has got since they last did: only notes in the cache
void spac_mask_drafter::join(int32_t slot, int32_t n_groups) {
    server_slot & s = slots[slot];
    for (int32_t j = 0; j < n_groups; j++) {
        llama_memory_seq_cp(llama_get_memory(ctx), slot, group(slot, j), s.shared[j], s.pos);
        s.shared[j] = s.pos;
    }
}

// forget the masks, and who saw which anchor
void spac_mask_drafter::leave() {
    for (int32_t i = 0; i < (int32_t) slots.size(); i++) {
        for (int32_t j = 0; slots[i].row >= 0 && slots[i].n_masks > 0 && j <= (int32_t) slots[i].drafted.size(); j++) {
            llama_memory_seq_rm(llama_get_memory(ctx), group(i, j), slots[i].pos, -1);
        }
    }
}

// ---- after it

int32_t spac_mask_drafter::end_step(int32_t slot, int32_t n_accepted) {
    server_slot & s       = slots.at(slot);
    const int32_t n_masks = s.row >= 0 ? s.n_masks : 0;
    s.guesses.clear();
    for (int32_t k = 0; k < n_masks; k++) {
        const float * logits = llama_get_logits_ith(ctx, s.row + n_accepted * n_masks + k);
        s.guesses.push_back(adapter.top(logits, llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)))));
    }
    s.pos_guessed = n_masks > 0 ? s.pos + n_accepted + 1 : -1;
    s.row         = -1;
    s.n_masks     = 0;
    return n_masks * (1 + (int32_t) s.drafted.size());
}

void spac_mask_drafter::forget(int32_t slot) {
    server_slot & s = slots.at(slot);
    for (int32_t j = 0; j <= n_draft_max; j++) {
        if (s.shared[j] > 0) {
            llama_memory_seq_rm(llama_get_memory(ctx), group(slot, j), -1, -1);
            s.shared[j] = 0;
        }
    }
    s.pos = s.pos_guessed = s.row = -1;
    s.n_masks                     = 0;
    s.drafted.clear();
}
