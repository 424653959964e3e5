// Prompts that outlive llama-server (patches/hooks/0009): PYSPAC_KEEP names the folder, PYSPAC_KEEP_MIB says how much it may hold, and
// PYSPAC_KEEP_KEY whose states fit: 64 characters that stand for the model and the settings.
#include "base/job-thread.h"
#include "base/status.h"
#include "prompt-folder.h"

#include "llama-prompt-store.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <iterator>

static constexpr int N_WAITING_MAX = 2; // states in memory: one being written, and one more

struct spac_prompt_store : llama_prompt_store {
    spac_prompt_store(const char * path, const char * key, size_t max_bytes) :
        folder(path, key, max_bytes) {}

    ~spac_prompt_store() override { writer.wait_idle(); }

    bool has_room(bool waits) override {
        if (waits) {
            writer.wait_idle();
        }
        return n_waiting < N_WAITING_MAX;
    }

    void save(const contexts & ctxs, llama_seq_id id, const tokens & prompt, parts && more) override {
        log_failure("a prompt is not kept", spac_guard([&] { submit(ctxs, id, prompt, std::move(more)); }));
    }

    tokens find(const tokens & prompt, size_t n_min, size_t n_max, parts & state) override {
        tokens            found;
        const spac_status status = spac_guard([&] { found = folder.load(prompt.data(), prompt.size(), n_min, n_max, state); });
        return log_failure("a kept prompt is not used", status) ? tokens() : found;
    }

    bool restore(const contexts & ctxs, llama_seq_id id, parts & state) override {
        for (size_t i = 0; i < ctxs.size(); i++) {
            const std::vector<uint8_t> & data = state.at(i);
            if (ctxs[i] && llama_state_seq_set_data_ext(ctxs[i], data.data(), data.size(), id, LLAMA_STATE_SEQ_FLAGS_NONE) != data.size()) {
                spac_log("the context has no room for a kept prompt, which is computed");
                return false;
            }
        }
        state.erase(state.begin(), state.begin() + ctxs.size());
        return true;
    }

  private:
    void submit(const contexts & ctxs, llama_seq_id id, const tokens & prompt, parts && more) {
        if (llama_memory_seq_pos_max(llama_get_memory(ctxs[0]), id) + 1 != (llama_pos) prompt.size()) {
            throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_format("its %zu tokens have not all been computed", prompt.size()));
        }
        const auto     state = std::make_shared<parts>();
        spac_kept_head head;
        head.tokens = prompt;
        for (llama_context * ctx : ctxs) {
            state->push_back(state_of(ctx, id));
        }
        std::move(more.begin(), more.end(), std::back_inserter(*state));
        for (const std::vector<uint8_t> & part : *state) {
            head.sizes.push_back(part.size());
        }
        n_waiting++;
        writer.submit([this, state, head]() mutable {
            log_failure("a prompt is not kept", spac_guard([&] { folder.save(std::move(head), *state); }));
            n_waiting--;
        });
    }

    std::vector<uint8_t> state_of(llama_context * ctx, llama_seq_id id) const {
        const size_t n_bytes = ctx ? llama_state_seq_get_size_ext(ctx, id, LLAMA_STATE_SEQ_FLAGS_NONE) : 0;
        if (n_bytes > folder.max_bytes) {
            throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_format("its state takes %zu MiB", n_bytes >> 20));
        }
        std::vector<uint8_t> data(n_bytes);
        if (ctx) {
            data.resize(llama_state_seq_get_data_ext(ctx, data.data(), data.size(), id, LLAMA_STATE_SEQ_FLAGS_NONE));
        }
        return data;
    }

    static bool log_failure(const char * what, spac_status status) {
        if (status != SPAC_STATUS_SUCCESS) {
            spac_log("%s: %s", what, spac_last_error());
        }
        return status != SPAC_STATUS_SUCCESS;
    }

    spac_prompt_folder folder;
    std::atomic<int>   n_waiting{ 0 };
    spac_job_thread    writer; // the last: it uses the others
};

// NULL: it cannot be used, and the log says why
extern "C" SPAC_API llama_prompt_store * spac_open_prompt_store() {
    llama_prompt_store * store  = nullptr;
    const spac_status    status = spac_guard([&] {
        const char *path = getenv("PYSPAC_KEEP"), *mib = getenv("PYSPAC_KEEP_MIB"), *key = getenv("PYSPAC_KEEP_KEY");
        char *      end = nullptr;
        const long  n   = strtol(mib ? mib : "", &end, 10);
        if (!path || !mib || !key || *end || n < 1 || n > 1 << 30 || std::string(key).size() != SPAC_KEY_CHARS) {
            throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, "PYSPAC_KEEP, PYSPAC_KEEP_MIB and PYSPAC_KEEP_KEY go together: a folder, a number from 1 on, 64 characters");
        }
        store = new spac_prompt_store(path, key, (size_t) n << 20);
    });
    if (status != SPAC_STATUS_SUCCESS) {
        spac_log("%s", spac_last_error());
    }
    return store;
}
