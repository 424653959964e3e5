#include "layers.h"

#include "base/engine-params.h"
#include "base/status.h"

#include "llama-model.h"
#include "llama.h"

#include <algorithm>

static std::string read_arch(const llama_model * model) {
    char arch[64] = "";
    llama_model_meta_val_str(model, "general.architecture", arch, sizeof(arch));
    return arch;
}

static bool has_weights_on_host_alone(const llama_model * model) {
    const auto & weights = llama_internal_get_tensor_map(model);
    return std::all_of(weights.begin(), weights.end(), [](const auto & named) {
        const ggml_backend_buffer_t buffer = named.second->buffer;
        const ggml_backend_dev_t    device = buffer ? ggml_backend_buft_get_device(ggml_backend_buffer_get_type(buffer)) : nullptr;
        return !device || spac_device_is_cpu(device) || ggml_backend_buffer_is_host(buffer); // repacked, or pinned by a GPU
    });
}

spac_layers::spac_layers(spac_context_hook & hook) :
    is_on_host(has_weights_on_host_alone(llama_get_model(hook.ctx))),
    n_layer(llama_model_n_layer(llama_get_model(hook.ctx))), model(llama_get_model(hook.ctx)), arch(read_arch(model)) {
    llama_moe_hook h = {};
    h.user_data      = this;
    h.build          = [](void * layers, const llama_moe_hook_params * p) -> ggml_tensor * {
        ((spac_layers *) layers)->see(*p);
        return nullptr;
    };
    hook.set(h);
}

void spac_layers::see(const llama_moe_hook_params & p) {
    if (!p.ids) { // a dense FFN
        return;
    }
    if (devices.empty()) {
        for (int i = 0; i < ggml_backend_sched_get_n_backends(p.sched); i++) {
            devices.push_back(ggml_backend_get_device(ggml_backend_sched_get_backend(p.sched, i)));
        }
    }
    if (p.il < 0) {
        return;
    }
    const auto it = by_il.find(p.il);
    if (it == by_il.end()) {
        add(spac_moe_layer_from_hook(p, arch));
    } else if (!spac_same_experts(it->second, p)) {
        it->second.declined = "two sets of experts in one layer";
    }
}

void spac_layers::add(const spac_moe_layer & layer) {
    n_layer       = std::max(n_layer, layer.il + 1);
    n_expert      = std::max(n_expert, (int32_t) layer.n_expert);
    n_expert_used = std::max(n_expert_used, (int32_t) layer.n_expert_used);
    by_il.emplace(layer.il, layer);
}

void spac_layers::check(bool must_split) const {
    if (by_il.empty()) {
        return;
    }
    std::map<std::string, int> reasons;
    for (const auto & [il, layer] : by_il) {
        if (!layer.is_split()) {
            reasons[layer.declined]++;
        }
    }
    std::string text;
    for (const auto & [reason, n] : reasons) {
        text += spac_format("%s%s (%d layers)", text.empty() ? "" : "; ", reason.c_str(), n);
    }
    const size_t n_split = split().size();
    if (n_split == 0) {
        text = "no MoE layer can be split: " + text;
        if (reasons.count(SPAC_DECLINED_CALLBACK)) {
            throw spac_stays_stock(text);
        }
        if (must_split) {
            throw spac_error(SPAC_STATUS_NOTHING_TO_SPLIT, text);
        }
        spac_log("%s: llama.cpp's kernels compute their experts", text.c_str());
    } else if (!reasons.empty()) {
        spac_log("%zu MoE layers stay as they are: %s", by_il.size() - n_split, text.c_str());
    }
}

std::vector<bool> spac_layers::assign(const std::vector<ggml_backend_dev_t> & to) {
    std::vector<bool> has_layer(to.size());
    for (auto & [il, layer] : by_il) {
        const auto it = to.size() == 1 ? to.begin() : std::find(to.begin(), to.end(), model->dev_layer(il));
        layer.device  = it == to.end() ? 0 : (int) (it - to.begin());
        if (layer.is_split()) {
            has_layer[layer.device] = true;
        }
    }
    return has_layer;
}

void spac_layers::form_groups(bool per_layer) {
    std::map<std::string, int> by_key;
    for (auto & [il, layer] : by_il) {
        if (!layer.is_split()) {
            continue;
        }
        const auto [it, is_new] = by_key.emplace(spac_format("%d: %d: ", layer.device, per_layer ? il : 0) + layer.layout_key(), (int) by_key.size());
        layer.group             = it->second;
        if (is_new) {
            group_like.push_back(&layer);
        }
        total_bytes += layer.n_expert * layer.expert_bytes();
    }
}

std::vector<const spac_moe_layer *> spac_layers::split() const {
    std::vector<const spac_moe_layer *> list;
    for (const auto & [il, layer] : by_il) {
        if (layer.is_split()) {
            list.push_back(&layer);
        }
    }
    return list;
}

bool spac_layers::any_split() const {
    return std::any_of(by_il.begin(), by_il.end(), [](const auto & layer) { return layer.second.is_split(); });
}

const char * spac_layers::declined_reason(int il) const {
    const auto it = by_il.find(il);
    return it == by_il.end() || it->second.is_split() ? nullptr : it->second.declined.c_str();
}
