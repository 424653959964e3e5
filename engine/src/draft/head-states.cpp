#include "head-states.h"

#include <string>

// whether it reads a row of states for each token, in their order, and nothing else of the target
static bool is_known_head(const llama_model * model) {
    char arch[32] = "";
    llama_model_meta_val_str(model, "general.architecture", arch, sizeof(arch));
    return arch == std::string("eagle3") || (llama_model_target_layer_ids_n(model) == 0 && llama_model_n_layer_nextn(model) > 0);
}

const spac_target_states * spac_head_states::states_of(const llama_context * head) {
    const llama_model * model = llama_get_model(head);
    if (!is_known) {
        is_known = true;
        states   = is_known_head(model) ? std::make_unique<spac_target_states>(target, model) : nullptr;
    }
    return states.get();
}

bool spac_head_states::keep(const llama_context * head, int32_t slot, llama_pos pos, int32_t row) {
    if (!head) {
        return true;
    }
    if (!states_of(head)) {
        return false;
    }
    kept & k = slots[slot];
    if (pos < k.first || pos > end_of(k)) { // another text
        k = { pos, {} };
    }
    k.rows.resize((pos - k.first) * states->row_size());
    if ((k.rows.size() + states->row_size()) * sizeof(float) > bytes_max) {
        return false;
    }
    if (row >= 0) {
        states->save(row, 1, k.rows);
    }
    return true;
}

int32_t spac_head_states::give(const llama_context * head, int32_t slot, llama_pos * pos, llama_pos end) {
    if (!head) {
        return std::min<llama_pos>(end - *pos, llama_n_batch(target));
    }
    if (!states_of(head)) {
        return 0;
    }
    kept &          k     = slots[slot];
    const llama_pos first = std::max(*pos, k.first);
    const int32_t   n     = std::min<llama_pos>(std::min(end, end_of(k)) - first, llama_n_batch(target)); // the head's is as large
    if (n <= 0) {
        k = {};
        return 0;
    }
    states->restore(n, k.rows.data() + (first - k.first) * states->row_size());
    k.rows.erase(k.rows.begin(), k.rows.begin() + (first + n - k.first) * states->row_size());
    k.first = first + n;
    *pos    = first;
    return n;
}
