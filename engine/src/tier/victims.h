// Who leaves the pool first: a tournament of its slots, of which the least useful has won. A slot that changes plays
// again, in O(log slots); whom it made the winner is known then. (Looking at all slots took 12 ms per token of 61 layers
// whose pool had 11,700.)
#pragma once

#include <cstdint>
#include <vector>

struct spac_victims {
    enum kind : uint8_t { FREE, // has no owner: goes first
                          HELD,
                          EXPECTED, // by a predictor: goes if there is nothing else
                          IN_USE }; // stays

    explicit spac_victims(int32_t n_slots) {
        while (n_leaves < n_slots) {
            n_leaves *= 2;
        }
        keys.resize(n_leaves); // those behind the last slot stay in use
        winners.resize(2 * n_leaves);
        for (int32_t is = 0; is < n_leaves; is++) {
            winners[n_leaves + is] = is;
        }
        for (int32_t node = n_leaves - 1; node > 0; node--) {
            winners[node] = winner_below(node);
        }
    }

    // rank: the lower, the sooner it leaves
    void set(int32_t is, kind k, double rank) {
        keys[is] = { k, rank };
        for (int32_t node = (n_leaves + is) / 2; node > 0; node /= 2) {
            const int32_t before = winners[node];
            winners[node]        = winner_below(node);
            if (before != is && winners[node] == before) {
                break; // whoever is above saw nothing of this
            }
        }
    }

    // of equals the one in the first slot
    int32_t first() const { return winners[1]; }

    kind kind_of(int32_t is) const { return keys[is].k; }

  private:
    struct key {
        kind   k    = IN_USE;
        double rank = 0.0;

        bool operator<(const key & other) const { return k != other.k ? k < other.k : rank < other.rank; }
    };

    int32_t winner_below(int32_t node) const {
        const int32_t left = winners[2 * node], right = winners[2 * node + 1];
        return keys[right] < keys[left] ? right : left;
    }

    int32_t              n_leaves = 1;
    std::vector<key>     keys;    // [n_leaves]
    std::vector<int32_t> winners; // [2 * n_leaves]: of the leaves below a node; 1 is the root, leaves come last
};
