#include "routing-trace.h"

#include "base/status.h"

#include "llama-batch.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <sstream>

static_assert(GGML_TYPE_F32 == 0 && GGML_TYPE_F16 == 1 && GGML_TYPE_I32 == 26, "raw_trace.py knows them by their numbers");

spac_trace_wants spac_trace_wants::read(const std::string & text) {
    spac_trace_wants   wants;
    std::istringstream names(text);
    for (std::string one; std::getline(names, one, ',');) {
        bool * const found = one == "logits" ? &wants.logits : one == "inputs"     ? &wants.inputs
                                                           : one == "draft-inputs" ? &wants.draft_inputs
                                                                                   : nullptr;
        if (!found) {
            throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_format("PYSPAC_TRACE_ADD \"%s\": give logits, inputs, draft-inputs, or several with commas", text.c_str()));
        }
        *found = true;
    }
    return wants;
}

spac_routing_trace::spac_routing_trace(std::shared_ptr<spac_trace_file> file, const spac_trace_wants & wants, std::unique_ptr<spac_mask_drafter> masks) :
    file(file),
    context(file->add_context()),
    records_choices(context == 0),
    records_logits(wants.logits && context == 0),
    records_inputs(context == 0 ? wants.inputs : wants.draft_inputs),
    records_routers((wants.inputs || wants.draft_inputs) && context == 0),
    masks(std::move(masks)) {}

void spac_routing_trace::attach(llama_context * ctx, const std::string & path, const spac_trace_wants & wants, std::unique_ptr<spac_mask_drafter> masks) {
    const auto           file  = spac_trace_file::open(path);
    spac_routing_trace * trace = new spac_routing_trace(file, wants, std::move(masks));
    const llama_moe_hook hook  = trace->make_hook();
    llama_set_moe_hook(ctx, &hook); // the context owns it now
}

llama_moe_hook spac_routing_trace::make_hook() {
    llama_moe_hook h = {};
    h.user_data      = this;
    h.free           = [](void * trace) { delete (spac_routing_trace *) trace; };
    h.build          = [](void * trace, const llama_moe_hook_params * p) -> ggml_tensor * {
        ((spac_routing_trace *) trace)->see_layer(*p);
        return nullptr;
    };
    h.n_threads = [](void * trace, ggml_cgraph * graph, const llama_ubatch * ubatch) { return ((spac_routing_trace *) trace)->begin(graph, ubatch); };
    if (masks) {
        h.draft = [](void * trace, int32_t slot, const llama_token *, int32_t, llama_token id_last, llama_pos pos, int32_t n_max, const llama_token ** drafted) {
            return ((spac_routing_trace *) trace)->masks->draft(slot, id_last, pos, n_max, drafted);
        };
        h.process     = [](void * trace, llama_batch_ext * batch) { return ((spac_routing_trace *) trace)->masks->process(batch); };
        h.forget      = [](void * trace, int32_t slot, bool) { ((spac_routing_trace *) trace)->masks->forget(slot); };
        h.record_step = [](void * trace, const llama_moe_hook_step * step) { ((spac_routing_trace *) trace)->masks->end_step(step->server_slot, step->n_accepted); };
    }
    return h;
}

// a draft's layer has one input: its router's, if it has a router
void spac_routing_trace::see_layer(const llama_moe_hook_params & p) {
    ggml_backend_sched_set_eval_callback(p.sched, on_node, this); // each graph that is built has had it taken away
    if (p.ids) {
        routed.insert(p.il);
    }
    for (auto it = dense_inputs.begin(); it != dense_inputs.end();) {
        it = it->second >= p.il ? dense_inputs.erase(it) : std::next(it); // of the last graph: layers are seen from first to last
    }
    if (records_inputs && context > 0 && routed.count(p.il) == 0) {
        dense_inputs[p.cur] = p.il;
    }
}

int32_t spac_routing_trace::begin(ggml_cgraph * graph, const llama_ubatch * ubatch) {
    forward.clear();
    last = nullptr;
    if (!ubatch || ggml_graph_n_nodes(graph) == 0) { // a shift of the cache
        return 0;
    }
    for (uint32_t i = 0; i < ubatch->n_tokens; i++) {
        forward.push_back(ubatch->token ? ubatch->token[i] : -1);
    }
    forward.insert(forward.end(), ubatch->pos, ubatch->pos + ubatch->n_tokens);
    for (uint32_t i = 0; i < ubatch->n_tokens; i++) {
        forward.push_back(*std::min_element(ubatch->seq_id[i], ubatch->seq_id[i] + ubatch->n_seq_id[i])); // of groups of masks, too
    }
    for (uint32_t i = 0; i < ubatch->n_tokens; i++) {
        forward.push_back(ubatch->output && ubatch->output[i]);
    }
    last = ggml_graph_node(graph, -1);
    return file->has_failed() ? -1 : 0;
}

// ---- while a graph runs

// scores of all experts are named by what was done to them last: a router without probabilities calls them so
bool spac_routing_trace::is_wanted(const ggml_tensor * node, std::string & what, int32_t & il) const {
    static const std::string PREFIX    = "ffn_moe_";
    static const std::string WEIGHTS[] = { "weights", "weights_softmax", "weights_norm", "weights_scaled" };
    static const std::string LOGITS[]  = { "logits", "logits_biased", "probs" };
    const char * const       dash      = strrchr(node->name, '-');
    char *                   end       = nullptr;
    const auto               dense     = dense_inputs.find(node);
    if (dense != dense_inputs.end()) {
        what = "input";
        il   = dense->second;
        return true;
    }
    if (!dash || strncmp(node->name, PREFIX.c_str(), PREFIX.size()) != 0) {
        return false;
    }
    il = (int32_t) strtol(dash + 1, &end, 10);
    if (end == dash + 1 || *end) {
        return false;
    }
    what                         = std::string(node->name + PREFIX.size(), dash);
    const auto * const w         = std::find(std::begin(WEIGHTS), std::end(WEIGHTS), what);
    const auto * const l         = std::find(std::begin(LOGITS), std::end(LOGITS), what);
    const bool         is_logits = l != std::end(LOGITS) && (node->op == GGML_OP_MUL_MAT || node->op == GGML_OP_ADD || what != "probs");
    if (what != "topk") {
        what = w != std::end(WEIGHTS) ? "weights" : is_logits ? "logits"
                                                              : "";
    }
    return what == "logits" ? records_logits || records_inputs || records_routers : records_choices && !what.empty();
}

bool spac_routing_trace::on_node(ggml_tensor * node, bool asks, void * user_data) {
    spac_routing_trace & trace = *(spac_routing_trace *) user_data;
    std::string          what;
    int32_t              il     = -1;
    const bool           wanted = trace.last && trace.is_wanted(node, what, il);
    if (asks) {
        return wanted || node == trace.last;
    }
    if (wanted) {
        trace.note(node, what, il);
    }
    if (node == trace.last && trace.forward.empty()) { // else it had no router
        trace.file->write(SPAC_TRACE_END, trace.context, {});
        trace.file->flush();
    }
    return true;
}

void spac_routing_trace::note(const ggml_tensor * node, const std::string & what, int32_t il) {
    if (!forward.empty()) {
        file->write(SPAC_TRACE_FORWARD, context, {
                                                     { forward.data(), forward.size() * sizeof(forward[0]) }
        });
        forward.clear();
    }
    if (what == "logits") {
        note_router(node, il);
    }
    if (what != "logits" || records_logits) {
        write(node, what.c_str(), il);
    }
}

// an adapter may add something else than a bias
void spac_routing_trace::note_router(const ggml_tensor * logits, int32_t il) {
    const ggml_tensor * const other = logits->src[1];
    if (logits->op == GGML_OP_MUL_MAT && records_inputs) {
        write(other, "input", il);
    }
    if (logits->op == GGML_OP_MUL_MAT && records_routers) {
        write_once(logits->src[0], "router", il);
    } else if (logits->op == GGML_OP_ADD && records_routers && ggml_nelements(other) == logits->ne[0] && ggml_nelements(other) == other->ne[0]) {
        write_once(other, "bias", il);
    }
}

void spac_routing_trace::write_once(const ggml_tensor * tensor, const char * what, int32_t il) {
    if (written.insert({ what, il }).second) {
        write(tensor, what, il);
    }
}

// rows may lie apart
void spac_routing_trace::write(const ggml_tensor * t, const char * what, int32_t il) {
    spac_trace_node node = {};
    snprintf(node.what, sizeof(node.what), "%s", what);
    node.il   = il;
    node.type = t->type;
    std::copy_n(t->ne, 4, node.ne);
    const size_t n_row = ggml_row_size(t->type, t->ne[0]);
    bytes.resize(n_row * ggml_nrows(t));
    if (ggml_is_contiguous(t)) {
        ggml_backend_tensor_get(t, bytes.data(), 0, bytes.size());
    } else {
        uint8_t * row = bytes.data();
        for (int64_t i = 0; i < ggml_nrows(t); i++, row += n_row) {
            const int64_t i1 = i % t->ne[1], i2 = i / t->ne[1] % t->ne[2], i3 = i / (t->ne[1] * t->ne[2]);
            ggml_backend_tensor_get(t, row, i1 * t->nb[1] + i2 * t->nb[2] + i3 * t->nb[3], n_row);
        }
    }
    file->write(SPAC_TRACE_NODE, context, {
                                              { &node,        sizeof(node) },
                                              { bytes.data(), bytes.size() }
    });
}
