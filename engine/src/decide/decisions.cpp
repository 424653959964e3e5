#include "decisions.h"

#include "base/clock.h"
#include "base/status.h"

#include <algorithm>

// Forwards may go on for this long without a new decision before the scheduler counts as gone. It decides with nearly
// every step; when it died, a supervisor brings it back in a second or two, and old decisions are better than none meanwhile.
static constexpr uint64_t DECISION_LIFE_US = 10'000'000;
// of the time between two forwards, as much as may have been decoding; the rest was waiting for a request
static constexpr uint64_t FORWARD_MAX_US = 1'000'000;

spac_decisions::spac_decisions(spac_board & board, const spac_device_caches & cache, spac_memory_tier * tier, std::unique_ptr<spac_default_policy> policy) :
    board(board), cache(cache), tier(tier), policy(std::move(policy)) {}

// nothing that is read here is trusted: the board may be written by another process
void spac_decisions::take_over() {
    std::lock_guard<std::mutex> lock(mutex);
    if (!board.read_decision(decision_seen, decision)) {
        return;
    }
    decision_seen = decision.seq;
    is_scheduled  = true;
    undecided_us  = 0;
    if (is_abandoned.exchange(false)) {
        spac_log("the scheduler decides again");
    }
    if (!cache.empty()) {
        cache.apply(decision.utility.data(), decision.tau.data(), decision.load.data(), decision.load.size(), decision.byte_budget);
        if (want_whole) {
            want_whole(decision.want_whole.data());
        }
        board.counters()->n_decisions++;
    } else if (tier) {
        read_ahead();
    }
}

// loads of one layer after the other, most wanted first
void spac_decisions::read_ahead() {
    const uint32_t       n_expert = board.geometry().n_expert;
    std::vector<int32_t> experts;
    for (size_t i = 0; i < decision.load.size(); i++) {
        const uint32_t il = decision.load[i] / n_expert, ie = decision.load[i] % n_expert;
        if (tier->has(il, ie)) {
            experts.push_back((int32_t) ie);
        }
        const bool is_last = i + 1 == decision.load.size() || decision.load[i + 1] / n_expert != il;
        if (is_last && !experts.empty()) {
            tier->expect((int) il, experts);
            experts.clear();
        }
    }
}

void spac_decisions::begin_forward() {
    const uint64_t now = spac_now_us();
    undecided_us += std::min(now - t_last_forward, FORWARD_MAX_US);
    t_last_forward = now;

    take_over();
    looks_ahead = board.is_shared() && board.is_asked_ahead();
    if (is_overdue()) {
        is_abandoned = true;
        spac_log("no decision for %.0f s of decoding: the scheduler is gone or hangs; until it is back %sdrafts have no limit",
                 DECISION_LIFE_US / 1e6, policy ? "the engine's own policy decides, and " : "");
    }
    if (policy && (!is_scheduled || is_abandoned)) {
        run_policy();
    }
}

void spac_decisions::begin_layer() {
    if (looks_ahead) {
        take_over();
    }
}

bool spac_decisions::is_overdue() const {
    return board.is_shared() && is_scheduled && !is_abandoned && undecided_us > DECISION_LIFE_US;
}

void spac_decisions::run_policy() {
    policy->update(board.counts(), board.residency());
    std::lock_guard<std::mutex> lock(mutex); // the worker may take a decision over
    cache.apply(policy->utility.data(), policy->tau.data(), policy->load.data(), policy->load.size(), {});
    board.counters()->n_decisions++;
}

int32_t spac_decisions::n_draft_max(int32_t server_slot, int32_t n_matched) const {
    return is_abandoned ? -1 : board.draft_limit(server_slot, n_matched);
}
