// Prompts that outlive llama-server (patches/hooks/0009): PYSPAC_KEEP names the folder, PYSPAC_KEEP_MIB says how much it may hold, and
// PYSPAC_KEEP_KEY whose states fit: 64 characters that stand for the model and the settings.
#include "base/job-thread.h"
#include "base/status.h"
#include "prompt-folder.h"

#include "llama-prompt-store.h"

#include <atomic>
#include <cstdlib>

static constexpr int N_WAITING_MAX = 2; // states in memory: one being written, and one more

struct spac_prompt_store : llama_prompt_store {
    spac_prompt_store(const char * path, const char * key, size_t max_bytes) :
        folder(path, key, max_bytes) {
        this->max_bytes = max_bytes;
    }

    ~spac_prompt_store() override { writer.wait_idle(); }

    bool has_room(bool waits) override {
        if (waits) {
            writer.wait_idle();
        }
        return n_waiting < N_WAITING_MAX;
    }

    void save(const llama_token * tokens, size_t n_tokens, parts && state) override {
        spac_kept_head head;
        head.tokens.assign(tokens, tokens + n_tokens);
        for (const auto & part : state) {
            head.sizes.push_back(part.size());
        }
        const auto held = std::make_shared<parts>(std::move(state));
        n_waiting++;
        writer.submit([this, held, head]() mutable {
            const spac_status status = spac_guard([&] { folder.save(std::move(head), *held); });
            if (status != SPAC_STATUS_SUCCESS) {
                spac_log("a prompt is not kept: %s", spac_last_error());
            }
            n_waiting--;
        });
    }

    std::vector<llama_token> load(const llama_token * tokens, size_t n_tokens, size_t n_min, size_t n_max, parts & state) override {
        std::vector<llama_token> found;
        const spac_status        status = spac_guard([&] { found = folder.load(tokens, n_tokens, n_min, n_max, state); });
        if (status != SPAC_STATUS_SUCCESS) {
            spac_log("a kept prompt is not used: %s", spac_last_error());
        }
        return status == SPAC_STATUS_SUCCESS ? found : std::vector<llama_token>();
    }

  private:
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
