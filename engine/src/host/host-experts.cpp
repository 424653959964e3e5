#include "host-experts.h"

#include "llama-graph.h" // llm_ffn_op_type

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <new>
#include <thread>

// gpt-oss
static constexpr float OAI_ALPHA = 1.702f, OAI_LIMIT = 7.0f;

void spac_host_experts::free_aligned::operator()(void * p) const {
    free(p);
}

void spac_host_experts::arena::reserve(size_t n) {
    if (n <= bytes) {
        return;
    }
    n = (n + n / 4 + 63) & ~(size_t) 63; // widths come one by one
    data.reset();
    data.reset((char *) aligned_alloc(64, n));
    if (!data) {
        throw std::bad_alloc();
    }
    bytes = n;
}

static void relax(int & n_spins) {
    if (++n_spins % 1024 == 0) {
        std::this_thread::yield(); // more threads than cores: the one we wait for may not be running
    }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

template <typename T>
static void wait_for_zero(const std::atomic<T> & n) {
    for (int n_spins = 0; n.load(std::memory_order_acquire) != 0;) {
        relax(n_spins);
    }
}

// ---- what can be computed

static bool is_plain_f32(const ggml_tensor * t) {
    return !t || (t->type == GGML_TYPE_F32 && t->nb[0] == sizeof(float));
}

bool spac_host_experts::can_compute(const spac_kernels & kernels, const spac_moe_layer & layer, bool with_ggml) {
    const auto has_dot = [&](ggml_type type) { return with_ggml ? spac_has_dot(kernels, type) : kernels.dot(type) != nullptr; };
    for (int part = 0; part < SPAC_N_PARTS; part++) {
        const ggml_tensor * t  = layer.parts[part];
        const bool          ok = !t || (part >= SPAC_PART_UP_B ? is_plain_f32(t) : has_dot(t->type));
        if (!ok) {
            return false;
        }
    }
    return is_plain_f32(layer.up_s) && is_plain_f32(layer.gate_s) && is_plain_f32(layer.down_s);
}

spac_host_experts::spac_host_experts(const spac_kernels & kernels, spac_memory_tier * tier) :
    kernels(kernels), tier(tier) {}

// ---- planning, by one thread

void spac_host_experts::plan(const spac_moe_layer & layer, const int32_t * ids, int64_t n_tokens, int n_threads, const spac_device_slots & from) {
    this->layer    = &layer;
    in_slots       = from;
    this->n_tokens = n_tokens;
    n_inputs       = layer.weight_before_ffn ? layer.n_expert_used : 1;
    n_ff           = layer.parts[SPAC_PART_DOWN]->ne[0];
    group_by_expert(ids);
    ask_for_experts();
    place_acts();
    divide(n_threads);
    make_room(n_threads);

    for (size_t ix = 0; ix < experts.size(); ix++) {
        n_hidden_left[ix].n.store((int32_t) hidden_blocks + 1, std::memory_order_relaxed);
    }
    n_inputs_left.store(n_input_tasks, std::memory_order_relaxed);
    next_panels.store(0, std::memory_order_relaxed);
    next.store(0, std::memory_order_release);
}

// counting sort of the rows by expert; O(rows + n_expert)
void spac_host_experts::group_by_expert(const int32_t * ids) {
    const int64_t n     = layer->n_expert_used * n_tokens;
    size_t        n_ids = 0;
    for (const spac_moe_layer * from = layer; from; from = from->copy) {
        n_ids += layer->n_expert;
    }
    n_per_expert.assign(n_ids, 0);
    for (int64_t i = 0; i < n; i++) {
        if (ids[i] >= 0) {
            n_per_expert[ids[i]]++;
        }
    }
    experts.clear();
    int32_t   first    = 0;
    int32_t * next_row = n_per_expert.data();
    for (const spac_moe_layer * from = layer; from; from = from->copy) {
        for (int64_t ie = 0; ie < layer->n_expert; ie++, next_row++) {
            if (*next_row > 0) {
                experts.push_back({ (int32_t) ie, first, *next_row, from });
                *next_row = first; // from here on: where its next row goes
                first += experts.back().n_rows;
            }
        }
    }
    order.resize(first);
    for (int64_t i = 0; i < n; i++) {
        if (ids[i] >= 0) {
            order[n_per_expert[ids[i]]++] = (int32_t) i;
        }
    }
}

// those that are there come first, so that the others are read meanwhile; copies are, and lie behind the layer's own
void spac_host_experts::ask_for_experts() {
    n_there = (int64_t) experts.size();
    if (!tier) {
        return;
    }
    std::vector<int32_t> ies, n_rows;
    size_t               n_own = 0;
    for (const expert & e : experts) {
        ies.push_back(e.ie);
        n_rows.push_back(e.n_rows);
        n_own += e.from == layer;
    }
    const auto there = std::make_unique<bool[]>(experts.size());
    std::fill_n(there.get(), experts.size(), true);
    tier->request(*layer, ies.data(), n_rows.data(), n_own, n_tokens, there.get());
    tier->want(*layer, ies.data() + n_own, n_rows.data() + n_own, experts.size() - n_own, n_tokens);

    std::vector<expert> ordered;
    for (const bool wanted : { true, false }) {
        for (size_t i = 0; i < experts.size(); i++) {
            if (there[i] == wanted) {
                ordered.push_back(experts[i]);
            }
        }
        n_there = wanted ? (int64_t) ordered.size() : n_there;
    }
    experts = std::move(ordered);
}

void spac_host_experts::divide(int n_threads) {
    size_t row_bytes = 0;
    for (int part : { SPAC_PART_UP, SPAC_PART_GATE, SPAC_PART_GATE_UP }) {
        const ggml_tensor * t = layer->parts[part];
        row_bytes += t ? t->nb[1] * (part == SPAC_PART_GATE_UP ? 2 : 1) : 0;
    }
    hidden_rows   = spac_rows_per_task(n_ff, row_bytes, (int64_t) experts.size(), n_threads);
    hidden_blocks = (n_ff + hidden_rows - 1) / hidden_rows;
    out_rows      = spac_rows_per_task(layer->n_embd, layer->parts[SPAC_PART_DOWN]->nb[1], (int64_t) experts.size(), n_threads);
    out_blocks    = (layer->n_embd + out_rows - 1) / out_rows;

    n_input_tasks = n_tokens + (int64_t) groups.size();
    n_tasks       = n_input_tasks + experts.size() * (hidden_blocks + out_blocks);
}

// whether a form's activations lie interleaved, in the order of the experts' rows, some of them several times
static bool is_by_expert(int form) {
    return spac_act_group((spac_act_form) form) > 1;
}

void spac_host_experts::place_acts() {
    groups.clear();
    n_acts = 0;
    for (size_t ix = 0; ix < experts.size(); ix++) {
        expert & e          = experts[ix];
        bool     has_groups = false; // of inputs
        for (int part : { SPAC_PART_UP, SPAC_PART_GATE, SPAC_PART_GATE_UP }) {
            has_groups |= layer->parts[part] && is_by_expert(form_for(part, e));
        }
        for (int32_t begin = 0; has_groups && begin < e.n_rows; begin += SPAC_ACT_GROUP) {
            groups.push_back({ (int32_t) ix, begin });
        }
        e.first_act = (int32_t) n_acts;
        n_acts += GGML_PAD(e.n_rows, has_groups || is_by_expert(form_for(SPAC_PART_DOWN, e)) ? SPAC_ACT_GROUP : 1);
    }
}

void spac_host_experts::make_room(int n_threads) {
    bool is_used[SPAC_N_ACT_FORMS] = {};
    panel_bytes = hidden_bytes = 0;
    for (int part = 0; part < SPAC_PART_UP_B; part++) {
        for (size_t ix = 0; layer->parts[part] && ix < experts.size(); ix++) {
            const spac_panel *  panel = panel_for(part, experts[ix]);
            const spac_act_form form  = form_for(part, experts[ix]);
            panel_bytes               = std::max(panel_bytes, panel ? GGML_PAD(panel->bytes(layer->parts[part]->ne[0]), 64) : 0);
            if (part == SPAC_PART_DOWN) {
                hidden_bytes = std::max(hidden_bytes, spac_act_bytes(form, n_ff));
            } else {
                is_used[form] = true;
            }
        }
    }
    for (int form = 0; form < SPAC_N_ACT_FORMS; form++) {
        input_bytes[form] = is_used[form] ? spac_act_bytes((spac_act_form) form, layer->n_embd) : 0;
        inputs[form].reserve((is_by_expert(form) ? n_acts : n_tokens * n_inputs) * input_bytes[form]);
    }
    hidden.reserve(order.size() * n_ff * sizeof(float));
    hidden_act.reserve(n_acts * hidden_bytes);
    n_panels = std::max<int64_t>(2, spac_panels_bytes() / std::max<size_t>(1, panel_bytes));
    panels.reserve(n_threads * n_panels * panel_bytes);

    if (n_counters < experts.size()) {
        n_counters = std::max((size_t) layer->n_expert, experts.size());
        n_hidden_left.reset(new counter[n_counters]);
    }
}

// ---- working, by all threads

bool spac_host_experts::work(const spac_host_input & in, float * rows) {
    const call c      = { in, rows, panels.data.get() + n_panels * panel_bytes * next_panels.fetch_add(1, std::memory_order_relaxed) };
    bool       worked = false;
    for (int64_t i = next.fetch_add(1, std::memory_order_acq_rel); i < n_tasks; i = next.fetch_add(1, std::memory_order_acq_rel)) {
        if (i < n_input_tasks) {
            prepare_input(c, i);
        } else {
            compute(c, i - n_input_tasks);
        }
        worked = true;
    }
    return worked;
}

// first all of the experts that are there, then all of the others
void spac_host_experts::compute(const call & c, int64_t i) {
    const int64_t n_first  = n_there * (hidden_blocks + out_blocks);
    const bool    is_first = i < n_first;
    const int64_t ix       = is_first ? 0 : n_there; // of the part's first
    const int64_t n        = is_first ? n_there : (int64_t) experts.size() - n_there;
    const int64_t i_hidden = is_first ? i : i - n_first, i_out = i_hidden - n * hidden_blocks;
    if (i_out < 0) {
        compute_hidden(c, (int) (ix + i_hidden / hidden_blocks), i_hidden % hidden_blocks);
    } else {
        compute_rows(c, (int) (ix + i_out / out_blocks), i_out % out_blocks);
    }
}

void spac_host_experts::prepare_input(const call & c, int64_t i) {
    if (i < n_tokens) {
        prepare_token(c, i);
    } else {
        prepare_group(c, groups[i - n_tokens]);
    }
    n_inputs_left.fetch_sub(1, std::memory_order_acq_rel);
}

static const float * input_of(const spac_host_input & in, int64_t it, int64_t iu) {
    return (const float *) (in.data + iu * in.nb_used + it * in.nb_token);
}

void spac_host_experts::prepare_token(const call & c, int64_t it) {
    for (int form = 0; form < SPAC_N_ACT_FORMS; form++) {
        for (int64_t iu = 0; input_bytes[form] && !is_by_expert(form) && iu < n_inputs; iu++) {
            const float * x = input_of(c.in, it, iu);
            spac_prepare_acts(kernels, (spac_act_form) form, &x, 1, layer->n_embd, inputs[form].data.get() + (it * n_inputs + iu) * input_bytes[form]);
        }
    }
}

void spac_host_experts::prepare_group(const call & c, const act_group & group) {
    const expert & e = experts[group.ix];
    const int      n = std::min(e.n_rows - group.begin, SPAC_ACT_GROUP);
    const float *  x[SPAC_ACT_GROUP];
    for (int t = 0; t < n; t++) {
        const int64_t row = order[e.first + group.begin + t];
        x[t]              = input_of(c.in, row / layer->n_expert_used, n_inputs == 1 ? 0 : row % layer->n_expert_used);
    }
    for (int form = 0; form < SPAC_N_ACT_FORMS; form++) {
        if (input_bytes[form] && is_by_expert(form)) {
            spac_prepare_acts(kernels, (spac_act_form) form, x, n, layer->n_embd, inputs[form].data.get() + (e.first_act + group.begin) * input_bytes[form]);
        }
    }
}

// of the expert's i-th row
const char * spac_host_experts::input_act(spac_act_form form, const expert & e, int64_t i) const {
    if (is_by_expert(form)) {
        return spac_act_at(form, inputs[form].data.get() + e.first_act * input_bytes[form], input_bytes[form], i);
    }
    const int64_t row = order[e.first + i];
    return inputs[form].data.get() + (n_inputs == 1 ? row / layer->n_expert_used : row) * input_bytes[form];
}

const spac_panel * spac_host_experts::panel_for(int part, const expert & e) const {
    return spac_panel_for(kernels, e.from->parts[part]->type, e.n_rows);
}

spac_act_form spac_host_experts::form_for(int part, const expert & e) const {
    const spac_panel * panel = panel_for(part, e);
    return panel ? panel->form : spac_act_form_of(kernels, e.from->parts[part]->type);
}

bool spac_host_experts::has_panel(std::initializer_list<int> parts, const expert & e) const {
    return std::any_of(parts.begin(), parts.end(), [&](int part) { return layer->parts[part] && panel_for(part, e); });
}

// of one thread at a time: several, if the expert's tokens come in several parts, whose activations are read again for each group
int64_t spac_host_experts::n_panels_of(const expert & e) const {
    return e.n_rows > SPAC_PANEL_TOKENS ? n_panels : 2;
}

// rows r0 .. r0 + n of an expert's matrix
spac_row_block spac_host_experts::take(int part, const expert & e, int64_t r0, int64_t n, char * memory) const {
    const ggml_tensor * w = e.from->parts[part];
    return { kernels, w, weights(part, e) + r0 * w->nb[1], n, panel_for(part, e), memory };
}

const char * spac_host_experts::weights(int part, const expert & e) const {
    if (in_slots.group) {
        return (const char *) in_slots.group->parts[part]->data + in_slots.slots[e.ie] * layer->part_bytes(part);
    }
    return tier && e.from == layer ? tier->weights(layer->il, e.ie, part) : e.from->part_data(part, e.ie);
}

// scale, then bias: llama.cpp's order
void spac_host_experts::finish(int bias, const ggml_tensor * scale, int32_t ie, int64_t r0, int64_t n, float * y) const {
    if (scale) {
        const float s = ((const float *) scale->data)[ie];
        for (int64_t i = 0; i < n; i++) {
            y[i] *= s;
        }
    }
    if (layer->parts[bias]) {
        const float * b = (const float *) layer->part_data(bias, ie) + r0;
        for (int64_t i = 0; i < n; i++) {
            y[i] += b[i];
        }
    }
}

static float gelu(float x) {
    return 0.5f * x * (1.0f + tanhf(0.79788456080286535588f * x * (1.0f + 0.044715f * x * x)));
}

static void clamp(float * x, int64_t n, float low, float high) {
    std::transform(x, x + n, x, [=](float v) { return std::max(low, std::min(v, high)); });
}

// clamped SwiGLU has two forms, see spac_moe_layer
void spac_host_experts::swiglu(float * gate, float * up, int64_t n) const {
    const float limit = layer->clamp;
    if (limit == 0) {
        kernels.swish(gate, n, 1.0f);
        return;
    }
    if (layer->clamps_in_one_op) {
        clamp(gate, n, -INFINITY, limit);
        kernels.swish(gate, n, 1.0f);
    } else {
        kernels.swish(gate, n, 1.0f);
        clamp(gate, n, -INFINITY, limit);
    }
    clamp(up, n, -limit, limit);
}

// the activation of gate (of up, where there is no gate) into up
void spac_host_experts::activate(float * gate, float * up, int64_t n) const {
    float * x = gate ? gate : up;
    switch (layer->op) {
        case LLM_FFN_SILU:
            swiglu(x, up, n);
            break;
        case LLM_FFN_GELU:
            std::transform(x, x + n, x, gelu);
            break;
        case LLM_FFN_RELU:
            std::transform(x, x + n, x, [](float v) { return v > 0 ? v : 0; });
            break;
        case LLM_FFN_RELU_SQR:
            std::transform(x, x + n, x, [](float v) { return v > 0 ? v * v : 0; });
            break;
        default: // LLM_FFN_SWIGLU_OAI_MOE
            clamp(x, n, -INFINITY, OAI_LIMIT);
            kernels.swish(x, n, OAI_ALPHA);
            clamp(up, n, -OAI_LIMIT, OAI_LIMIT);
            std::transform(up, up + n, up, [](float v) { return 1.0f + v; });
    }
    if (gate) {
        for (int64_t i = 0; i < n; i++) {
            up[i] *= gate[i];
        }
    }
}

void spac_host_experts::compute_hidden(const call & c, int ix, int64_t block) {
    wait_for_zero(n_inputs_left);

    const expert e = experts[ix];
    if (tier && e.from == layer) {
        tier->wait(layer->il, e.ie); // where it fails the forward is aborted, whatever is computed here
    }
    const int64_t r0 = block * hidden_rows, end = std::min(r0 + hidden_rows, n_ff);
    const bool    in_panels = has_panel({ SPAC_PART_UP, SPAC_PART_GATE, SPAC_PART_GATE_UP }, e);
    const int64_t n_rows    = in_panels ? SPAC_PANEL_ROWS : hidden_rows;
    const auto    p         = parts_of_hidden();
    for (int64_t r = r0; r < end;) {
        std::vector<hidden_block> blocks;
        for (int64_t i = 0; r < end && i < n_panels_of(e) / 2; i++, r += n_rows) {
            const int64_t n      = std::min(n_rows, end - r);
            char *        panels = c.panels + 2 * i * panel_bytes;
            blocks.push_back({ r, n, take(p.up, e, p.up_0 + r, n, panels), take(p.gate, e, r, n, panels + panel_bytes) });
        }
        // not by n, which follows the number of threads: floats would be added in another order
        spac_for_each_part(e.n_rows, in_panels, [&](int begin, int n_acts) {
            for (hidden_block & b : blocks) {
                compute_hidden_block(e, b, begin, n_acts);
            }
        });
    }
    if (n_hidden_left[ix].n.fetch_sub(1, std::memory_order_acq_rel) == 2) { // the last block: all rows are there
        prepare_hidden(e);
        n_hidden_left[ix].n.store(0, std::memory_order_release);
    }
}

spac_host_experts::hidden_parts spac_host_experts::parts_of_hidden() const {
    if (layer->parts[SPAC_PART_GATE_UP]) { // gate first, then up
        return { SPAC_PART_GATE_UP, SPAC_PART_GATE_UP, SPAC_PART_GATE_UP_B, SPAC_PART_GATE_UP_B, n_ff, true, true };
    }
    const bool has_gate = layer->parts[SPAC_PART_GATE];
    return { SPAC_PART_UP, has_gate ? SPAC_PART_GATE : SPAC_PART_UP, SPAC_PART_UP_B, SPAC_PART_GATE_B, 0, has_gate, false };
}

// gate, up and activation, for the expert's tokens from `begin` on
void spac_host_experts::compute_hidden_block(const expert & e, hidden_block & b, int begin, int n_acts) {
    static_assert(SPAC_PANEL_TOKENS * SPAC_PANEL_ROWS <= SPAC_DOT_TOKENS * SPAC_TASK_ROWS_MAX, "room for either");
    const hidden_parts  p       = parts_of_hidden();
    const spac_act_form form_up = form_for(p.up, e), form_gate = form_for(p.gate, e);
    float               gates[SPAC_DOT_TOKENS * SPAC_TASK_ROWS_MAX];
    const char *        acts[SPAC_PANEL_TOKENS], *gate_acts[SPAC_PANEL_TOKENS];
    float *             up[SPAC_PANEL_TOKENS], *gate[SPAC_PANEL_TOKENS];
    for (int t = 0; t < n_acts; t++) {
        acts[t]      = input_act(form_up, e, begin + t);
        gate_acts[t] = input_act(form_gate, e, begin + t);
        up[t]        = (float *) hidden.data.get() + (e.first + begin + t) * n_ff + b.r0;
        gate[t]      = gates + t * b.n;
    }
    b.up.multiply(acts, n_acts, up);
    if (p.has_gate) {
        b.gate.multiply(gate_acts, n_acts, gate);
    }
    for (int t = 0; t < n_acts; t++) {
        finish(p.up_bias, e.from->up_s, e.ie, p.up_0 + b.r0, b.n, up[t]);
        if (p.has_gate) {
            finish(p.gate_bias, p.is_fused ? e.from->up_s : e.from->gate_s, e.ie, b.r0, b.n, gate[t]);
        }
        activate(p.has_gate ? gate[t] : nullptr, up[t], b.n);
    }
}

void spac_host_experts::prepare_hidden(const expert & e) {
    const spac_act_form form = form_for(SPAC_PART_DOWN, e);
    const int           n    = spac_act_group(form);
    for (int32_t begin = 0; begin < e.n_rows; begin += n) {
        const float * x[SPAC_ACT_GROUP];
        const int     n_here = std::min(e.n_rows - begin, n);
        for (int t = 0; t < n_here; t++) {
            x[t] = (const float *) hidden.data.get() + (e.first + begin + t) * n_ff;
        }
        spac_prepare_acts(kernels, form, x, n_here, n_ff, hidden_act.data.get() + (e.first_act + begin) * hidden_bytes);
    }
}

void spac_host_experts::compute_rows(const call & c, int ix, int64_t block) {
    wait_for_zero(n_hidden_left[ix].n);

    const expert  e  = experts[ix];
    const int64_t r0 = block * out_rows, end = std::min(r0 + out_rows, layer->n_embd);
    const bool    has_panel = panel_for(SPAC_PART_DOWN, e);
    const int64_t n_rows    = has_panel ? SPAC_PANEL_ROWS : out_rows;
    for (int64_t r = r0; r < end;) {
        std::vector<out_block> blocks;
        for (int64_t i = 0; r < end && i < n_panels_of(e); i++, r += n_rows) {
            const int64_t n = std::min(n_rows, end - r);
            blocks.push_back({ r, n, take(SPAC_PART_DOWN, e, r, n, c.panels + i * panel_bytes) });
        }
        spac_for_each_part(e.n_rows, has_panel, [&](int begin, int n_acts) {
            for (out_block & b : blocks) {
                compute_out_block(c, e, b, begin, n_acts);
            }
        });
    }
}

void spac_host_experts::compute_out_block(const call & c, const expert & e, out_block & b, int begin, int n_acts) {
    const spac_act_form form = form_for(SPAC_PART_DOWN, e);
    const char *        acts[SPAC_PANEL_TOKENS];
    float *             out[SPAC_PANEL_TOKENS];
    for (int t = 0; t < n_acts; t++) {
        acts[t] = spac_act_at(form, hidden_act.data.get() + e.first_act * hidden_bytes, hidden_bytes, begin + t);
        out[t]  = c.rows + order[e.first + begin + t] * layer->n_embd + b.r0;
    }
    b.rows.multiply(acts, n_acts, out);
    for (int t = 0; t < n_acts; t++) {
        finish(SPAC_PART_DOWN_B, e.from->down_s, e.ie, b.r0, b.n, out[t]);
    }
}
