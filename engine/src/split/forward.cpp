#include "forward.h"

#include "base/clock.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

spac_forward::spac_forward(spac_board & board, const spac_device_caches & cache, spac_decisions & decisions, spac_host_work & host,
                           spac_memory_tier * tier, spac_timeline & timeline, spac_routing_log & log, spac_lossy & lossy,
                           std::vector<spac_demand_loads *> demand, bool fills, int il_to_publish, const spac_device_clock & clock) :
    board(board), cache(cache), decisions(decisions), host(host), tier(tier), timeline(timeline), log(log), lossy(lossy), routing(lossy.strength()), clock(clock), demand(std::move(demand)),
    fills(fills), il_to_publish(il_to_publish), times(board.geometry().n_layer), activations(board.geometry().n_expert) {}

// ---- from the first layer's dispatch to the end

void spac_forward::end() {
    log.end(); // a prompt's rows, too
    if (in_progress) {
        close();
    }
    cache.unpin_all();
}

void spac_forward::close() {
    spac_counters & c = *board.counters();
    c.n_forward++;
    c.n_forward_both += any_device && any_host;
    if (tier) {
        tier->show(board);
    }
    any_device = any_host = false;
    in_progress           = false;
    last_il               = -1;
    host.rest();
    board.publish();
}

// the last layer of the forward before stays pinned: no one waited for the device yet
void spac_forward::begin() {
    if (in_progress) {
        close();
    }
    in_progress   = true;
    last_dispatch = 0;
    cache.begin_forward();
    decisions.begin_forward();
}

void spac_forward::name_sequences(std::vector<int32_t> of_tokens, std::vector<int32_t> of_outputs) {
    sequence_of_token  = std::move(of_tokens);
    sequence_of_output = std::move(of_outputs);
}

void spac_forward::begin_layer(int il, uint64_t now) {
    is_first = last_il < 0 || il <= last_il; // of its forward; one whose layers are all whole dispatches none
    if (is_first) {
        begin();
    } else {
        decisions.begin_layer();
        board.layer_stats()[last_il].layer_us += now - last_dispatch;
    }
    last_il       = il;
    last_dispatch = now;
}

// ---- dispatch

void spac_forward::dispatch(const spac_moe_layer & layer, const ggml_tensor * ids, const ggml_tensor * weights, const ggml_tensor * cur, int32_t * ids_device, int32_t * ids_host) {
    const uint64_t t0 = spac_now_us();
    begin_layer(layer.il, t0);
    pin_experts(layer, ids);
    if (lossy.routes()) { // which left out nothing
        n_rows_left_out.assign(slots.size(), 0);
        copy_of.assign(slots.size(), 0);
        lossy.keep_all(ids->ne[0] * ids->ne[1]);
    } else if (lossy.is_on()) {
        leave_out(layer, ids, *weights);
    }
    if (clock.speed > 0 && demand.empty() && !tier) { // emulated devices only: real ones are untried
        share_out(layer);
    }
    if (!demand.empty()) { // what is left out, or a copy's, need not come
        ask(layer, ids, weights);
    }
    record_split(layer);
    write_ids(layer, ids, ids_device, ids_host);

    call_times & t = times[layer.il];
    if (cur) {
        t.submit = spac_now_us();
        host.worker_of(layer).submit(&layer, cur, ids_host, ids_copy.data(), (int) ids->ne[1]);
    }
    if (!demand.empty()) { // beside the host
        demand[layer.device]->wait(layer.il, activations.experts.data(), slots.data(), slots.size());
    }
    t.dispatch = t.device = spac_now_us();
    board.counters()->dispatch_us += t.dispatch - t0;
    timeline.add(SPAC_SPAN_DISPATCH, layer.il, t0, t.dispatch);
}

void spac_forward::pin_experts(const spac_moe_layer & layer, const ggml_tensor * ids) {
    activations.count(ids, layer.n_expert, board.counts() + (size_t) layer.il * board.geometry().n_expert, n_tokens_counted);
    log.add(layer.il, ids);
    slots.resize(activations.n_distinct());
    if (cache.empty()) { // all are absent for good, and there is nothing to lock
        std::fill(slots.begin(), slots.end(), -1);
        board.counters()->n_miss += slots.size();
        board.counters()->n_miss_rows += std::accumulate(activations.n_rows.begin(), activations.n_rows.end(), uint64_t{ 0 });
    } else { // where it is not the first, its input depends on the previous layer's output, whose experts are no longer in use
        cache.run_layer(layer.il, activations.experts.data(), activations.n_rows.data(), slots.size(), slots.data(), is_first,
                        fills ? activations.n_counted : 0);
    }
    if (tier) {
        tier->use_on_device(layer.il, activations.experts.data(), activations.n_rows.data(), slots.data(), slots.size());
    }
}

// what the policy has copied gets a slot
void spac_forward::ask(const spac_moe_layer & layer, const ggml_tensor * ids, const ggml_tensor * weights) {
    weight_of.assign(slots.size(), 0);
    for (int64_t i = 0; weights && i < ids->ne[0] * ids->ne[1]; i++) {
        const int64_t iu = i % ids->ne[0], it = i / ids->ne[0];
        const int32_t ie = spac_id_at(ids, iu, it);
        if (ie >= 0 && ie < layer.n_expert) {
            weight_of[activations.index_of[ie]] += *(const float *) ((const char *) weights->data + iu * weights->nb[1] + it * weights->nb[2]);
        }
    }
    n_rows_exact = activations.n_rows;
    for (size_t i = 0; lossy.is_on() && i < slots.size(); i++) {
        n_rows_exact[i] = copy_of[i] ? 0 : n_rows_exact[i] - n_rows_left_out[i];
    }
    const spac_layer_stats & s = board.layer_stats()[layer.il];
    demand[layer.device]->ask(layer.il, activations.experts.data(), n_rows_exact.data(), weight_of.data(), slots.size(), slots.data(),
                              s.n_host_experts > 0 ? (double) s.host_us / s.n_host_experts : 0.0);
}

uint32_t spac_forward::n_rows_kept(size_t i) const {
    return activations.n_rows[i] - (lossy.is_on() ? n_rows_left_out[i] : 0);
}

// the host takes those of the device's that have the fewest rows
void spac_forward::share_out(const spac_moe_layer & layer) {
    residents.clear();
    size_t n_absent = 0;
    for (size_t i = 0; i < slots.size(); i++) {
        if (slots[i] >= 0) {
            residents.push_back(i);
        } else {
            n_absent += n_rows_kept(i) > 0;
        }
    }
    const size_t n = clock.n_on_device(layer.expert_bytes(), residents.size(), n_absent);
    if (n == residents.size()) {
        return;
    }
    std::stable_sort(residents.begin(), residents.end(), [&](size_t a, size_t b) { return activations.n_rows[a] > activations.n_rows[b]; });
    for (size_t i = n; i < residents.size(); i++) {
        slots[residents[i]] = -1;
    }
}

void spac_forward::record_split(const spac_moe_layer & layer) {
    spac_layer_stats & s = board.layer_stats()[layer.il];
    s.n_calls++;
    const uint64_t n_device   = s.n_device_experts;
    uint64_t       host_bytes = 0, n_stand_ins = 0;
    for (size_t i = 0; i < slots.size(); i++) {
        if (slots[i] >= 0) {
            s.n_device_experts++;
            s.n_device_rows += activations.n_rows[i];
            any_device = true;
        } else if (const uint32_t n = n_rows_kept(i)) {
            s.n_host_experts++;
            s.n_host_rows += n;
            host_bytes += layer.nth_copy(lossy.is_on() ? copy_of[i] : 0).expert_bytes();
            any_host = true;
        } else {
            n_stand_ins += lossy.substitutes();
        }
    }
    times[layer.il].n_device   = s.n_device_experts - n_device + n_stand_ins;
    times[layer.il].host_bytes = host_bytes;
}

// An expert is there where its layer need not wait for it: on the device, or without one in memory. Batches wider than
// max_batch, which are prompts, are exact.
void spac_forward::leave_out(const spac_moe_layer & layer, const ggml_tensor * ids, const ggml_tensor & weights) {
    const int64_t n_used = ids->ne[0], n_tokens = ids->ne[1];
    n_rows_left_out.assign(slots.size(), 0);
    copy_of.assign(slots.size(), 0);
    if (n_tokens > board.geometry().max_batch) {
        return lossy.keep_all(n_used * n_tokens);
    }
    const bool is_in_memory = tier && board.geometry().n_slots == 0;
    const bool substitutes  = lossy.substitutes() && !is_exact;
    if (substitutes) {
        substitute(layer, ids, weights);
    }
    is_there.assign(n_used * n_tokens, 1);
    index_of.assign(n_used * n_tokens, -1);
    for (int64_t i = 0; i < n_used * n_tokens; i++) {
        const int32_t ie = spac_id_at(ids, i % n_used, i / n_used);
        if (ie >= 0 && ie < layer.n_expert && !is_exact) {
            const int32_t index = index_of[i] = activations.index_of[ie];
            is_there[i]                       = slots[index] >= 0 || (is_in_memory && tier->is_there(layer.il, ie)) || (substitutes && stands_in[index] < 0);
        }
    }
    lossy.choose(weights, is_there, std::min(n_tokens, n_tokens_counted), sequences_of(n_tokens), lossy.copies().empty() && demand.empty() ? std::vector<int32_t>() : index_of);
    for (int64_t i = 0; i < n_used * n_tokens; i++) {
        if (lossy.is_left_out(i)) {
            n_rows_left_out[index_of[i]]++;
        } else if (index_of[i] >= 0) {
            copy_of[index_of[i]] = lossy.copy_of[i];
        }
    }
    board.counters()->n_left_out_rows += lossy.n_left_out;
    show_weights();
}

// the last layer has only the tokens whose outputs are wanted
const std::vector<int32_t> & spac_forward::sequences_of(int64_t n_tokens) const {
    return n_tokens == (int64_t) sequence_of_token.size() ? sequence_of_token : sequence_of_output;
}

void spac_forward::show_weights() {
    spac_counters & c = *board.counters();
    c.router_weight += llround(lossy.weight * 1e6);
    c.router_weight_kept += llround(lossy.weight_kept * 1e6);
}

std::vector<uint8_t> spac_forward::experts_there(const spac_moe_layer & layer) const {
    const bool           is_in_memory = tier && board.geometry().n_slots == 0;
    std::vector<uint8_t> found(layer.n_expert);
    for (int32_t ie = 0; ie < layer.n_expert; ie++) {
        found[ie] = is_in_memory ? tier->is_there(layer.il, ie) : cache.slot_of(layer.il, ie) >= 0;
    }
    return found;
}

// before the layer's dispatch: what is there may leave until then, and is computed all the same
void spac_forward::choose_again(const spac_moe_layer & layer, const ggml_tensor * logits, const ggml_tensor * ids, int32_t * chosen) {
    const int64_t                n_used = ids->ne[0], n_tokens = ids->ne[1];
    const bool                   is_wide     = n_tokens > board.geometry().max_batch;
    const std::vector<uint8_t>   is_there    = experts_there(layer);
    const std::vector<int32_t> & sequence_of = sequences_of(n_tokens);
    std::vector<int32_t>         wanted(n_used);
    lossy.weight = lossy.weight_kept = 0;
    for (int64_t it = 0; it < n_tokens; it++) {
        const float * z        = (const float *) ((const char *) logits->data + it * logits->nb[1]);
        int32_t *     found    = chosen + it * n_used;
        const int32_t sequence = (size_t) it < sequence_of.size() ? sequence_of[it] : -1;
        for (int64_t iu = 0; iu < n_used; iu++) {
            wanted[iu] = spac_id_at(ids, iu, it);
        }
        std::copy(wanted.begin(), wanted.end(), found);
        if (is_wide) {
            continue;
        }
        if (it < n_tokens_counted) {
            routing.learn(z, layer.n_expert);
        }
        if (!is_exact && lossy.may_leave_out(sequence)) {
            routing.choose(z, is_there, wanted.data(), n_used, found);
        }
        lossy.count_routed(sequence, spac_cache_routing::share_kept(z, wanted.data(), found, n_used), it < n_tokens_counted);
    }
    show_weights();
}

// those that the layer did not ask for, and that are there, are dealt out one by one, in the order in which it asks
void spac_forward::substitute(const spac_moe_layer & layer, const ggml_tensor * ids, const ggml_tensor & weights) {
    for (int64_t i = 0; i < ids->ne[0] * std::min(ids->ne[1], n_tokens_counted); i++) {
        const int64_t iu = i % ids->ne[0], it = i / ids->ne[0];
        const int32_t ie = spac_id_at(ids, iu, it);
        if (ie >= 0 && ie < layer.n_expert) {
            lossy.rate(layer.il, (int32_t) layer.n_expert, ie, *(const float *) ((const char *) weights.data + iu * weights.nb[1] + it * weights.nb[2]));
        }
    }
    std::vector<int32_t> spare;
    for (int32_t ie = 0; ie < layer.n_expert; ie++) {
        if (activations.index_of[ie] < 0 && cache.slot_of(layer.il, ie) >= 0) {
            spare.push_back(ie);
        }
    }
    stands_in.assign(slots.size(), -1);
    slot_of_it.assign(slots.size(), -1);
    for (size_t i = 0; i < slots.size(); i++) {
        const int32_t other = slots[i] >= 0 ? -1 : lossy.take_alike(layer.il, activations.experts[i], spare);
        slot_of_it[i]       = other < 0 ? -1 : cache.of(layer.il).pin_other(layer.il, other);
        stands_in[i]        = slot_of_it[i] < 0 ? -1 : other;
    }
}

void spac_forward::write_ids(const spac_moe_layer & layer, const ggml_tensor * ids, int32_t * ids_device, int32_t * ids_host) {
    const int64_t n_used = ids->ne[0], n_tokens = ids->ne[1];
    ids_copy.resize(n_used * n_tokens);
    on_device.resize(n_used * n_tokens);
    slot_of.resize(layer.n_expert);
    for (int64_t i = 0; i < n_used * n_tokens; i++) {
        const int32_t ie   = spac_id_at(ids, i % n_used, i / n_used);
        const bool    ok   = ie >= 0 && ie < layer.n_expert; // else it is not computed: the row is zero
        const int32_t slot = ok ? slots[activations.index_of[ie]] : -1;
        const bool    out  = lossy.is_on() && lossy.is_left_out(i);
        const int32_t copy = lossy.is_on() && slot < 0 ? lossy.copy_of[i] : 0;
        ids_device[i]      = slot;
        ids_host[i]        = slot < 0 && ok && !out ? ie + copy * (int32_t) layer.n_expert : -1;
        ids_copy[i]        = ok ? ie : 0;
        on_device[i]       = slot < 0 ? -1 : ie;
        if (out && lossy.substitutes()) {
            ids_device[i] = slot_of_it[activations.index_of[ie]];
            on_device[i]  = stands_in[activations.index_of[ie]];
            any_device    = true;
        }
        if (on_device[i] >= 0) {
            slot_of[on_device[i]] = ids_device[i];
        }
    }
}

// ---- executor

void spac_forward::collect(const spac_moe_layer & layer, float * rows, size_t n_rows) {
    const bool     is_timed  = clock.wait(layer, board.counters()->n_forward, times[layer.il].dispatch, times[layer.il].n_device);
    const uint64_t t0        = spac_now_us();
    uint64_t       busy_us   = 0;
    const float *  host_rows = host.worker_of(layer).wait(busy_us);
    memcpy(rows, host_rows, n_rows * layer.n_embd * sizeof(float));
    const uint64_t     t1 = spac_now_us();
    const call_times & t  = times[layer.il];
    board.counters()->wait_us += t1 - t0;
    board.devices()[layer.device].wait_us += t1 - t0;
    board.layer_stats()[layer.il].host_us += busy_us;
    clock.see_host(busy_us, t.host_bytes, t.n_device == 0);
    if (is_timed) {
        note_device(layer, t0);
    }
    timeline.add(SPAC_SPAN_DEVICE, layer.il, t.dispatch, t0);
    timeline.add(SPAC_SPAN_HOST, layer.il, t.submit, t.submit + busy_us);
    timeline.add(SPAC_SPAN_COLLECT, layer.il, t0, t1);
}

// ---- in-graph

void spac_forward::plan_host(const spac_moe_layer & layer, const int32_t * ids_host, int64_t n_tokens, int n_threads) {
    host.in_graph->plan(layer, ids_host, n_tokens, n_threads);
}

void spac_forward::compute_host(const spac_moe_layer &, const ggml_tensor * cur, float * rows) {
    host.in_graph->work({ (const char *) cur->data, cur->nb[1], cur->nb[2] }, rows);
}

void spac_forward::plan_device(const spac_moe_layer & layer, const spac_slot_group & group, int64_t n_tokens, int n_threads) {
    host.on_device->plan(layer, on_device.data(), n_tokens, n_threads, { &group, slot_of.data() });
}

void spac_forward::compute_device(const spac_moe_layer &, const ggml_tensor * cur, float * rows) {
    host.on_device->work({ (const char *) cur->data, cur->nb[1], cur->nb[2] }, rows);
}

void spac_forward::device_done(const spac_moe_layer & layer) {
    call_times & t = times[layer.il];
    t.device       = spac_now_us();
    note_device(layer, t.device);
}

void spac_forward::note_device(const spac_moe_layer & layer, uint64_t now) {
    const call_times & t = times[layer.il];
    spac_layer_stats & s = board.layer_stats()[layer.il];
    s.n_timed_calls++;
    s.n_timed_experts += t.n_device;
    s.device_us += now - t.dispatch;
    clock.see_device(now - t.dispatch, t.n_device * layer.expert_bytes());
}

void spac_forward::host_done(const spac_moe_layer & layer) {
    board.layer_stats()[layer.il].host_us += spac_now_us() - times[layer.il].device;
    if (layer.il == il_to_publish) {
        log.end();
        close(); // the next forward may be long in coming
    }
}
