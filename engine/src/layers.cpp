#include "layers.h"

#include "status.h"

#include <algorithm>

void spac_layers::see(const llama_moe_hook_params & p, const std::string & arch) {
    if (p.il < 0) {
        return;
    }
    const auto it = by_il.find(p.il);
    if (it == by_il.end()) {
        by_il.emplace(p.il, spac_moe_layer_from_hook(p, arch));
    } else if (!spac_same_experts(it->second, p)) {
        it->second.declined = "two sets of experts in one layer";
    }
}

void spac_layers::check(int32_t n_layer_of_model) {
    std::map<std::string, int> reasons;
    for (const auto & [il, layer] : by_il) {
        n_layer       = std::max(n_layer, il + 1);
        n_expert      = std::max(n_expert, (int32_t) layer.n_expert);
        n_expert_used = std::max(n_expert_used, (int32_t) layer.n_expert_used);
        if (!layer.is_split()) {
            reasons[layer.declined]++;
        }
    }
    n_layer = std::max(n_layer, n_layer_of_model);

    if (by_il.empty()) {
        throw spac_dense_model();
    }
    std::string text;
    for (const auto & r : reasons) {
        text += spac_format("%s%s (%d layers)", text.empty() ? "" : "; ", r.first.c_str(), r.second);
    }
    const size_t n_split = split().size();
    if (n_split == 0) {
        text = "no MoE layer can be split: " + text;
        if (reasons.count(SPAC_DECLINED_CALLBACK)) {
            throw spac_stays_stock(text);
        }
        throw spac_error(SPAC_STATUS_NOTHING_TO_SPLIT, text);
    }
    if (!reasons.empty()) {
        spac_log("%zu MoE layers stay as they are: %s", by_il.size() - n_split, text.c_str());
    }
}

void spac_layers::form_groups() {
    std::map<std::string, int> by_key;
    for (spac_moe_layer * layer : split()) {
        const auto [it, is_new] = by_key.emplace(layer->layout_key(), (int) by_key.size());
        layer->group            = it->second;
        if (is_new) {
            group_like.push_back(layer);
        }
        total_bytes += layer->n_expert * layer->expert_bytes();
    }
}

std::vector<spac_moe_layer *> spac_layers::split() {
    std::vector<spac_moe_layer *> list;
    for (auto & entry : by_il) {
        if (entry.second.is_split()) {
            list.push_back(&entry.second);
        }
    }
    return list;
}

std::vector<const spac_moe_layer *> spac_layers::split() const {
    const std::vector<spac_moe_layer *> list = const_cast<spac_layers *>(this)->split();
    return { list.begin(), list.end() };
}

const char * spac_layers::declined_reason(int il) const {
    const auto it = by_il.find(il);
    return it == by_il.end() || it->second.is_split() ? nullptr : it->second.declined.c_str();
}
