// Masks behind the tokens of a server's batch: two slots of the demo's model, with its adapter. Run under ASan too.
#include "base/status.h"
#include "check.h"
#include "draft/mask-drafter.h"

#include "llama.h"

#include <algorithm>
#include <string>

static constexpr int32_t N_SLOTS = 2, N_DRAFT = 2, N_GROUPS = 1 + N_DRAFT;

static llama_context * make_context(llama_model * model, llama_adapter_lora * adapter, uint32_t n_ctx) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx                = n_ctx;
    params.n_seq_max            = N_SLOTS * (2 + N_DRAFT);
    params.kv_unified           = true;
    params.n_threads = params.n_threads_batch = 1; // two that spin are slow on a busy machine
    llama_context * ctx                       = llama_init_from_model(model, params);
    CHECK(ctx);
    float scale = 1;
    CHECK(llama_set_adapters_lora(ctx, &adapter, 1, &scale) == 0);
    return ctx;
}

struct slot {
    llama_token last      = 11; // the next one to be computed
    llama_pos   pos       = 0;
    int32_t     n_drafted = 0, n_accepted = 0, n_masks = 0; // in all steps
};

struct server {
    llama_context *   ctx;
    spac_mask_drafter drafter;
    llama_batch_ext * batch;
    slot              slots[N_SLOTS];
    int32_t           n_counted = 0;

    server(llama_context * ctx, int32_t max_batch) :
        ctx(ctx), drafter(ctx, SPAC_DEMO_MTP, N_DRAFT, max_batch), batch(llama_batch_ext_init(ctx)) {
        drafter.count_first = [this](int32_t n) { n_counted = n; };
        slots[1].last       = 300;
    }

    ~server() {
        llama_batch_ext_free(batch);
        llama_free(ctx);
    }

    llama_token best(int32_t row) const {
        const float * logits = llama_get_logits_ith(ctx, row);
        return (llama_token) (std::max_element(logits, logits + llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)))) - logits);
    }

    int32_t add(llama_seq_id seq, llama_token token, llama_pos pos) {
        const int32_t i = llama_batch_ext_add_token(batch, seq, token);
        CHECK(llama_batch_ext_set_pos(batch, i, &pos) && llama_batch_ext_set_output_logits(batch, i, true));
        return i;
    }

    // all slots at once, as many drafts as n_max; returns what process() does
    int32_t step(int32_t n_max) {
        int32_t                  first[N_SLOTS];
        std::vector<llama_token> drafts[N_SLOTS];
        llama_batch_ext_clear(batch);
        for (int32_t i = 0; i < N_SLOTS; i++) {
            const llama_token * drafted = nullptr;
            const int32_t       n       = n_max > 0 ? drafter.draft(i, slots[i].last, slots[i].pos, n_max, &drafted) : 0;
            CHECK(n <= n_max);
            drafts[i].assign(drafted, drafted + n);
            first[i] = add(i, slots[i].last, slots[i].pos);
            for (int32_t k = 0; k < n; k++) {
                add(i, drafts[i][k], slots[i].pos + 1 + k);
            }
        }
        const int32_t status = drafter.process(batch);
        for (int32_t i = 0; i < N_SLOTS && status == 0; i++) {
            finish(i, first[i], drafts[i]);
        }
        return status;
    }

    void finish(int32_t i, int32_t row, const std::vector<llama_token> & drafts) {
        slot &  s          = slots[i];
        int32_t n_accepted = 0;
        while (n_accepted < (int32_t) drafts.size() && best(row + n_accepted) == drafts[n_accepted]) {
            n_accepted++;
        }
        s.last = best(row + n_accepted);
        s.n_masks += drafter.end_step(i, n_accepted);
        s.n_drafted += (int32_t) drafts.size();
        s.n_accepted += n_accepted;
        s.pos += 1 + n_accepted;
        CHECK(llama_memory_seq_rm(llama_get_memory(ctx), i, s.pos, -1));
        for (int32_t j = 0; j < N_GROUPS; j++) {
            CHECK(group_end(i, j) < s.pos - n_accepted); // neither masks nor anchors are left
        }
    }

    llama_pos group_end(int32_t i, int32_t j) const { return llama_memory_seq_pos_max(llama_get_memory(ctx), N_SLOTS + i * N_GROUPS + j); }
};

static void test_two_slots(llama_model * model, llama_adapter_lora * adapter) {
    server s(make_context(model, adapter, 512), 64);
    CHECK(s.step(N_DRAFT) == 0);
    CHECK(s.slots[0].n_drafted == 0 && s.slots[0].n_masks == N_DRAFT && s.n_counted == N_SLOTS); // nothing was drafted before
    for (int i = 0; i < 40; i++) {
        CHECK(s.step(i % 10 == 9 ? 0 : 1 + i % N_DRAFT) == 0);
        CHECK((s.n_counted == 0) == (i % 10 == 9) && (s.drafter.n_masks_in_batch() == 0) == (i % 10 == 9));
    }
    for (const slot & one : s.slots) {
        CHECK(one.n_drafted > 30 && one.n_accepted > 5);
    }
    s.drafter.forget(0); // and the other's groups stay
    CHECK(s.group_end(0, 0) == -1 && s.group_end(0, 1) == -1 && s.group_end(1, 0) > 0);
    CHECK(llama_memory_seq_rm(llama_get_memory(s.ctx), 0, -1, -1));
    s.slots[0] = slot();
    for (int i = 0; i < 10; i++) {
        CHECK(s.step(N_DRAFT) == 0);
    }
    CHECK(s.slots[0].n_drafted > 10);
}

// 9 tokens for each slot that drafts as much as it can
static void test_a_narrow_batch_has_fewer_masks(llama_model * model, llama_adapter_lora * adapter) {
    server s(make_context(model, adapter, 512), 12);
    for (int i = 0; i < 20; i++) {
        CHECK(s.step(N_DRAFT) == 0);
        CHECK(s.drafter.n_masks_in_batch() <= 10);
    }
    CHECK(s.slots[0].n_drafted > 10 && s.slots[1].n_masks < s.slots[0].n_masks);
}

// what does not fit with masks is computed without
static void test_a_full_cache(llama_model * model, llama_adapter_lora * adapter) {
    server   s(make_context(model, adapter, 256), 64);
    uint32_t n_cells = 0;
    while (s.step(N_DRAFT) == 0) {
        n_cells = s.slots[0].pos + s.slots[1].pos;
    }
    CHECK(n_cells > 256 - 2 * N_GROUPS && s.drafter.n_masks_in_batch() == 0);
}

static void test_mistakes(llama_model * model, llama_adapter_lora * adapter) {
    llama_context * ctx        = make_context(model, adapter, 256);
    const auto      is_refused = [&](const char * path, int32_t n_draft_max) {
        return spac_guard([&] { spac_mask_drafter(ctx, path, n_draft_max, 64); }) == SPAC_STATUS_INVALID_ARGUMENT;
    };
    CHECK(is_refused("/nowhere", 2) && is_refused(SPAC_DEMO_MODEL, 2));
    CHECK(is_refused(SPAC_DEMO_MTP, 0) && is_refused(SPAC_DEMO_MTP, 5)); // it has four masks
    llama_free(ctx);
}

int main() {
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_model_params params = llama_model_default_params();
    params.n_gpu_layers       = 0;
    llama_model * model       = llama_model_load_from_file(SPAC_DEMO_MODEL, params);
    CHECK(model);
    llama_adapter_lora * adapter = llama_adapter_lora_init(model, SPAC_DEMO_MTP);
    CHECK(adapter);
    test_two_slots(model, adapter);
    test_a_narrow_batch_has_fewer_masks(model, adapter);
    test_a_full_cache(model, adapter);
    test_mistakes(model, adapter);
    llama_model_free(model);
    return 0;
}
