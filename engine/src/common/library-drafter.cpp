// A drafter made of llama.cpp's common/speculative, for one sequence.
//
// llama.cpp's code throws in places and aborts the process in others. What throws is caught by libspac; what would
// abort is refused here beforehand.
#include "draft/drafter.h"

#include "common.h"
#include "draft/target-states.h"
#include "llama-ext.h"
#include "llama.h"
#include "log.h"
#include "speculative.h"

#include <algorithm>
#include <stdexcept>
#include <string>

// of states of deferred tokens; when they are more, the tokens are looked at after all, in one batch
static constexpr size_t DEFERRED_BYTES_MAX = 32 << 20;

// ngram-cache looks as many tokens back without asking whether there are as many
static constexpr int32_t N_CACHE_MIN = 4;

using types_t = std::vector<common_speculative_type>;

static bool has(const types_t & types, common_speculative_type type) {
    return std::find(types.begin(), types.end(), type) != types.end();
}

static bool is_ngram(common_speculative_type type) {
    return type >= COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE && type <= COMMON_SPECULATIVE_TYPE_NGRAM_CACHE;
}

static types_t read_types(const char * text) {
    types_t types = common_speculative_types_from_names(string_split<std::string>(text, ','));
    for (auto type : types) {
        if (type == COMMON_SPECULATIVE_TYPE_NONE || type == COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH || type == COMMON_SPECULATIVE_TYPE_DRAFT_DSPARK) {
            throw std::invalid_argument(common_speculative_type_to_str(type) + " is no drafter that can be opened here");
        }
    }
    return types;
}

// what llama.cpp asserts of eagle3 and mtp, with a sentence each
static void check_contexts(const types_t & types, llama_context * target, llama_context * draft) {
    if (std::all_of(types.begin(), types.end(), is_ngram)) {
        return;
    }
    if (!target || !draft) {
        throw std::invalid_argument("a drafter with a model needs the contexts of both models");
    }
    if (llama_n_seq_max(draft) != 1) {
        throw std::invalid_argument("the draft model's context has to have one sequence");
    }
    const llama_model * model_target = llama_get_model(target);
    const llama_model * model_draft  = llama_get_model(draft);
    if (has(types, COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3)) {
        const uint32_t  n_ids = llama_model_target_layer_ids_n(model_draft);
        const int32_t * ids   = llama_model_target_layer_ids(model_draft);
        if (n_ids != 3 || std::any_of(ids, ids + n_ids, [&](int32_t il) { return il < 0 || il > llama_model_n_layer(model_target); })) {
            throw std::invalid_argument("draft-eagle3: the draft model is no EAGLE-3 draft of this target");
        }
    }
    if (has(types, COMMON_SPECULATIVE_TYPE_DRAFT_MTP)) {
        if (llama_model_n_layer_nextn(model_draft) < 1 || llama_model_n_embd_out(model_draft) != llama_model_n_embd_out(model_target)) {
            throw std::invalid_argument("draft-mtp: the model has no head that predicts further tokens of this target");
        }
    }
}

// as much is looked up as can be drafted; what has to match is llama.cpp's default
static common_params_speculative make_params(const spac_drafter_params & p) {
    common_params_speculative params;
    params.types         = read_types(p.types);
    params.draft.n_max   = p.n_max;
    params.draft.p_min   = p.p_min;
    params.draft.ctx_tgt = p.target;
    params.draft.ctx_dft = p.draft;
    // on the CPU: samplers in the draft's context would have to outlive it
    params.draft.backend_sampling = false;
    params.ngram_simple.size_n    = std::min<uint16_t>(params.ngram_simple.size_n, p.n_max); // it drafts as many or nothing
    params.ngram_simple.size_m    = p.n_max;
    params.ngram_map_k.size_m     = p.n_max;
    params.ngram_map_k4v.size_m   = p.n_max;
    params.ngram_mod.n_max        = p.n_max;
    params.ngram_mod.n_min        = std::min(params.ngram_mod.n_min, p.n_max);
    return params;
}

static bool reads_states(const types_t & types) {
    return has(types, COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3) || has(types, COMMON_SPECULATIVE_TYPE_DRAFT_MTP);
}

struct library_drafter : spac_drafter {
    library_drafter(const spac_drafter_params & p) :
        params(make_params(p)) {
        target    = p.target;
        draft_ctx = std::all_of(params.types.begin(), params.types.end(), is_ngram) ? nullptr : p.draft;
        check_contexts(params.types, p.target, p.draft);
        open();
        if (draft_ctx) {
            batch = common_batch(draft_ctx);
            if (reads_states(params.types)) {
                states = spac_target_states(target, llama_get_model(draft_ctx));
            }
            n_piece_max = (int32_t) std::min(llama_n_batch(target), llama_n_batch(draft_ctx));
        }
    }

    int32_t begin(int32_t n_keep) override {
        const int32_t n = std::min(n_keep, length());
        if (n < length() && learns_one_text()) {
            open(); // their begin() leaves positions of the old text, which may lie outside the new one
        }
        if (!rewind(n)) {
            llama_memory_clear(llama_get_memory(draft_ctx), true);
            sequence.clear();
            n_read = n_held = 0;
            deferred.clear();
            rows.clear();
        }
        is_begun = false;
        return length();
    }

    void process(const int32_t * tokens, int32_t n_tokens, int32_t pos) override {
        rewind_or_throw(pos);
        const bool is_next = draft_ctx && n_read == pos && n_tokens > 0;
        if (is_next && pos + n_tokens <= (int32_t) llama_n_ctx(draft_ctx)) {
            read(tokens, n_tokens, pos);
        } else if (n_deferred() > 0) {
            defer(tokens, n_tokens, pos);
            catch_up();
            return;
        }
        sequence.insert(sequence.end(), tokens, tokens + n_tokens);
    }

    void defer(const int32_t * tokens, int32_t n_tokens, int32_t pos) override {
        rewind_or_throw(pos);
        const bool is_next = draft_ctx && n_read + n_deferred() == pos;
        if (is_next && pos + n_tokens <= (int32_t) llama_n_ctx(draft_ctx)) {
            states.save(0, n_tokens, rows);
            deferred.insert(deferred.end(), tokens, tokens + n_tokens);
        }
        sequence.insert(sequence.end(), tokens, tokens + n_tokens);
        if (rows.size() * sizeof(float) > DEFERRED_BYTES_MAX) {
            catch_up();
        }
    }

    std::vector<int32_t> draft(int32_t token, int32_t pos, int32_t n_max) override {
        rewind_or_throw(pos);
        llama_tokens found;
        catch_up();
        n_max = std::min(n_max, params.draft.n_max);
        if (draft_ctx) { // the token itself and all but the last of the draft go through it
            n_max = n_read == pos ? std::min(n_max, (int32_t) llama_n_ctx(draft_ctx) - pos) : 0;
        }
        if (n_max <= 0 || (pos < N_CACHE_MIN && has(params.types, COMMON_SPECULATIVE_TYPE_NGRAM_CACHE))) {
            return found;
        }
        begin_text(pos);
        common_speculative_draft_params & p = common_speculative_get_draft_params(spec.get(), 0);

        p.drafting = true;
        p.n_max    = n_max;
        p.pos0     = pos;
        p.id_last  = token;
        p.prompt   = &sequence;
        p.result   = &found;
        n_held     = draft_ctx ? pos + n_max : 0;
        common_speculative_draft(spec.get());
        p.result = nullptr;
        n_looked = pos;

        if (target) { // a draft model may have a few tokens more
            const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(target)));
            found.erase(std::find_if(found.begin(), found.end(), [&](llama_token id) { return id >= n_vocab; }), found.end());
        }
        return found;
    }

    void accept(int32_t n_accepted) override { common_speculative_accept(spec.get(), 0, n_accepted); }

    int32_t length() const override { return (int32_t) sequence.size(); }

  private:
    void open() {
        spec.reset(common_speculative_init(params, 1));
        if (!spec) {
            throw std::runtime_error("llama.cpp did not make the drafter");
        }
        n_looked = 0;
        is_begun = false;
    }

    // of which the state belongs to one text; ngram-mod's is meant to outlive it, the others have none
    bool learns_one_text() const {
        return has(params.types, COMMON_SPECULATIVE_TYPE_NGRAM_MAP_K) || has(params.types, COMMON_SPECULATIVE_TYPE_NGRAM_MAP_K4V) ||
               has(params.types, COMMON_SPECULATIVE_TYPE_NGRAM_CACHE);
    }

    // told at the first draft of a text, and again where a draft lies before the last one: llama.cpp aborts there
    void begin_text(int32_t pos) {
        if (pos < n_looked && learns_one_text()) {
            open();
        }
        if (!is_begun) {
            common_speculative_begin(spec.get(), 0, sequence);
            is_begun = true;
        }
    }

    bool rewind(int32_t pos) {
        sequence.resize(pos);
        n_read = std::min(n_read, pos);
        deferred.resize(std::min(n_deferred(), pos - n_read));
        rows.resize(deferred.size() * states.row_size());
        // a draft leaves its tokens in the draft's context, whatever becomes of them
        if (n_held > n_read) {
            n_held = n_read;
            return llama_memory_seq_rm(llama_get_memory(draft_ctx), 0, n_read, -1);
        }
        return true;
    }

    void rewind_or_throw(int32_t pos) {
        if (!rewind(pos)) {
            throw std::runtime_error("the draft model cannot take back tokens: use one without recurrent layers");
        }
    }

    int32_t n_deferred() const { return (int32_t) deferred.size(); }

    // all that was deferred, in as few batches as there may be
    void catch_up() {
        for (int32_t i = 0; i < n_deferred();) {
            const int32_t n = std::min(n_piece_max, n_deferred() - i);
            states.restore(n, rows.data() + i * states.row_size());
            read(deferred.data() + i, n, n_read);
            i += n;
        }
        deferred.clear();
        rows.clear();
    }

    void read(const int32_t * tokens, int32_t n_tokens, int32_t pos) {
        if (n_tokens > (int32_t) llama_n_batch(draft_ctx)) {
            throw std::invalid_argument(string_format("a batch of %d tokens does not fit the draft model's, of %d at most", n_tokens, llama_n_batch(draft_ctx)));
        }
        batch.clear();
        for (int32_t i = 0; i < n_tokens; i++) {
            batch.add(tokens[i], pos + i, 0, true);
        }
        n_held = pos + n_tokens;
        if (!common_speculative_process(spec.get(), batch)) {
            throw std::runtime_error(string_format("the draft model failed to compute %d tokens at position %d", n_tokens, pos));
        }
        n_read = pos + n_tokens;
    }

    common_params_speculative params;
    llama_context *           target    = nullptr;
    llama_context *           draft_ctx = nullptr;
    common_speculative_ptr    spec;
    common_batch              batch; // as the target's last one
    llama_tokens              sequence;
    spac_target_states        states;
    llama_tokens              deferred; // behind the first n_read tokens
    std::vector<float>        rows;     // their states
    int32_t                   n_piece_max = 0;
    int32_t                   n_read      = 0; // tokens of it that the draft's context has
    int32_t                   n_held      = 0; // tokens that this context may have, with those of drafts
    int32_t                   n_looked    = 0; // position of the last draft
    bool                      is_begun    = false;
};

extern "C" __attribute__((visibility("default"))) spac_drafter * spac_drafter_make(const spac_drafter_params * params) {
    common_log_set_verbosity_thold(LOG_LEVEL_ERROR - 1); // errors come back as text
    return new library_drafter(*params);
}

extern "C" __attribute__((visibility("default"))) const char * spac_drafter_type_names() {
    return common_speculative_all_types_str();
}
