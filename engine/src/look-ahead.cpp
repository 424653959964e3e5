#include "look-ahead.h"

#include "clock.h"

#include <algorithm>
#include <cstring>

static constexpr double TIME_WEIGHT = 0.1; // of the latest forward in a layer's time

spac_look_ahead::spac_look_ahead(spac_board & board, spac_expert_cache & cache, const spac_layers & layers, int distance) :
    cache(cache), stats(board.ahead()[SPAC_AHEAD_NEXT_LAYER]), routers(layers.split()), distance(distance), layer_us(routers.layers().size(), 0),
    activations(board.geometry().n_expert), totals(board.geometry().n_expert), guesses(routers.layers().size()) {
    for (size_t i = 0; i < routers.layers().size(); i++) {
        nodes[routers.layers()[i]->il] = { this, routers.layers()[i], i };
    }
    thread = std::thread([this] { run(); });
}

void spac_look_ahead::stop() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        stopped = true;
        jobs.clear();
    }
    changed.notify_all();
    if (thread.joinable()) {
        thread.join();
    }
}

void spac_look_ahead::wait_idle() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return stopped || (jobs.empty() && !is_busy); });
}

// ---- on the graph's thread

// src: router input, ids; dst: one number that nobody reads
void spac_look_ahead::run_node(ggml_tensor * dst, int ith, int, void * user_data) {
    if (ith == 0) {
        const node & n = *(node *) user_data;
        n.look_ahead->see(*n.layer, dst->src[0], dst->src[1]);
    }
}

void spac_look_ahead::add_node(const llama_moe_hook_params & p) {
    const auto        it     = nodes.find(p.il);
    const spac_router router = it == nodes.end() ? spac_router() : spac_find_router(p.ids, it->second.layer->n_expert);
    if (!router.weight) {
        return;
    }
    ggml_tensor * args[] = { router.input, p.ids };
    ggml_tensor * node   = ggml_custom_4d(p.ctx, GGML_TYPE_I32, 1, 1, 1, 1, args, 2, run_node, 1, &it->second);
    ggml_backend_sched_set_tensor_backend(p.sched, node, p.backend_cpu);
    ggml_format_name(node, "spac_look_ahead-%d", p.il);
    ggml_build_forward_expand(p.gf, node);
}

void spac_look_ahead::see(const spac_moe_layer & layer, const ggml_tensor * input, const ggml_tensor * ids) {
    const uint64_t now   = spac_now_us();
    const size_t   index = nodes.at(layer.il).index;
    note_time(index, now);
    check(index, ids);
    if (index + distance < routers.layers().size()) {
        submit(index, input, now);
    }
}

void spac_look_ahead::note_time(size_t index, uint64_t now) {
    if (last_index != SIZE_MAX && index == last_index + 1) {
        double & us = layer_us[last_index];
        us          = us == 0 ? now - last_us : us + TIME_WEIGHT * (now - last_us - us);
    }
    last_us = now;
    std::lock_guard<std::mutex> lock(mutex);
    forward += last_index == SIZE_MAX || index <= last_index;
    n_seen     = index + 1;
    last_index = index;
}

// `now` where one of the times on the way is not known yet
uint64_t spac_look_ahead::due_us(size_t index, uint64_t now) const {
    double us = 0;
    for (size_t i = index; i < index + distance; i++) {
        if (layer_us[i] == 0) {
            return now;
        }
        us += layer_us[i];
    }
    return now + (uint64_t) us;
}

// what was predicted for this layer against what its router chose
void spac_look_ahead::check(size_t index, const ggml_tensor * ids) {
    const spac_moe_layer & layer = *routers.layers()[index];
    activations.count(ids, layer.n_expert, totals.data());
    std::lock_guard<std::mutex> lock(mutex);
    const guess &               g = guesses[index];
    if (g.forward != forward) {
        return;
    }
    stats.n_predicted += g.experts.size();
    stats.n_chosen += activations.n_distinct();
    for (int32_t ie : g.experts) {
        stats.n_hit += activations.index_of[ie] >= 0;
    }
}

void spac_look_ahead::submit(size_t index, const ggml_tensor * input, uint64_t now) {
    const int64_t n_embd = input->ne[0], n_tokens = input->ne[1];
    job           j = { index + distance, 0, due_us(index, now), n_tokens, std::vector<float>(n_embd * n_tokens) };
    for (int64_t it = 0; it < n_tokens; it++) {
        memcpy(&j.input[it * n_embd], (const char *) input->data + it * input->nb[1], n_embd * sizeof(float));
    }
    {
        std::lock_guard<std::mutex> lock(mutex);
        j.forward = forward;
        jobs.push_back(std::move(j));
    }
    changed.notify_all();
}

// ---- on its own thread

void spac_look_ahead::run() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
        changed.wait(lock, [&] { return stopped || !jobs.empty(); });
        if (stopped) {
            return;
        }
        const job j = std::move(jobs.front());
        jobs.pop_front();
        stats.n_inputs++;
        if (j.forward != forward || j.index < n_seen) {
            stats.n_late++;
        } else {
            is_busy = true;
            lock.unlock();
            work_off(j);
            lock.lock();
            is_busy = false;
        }
        changed.notify_all();
    }
}

void spac_look_ahead::work_off(const job & j) {
    const int            il    = routers.layers()[j.index]->il;
    const uint64_t       begin = spac_now_us();
    std::vector<int32_t> experts;
    routers.choose(il, j.input.data(), j.n_tokens, experts);
    const uint64_t now = spac_now_us();
    cache.expect({ SPAC_AHEAD_NEXT_LAYER, (uint32_t) il, false, j.due_us > now ? (double) (j.due_us - now) : 0, true }, experts);

    std::lock_guard<std::mutex> lock(mutex);
    stats.us += now - begin;
    guesses[j.index] = { j.forward, std::move(experts) };
}
