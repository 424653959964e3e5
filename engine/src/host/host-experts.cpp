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
        n_hidden_left[ix].n.store((int32_t) n_hidden_tasks + 1, std::memory_order_relaxed);
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
    hidden_rows    = spac_rows_per_task(n_ff, row_bytes, (int64_t) experts.size(), n_threads);
    n_hidden_tasks = (n_ff + hidden_rows - 1) / hidden_rows;
    out_rows       = spac_rows_per_task(layer->n_embd, layer->parts[SPAC_PART_DOWN]->nb[1], (int64_t) experts.size(), n_threads);
    n_out_tasks    = (layer->n_embd + out_rows - 1) / out_rows;

    n_input_tasks = n_tokens + (int64_t) groups.size();
    n_tasks       = n_input_tasks + experts.size() * (n_hidden_tasks + n_out_tasks);
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
    bool    is_used[SPAC_N_ACT_FORMS] = {};
    int64_t most_rows                 = 0;
    hidden_panel = out_panel = hidden_bytes = 0;
    for (const expert & e : experts) {
        for (int part = 0; part < SPAC_PART_UP_B; part++) {
            if (!layer->parts[part]) {
                continue;
            }
            const spac_panel *  panel = panel_for(part, e);
            const spac_act_form form  = form_for(part, e);
            size_t &            bytes = part == SPAC_PART_DOWN ? out_panel : hidden_panel;
            bytes                     = std::max(bytes, panel ? panel->bytes(layer->parts[part]->ne[0]) : 0);
            if (part == SPAC_PART_DOWN) {
                hidden_bytes = std::max(hidden_bytes, spac_act_bytes(form, n_ff));
            } else {
                is_used[form] = true;
            }
        }
        most_rows = std::max<int64_t>(most_rows, e.n_rows);
    }
    for (int form = 0; form < SPAC_N_ACT_FORMS; form++) {
        input_bytes[form] = is_used[form] ? spac_act_bytes((spac_act_form) form, layer->n_embd) : 0;
        inputs[form].reserve((is_by_expert(form) ? n_acts : n_tokens * n_inputs) * input_bytes[form]);
    }
    hidden.reserve(order.size() * n_ff * sizeof(float));
    hidden_act.reserve(n_acts * hidden_bytes);
    thread_bytes = std::max(spac_n_panels(2 * hidden_panel, most_rows) * 2 * hidden_panel, spac_n_panels(out_panel, most_rows) * out_panel);
    panels.reserve(n_threads * thread_bytes);

    if (n_counters < experts.size()) {
        n_counters = std::max((size_t) layer->n_expert, experts.size());
        n_hidden_left.reset(new counter[n_counters]);
    }
}

// ---- working, by all threads

bool spac_host_experts::work(const spac_host_input & in, float * rows) {
    const call c      = { in, rows, panels.data.get() + thread_bytes * next_panels.fetch_add(1, std::memory_order_relaxed) };
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
    const int64_t n_first  = n_there * (n_hidden_tasks + n_out_tasks);
    const bool    is_first = i < n_first;
    const int64_t ix       = is_first ? 0 : n_there; // of the part's first
    const int64_t n        = is_first ? n_there : (int64_t) experts.size() - n_there;
    const int64_t i_hidden = is_first ? i : i - n_first, i_out = i_hidden - n * n_hidden_tasks;
    if (i_out < 0) {
        compute_hidden(c, (int) (ix + i_hidden / n_hidden_tasks), i_hidden % n_hidden_tasks);
    } else {
        compute_out(c, (int) (ix + i_out / n_out_tasks), i_out % n_out_tasks);
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

// rows r0 .. r0 + n of an expert's matrix
spac_row_block spac_host_experts::take(int part, const expert & e, int64_t r0, int64_t n, char * memory) const {
    return { kernels, e.from->parts[part], weights(part, e), r0, n, panel_for(part, e), memory };
}

const char * spac_host_experts::weights(int part, const expert & e) const {
    if (in_slots.group) {
        return (const char *) in_slots.group->parts[part]->data + in_slots.slots[e.ie] * layer->part_bytes(part);
    }
    return tier && e.from == layer ? tier->weights(layer->il, e.ie, part) : e.from->part_data(part, e.ie);
}

spac_host_experts::factor spac_host_experts::up_of(const expert & e) const {
    if (layer->parts[SPAC_PART_GATE_UP]) { // gate first, then up
        return { SPAC_PART_GATE_UP, SPAC_PART_GATE_UP_B, n_ff, e.from->up_s };
    }
    return { SPAC_PART_UP, SPAC_PART_UP_B, 0, e.from->up_s };
}

std::optional<spac_host_experts::factor> spac_host_experts::gate_of(const expert & e) const {
    if (layer->parts[SPAC_PART_GATE_UP]) {
        return factor{ SPAC_PART_GATE_UP, SPAC_PART_GATE_UP_B, 0, e.from->up_s };
    }
    return layer->parts[SPAC_PART_GATE] ? std::optional(factor{ SPAC_PART_GATE, SPAC_PART_GATE_B, 0, e.from->gate_s }) : std::nullopt;
}

// scale, then bias, of n rows from r0 on: llama.cpp's order
void spac_host_experts::finish(const factor & f, int32_t ie, int64_t r0, int64_t n, float * y) const {
    if (f.scale) {
        const float s = ((const float *) f.scale->data)[ie];
        for (int64_t i = 0; i < n; i++) {
            y[i] *= s;
        }
    }
    if (layer->parts[f.bias]) {
        const float * b = (const float *) layer->part_data(f.bias, ie) + r0;
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

void spac_host_experts::compute_hidden(const call & c, int ix, int64_t i_task) {
    wait_for_zero(n_inputs_left);

    const expert e = experts[ix];
    if (tier && e.from == layer) {
        tier->wait(layer->il, e.ie); // where it fails the forward is aborted, whatever is computed here
    }
    const factor up        = up_of(e);
    const auto   gate      = gate_of(e);
    const bool   in_panels = panel_for(up.part, e) || (gate && panel_for(gate->part, e));
    const auto   take_both = [&](int64_t r, int64_t n, int64_t i) {
        char *       panels = c.panels + 2 * i * hidden_panel;
        hidden_block b      = { r, n, take(up.part, e, up.first + r, n, panels), std::nullopt };
        if (gate) {
            b.gate.emplace(take(gate->part, e, gate->first + r, n, panels + hidden_panel));
        }
        return b;
    };
    const int64_t r0 = i_task * hidden_rows, end = std::min(r0 + hidden_rows, n_ff);
    // the same parts for any number of threads: floats would be added in another order
    spac_for_each_group(r0, end, in_panels ? SPAC_PANEL_ROWS : hidden_rows, spac_n_panels(2 * hidden_panel, e.n_rows), e.n_rows, in_panels, take_both,
                        [&](hidden_block & b, int begin, int n_acts) { compute_hidden_block(e, b, begin, n_acts); });

    if (n_hidden_left[ix].n.fetch_sub(1, std::memory_order_acq_rel) == 2) { // the last task: all rows are there
        prepare_hidden(e);
        n_hidden_left[ix].n.store(0, std::memory_order_release);
    }
}

// gate, up and activation, for n_acts of the expert's tokens
void spac_host_experts::compute_hidden_block(const expert & e, hidden_block & b, int begin, int n_acts) {
    static_assert(SPAC_PANEL_TOKENS * SPAC_PANEL_ROWS <= SPAC_DOT_TOKENS * SPAC_TASK_ROWS_MAX, "room for either");
    const factor up   = up_of(e);
    const auto   gate = gate_of(e);
    float        gates[SPAC_DOT_TOKENS * SPAC_TASK_ROWS_MAX];
    const char * acts[SPAC_PANEL_TOKENS];
    float *      up_rows[SPAC_PANEL_TOKENS], *gate_rows[SPAC_PANEL_TOKENS];

    const auto multiply = [&](const factor & f, spac_row_block & rows, float * const * out) {
        const spac_act_form form = form_for(f.part, e);
        for (int t = 0; t < n_acts; t++) {
            acts[t] = input_act(form, e, begin + t);
        }
        rows.multiply(acts, n_acts, out);
    };
    for (int t = 0; t < n_acts; t++) {
        up_rows[t]   = (float *) hidden.data.get() + (e.first + begin + t) * n_ff + b.r0;
        gate_rows[t] = gates + t * b.n;
    }
    multiply(up, b.up, up_rows);
    if (gate) {
        multiply(*gate, *b.gate, gate_rows);
    }
    for (int t = 0; t < n_acts; t++) {
        finish(up, e.ie, up.first + b.r0, b.n, up_rows[t]);
        if (gate) {
            finish(*gate, e.ie, gate->first + b.r0, b.n, gate_rows[t]);
        }
        activate(gate ? gate_rows[t] : nullptr, up_rows[t], b.n);
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

void spac_host_experts::compute_out(const call & c, int ix, int64_t i_task) {
    wait_for_zero(n_hidden_left[ix].n);

    const expert        e         = experts[ix];
    const factor        down      = { SPAC_PART_DOWN, SPAC_PART_DOWN_B, 0, e.from->down_s };
    const bool          in_panels = panel_for(down.part, e);
    const spac_act_form form      = form_for(down.part, e);
    const auto          take_rows = [&](int64_t r, int64_t n, int64_t i) { return take(down.part, e, r, n, c.panels + i * out_panel); };
    const auto          multiply  = [&](spac_row_block & b, int begin, int n_acts) {
        const char * acts[SPAC_PANEL_TOKENS];
        float *      out[SPAC_PANEL_TOKENS];
        for (int t = 0; t < n_acts; t++) {
            acts[t] = spac_act_at(form, hidden_act.data.get() + e.first_act * hidden_bytes, hidden_bytes, begin + t);
            out[t]  = c.rows + order[e.first + begin + t] * layer->n_embd + b.r0;
        }
        b.multiply(acts, n_acts, out);
        for (int t = 0; t < n_acts; t++) {
            finish(down, e.ie, b.r0, b.n, out[t]);
        }
    };
    const int64_t r0 = i_task * out_rows, end = std::min(r0 + out_rows, layer->n_embd);
    spac_for_each_group(r0, end, in_panels ? SPAC_PANEL_ROWS : out_rows, spac_n_panels(out_panel, e.n_rows), e.n_rows, in_panels, take_rows, multiply);
}
