#include "activations.h"

spac_activations::spac_activations(int32_t n_expert_max) :
    index_of(n_expert_max, -1) {}

void spac_activations::count(const ggml_tensor * ids, int64_t n_expert, uint32_t * totals, int64_t n_tokens_counted) {
    for (int32_t ie : experts) {
        index_of[ie] = -1;
    }
    experts.clear();
    n_rows.clear();
    n_counted = 0;
    for (int64_t it = 0; it < ids->ne[1]; it++) {
        for (int64_t iu = 0; iu < ids->ne[0]; iu++) {
            const int32_t ie = spac_id_at(ids, iu, it);
            if (ie < 0 || ie >= n_expert) {
                continue;
            }
            if (index_of[ie] < 0) {
                index_of[ie] = (int32_t) experts.size();
                experts.push_back(ie);
                n_rows.push_back(0);
            }
            n_rows[index_of[ie]]++;
            totals[ie] += it < n_tokens_counted;
        }
        if (it < n_tokens_counted) {
            n_counted = experts.size();
        }
    }
}
