// The experts of one layer that the host computes, as tasks that any number of threads take from one counter.
//
// Three kinds of tasks, in this order: prepare activations, of a token or, interleaved, of a group; gate, up and activation of a
// block of an expert's rows, for all its tokens; down of a block of rows. There is no barrier: a task waits for what it needs,
// which was taken from the counter before it, so that whoever computes it is at work on it already.
#pragma once

#include "cache/slot-pool.h"
#include "layers/moe-layer.h"
#include "row-block.h"
#include "tier/memory-tier.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

// activations of a layer's tokens: n_embd floats at data + iu * nb_used + it * nb_token
struct spac_host_input {
    const char * data;
    size_t       nb_used, nb_token;
};

// where the experts of an emulated device are, which is this processor
struct spac_device_slots {
    const spac_slot_group * group = nullptr;
    const int32_t *         slots = nullptr; // [n_expert], of those in use
};

struct spac_host_experts {
    // tier: where the weights are, of a model whose experts lie on disk; NULL: in the layers' tensors
    explicit spac_host_experts(const spac_kernels & kernels, spac_memory_tier * tier = nullptr);

    // whether there are kernels for all of the layer's types; with_ggml: ggml's dot products count, too
    static bool can_compute(const spac_kernels & kernels, const spac_moe_layer & layer, bool with_ggml = false);

    // by one thread, before the others come: ids [n_expert_used * n_tokens], -1: not here, ie + k * n_expert: of the k-th copy
    // from: of experts that are in slots; else they are the host's
    void plan(const spac_moe_layer & layer, const int32_t * ids, int64_t n_tokens, int n_threads, const spac_device_slots & from = {});

    // by each thread, with the same arguments; on return every task is taken, and those of this thread are done
    // rows: [n_embd, n_expert_used, n_tokens], untouched where ids has -1
    // false: there was nothing left for this thread
    bool work(const spac_host_input & in, float * rows);

    bool has_work() const { return !experts.empty(); }

  private:
    // an expert in use, and its tokens: order[first .. first + n_rows)
    struct expert {
        int32_t                ie, first, n_rows;
        const spac_moe_layer * from;          // whose weights: the layer, or a copy of it
        int32_t                first_act = 0; // its activations, where they lie by expert
    };

    struct act_group { // of rows whose activations lie interleaved
        int32_t ix, begin;
    };

    struct call { // the arguments of work()
        const spac_host_input & in;
        float *                 rows;
        char *                  panels; // of this thread
    };

    struct factor { // a matrix, and what is done to its products
        int                 part, bias;
        int64_t             first; // row
        const ggml_tensor * scale;
    };

    struct hidden_block { // rows r0 .. r0 + n
        int64_t                       r0, n;
        spac_row_block                up;
        std::optional<spac_row_block> gate;
    };

    void group_by_expert(const int32_t * ids);
    void ask_for_experts();
    void divide(int n_threads);
    void place_acts();
    void make_room(int n_threads);

    void compute(const call & c, int64_t i);
    void prepare_input(const call & c, int64_t i);
    void prepare_token(const call & c, int64_t it);
    void prepare_group(const call & c, const act_group & group);
    void compute_hidden(const call & c, int ix, int64_t i_task);
    void compute_hidden_block(const expert & e, hidden_block & b, int begin, int n_acts);
    void compute_out(const call & c, int ix, int64_t i_task);
    void prepare_hidden(const expert & e);

    const spac_panel *    panel_for(int part, const expert & e) const;
    spac_act_form         form_for(int part, const expert & e) const;
    factor                up_of(const expert & e) const;
    std::optional<factor> gate_of(const expert & e) const;
    spac_row_block        take(int part, const expert & e, int64_t r0, int64_t n, char * memory) const;

    void         finish(const factor & f, int32_t ie, int64_t r0, int64_t n, float * y) const;
    void         swiglu(float * gate, float * up, int64_t n) const;
    void         activate(float * gate, float * up, int64_t n) const;
    const char * input_act(spac_act_form form, const expert & e, int64_t i) const;

    const char * weights(int part, const expert & e) const;

    const spac_kernels &     kernels;
    spac_memory_tier * const tier;

    // the layer in progress
    const spac_moe_layer * layer = nullptr;
    spac_device_slots      in_slots;
    int64_t                n_tokens = 0, n_ff = 0;
    int64_t                hidden_rows = 0, n_hidden_tasks = 0; // rows of a task, tasks of an expert
    int64_t                out_rows = 0, n_out_tasks = 0;
    int64_t                n_input_tasks = 0, n_tasks = 0;
    int64_t                n_there                       = 0;                    // experts that need not be waited for: the first ones
    int64_t                n_inputs                      = 0;                    // activations per token: 1, or n_expert_used where weights come first
    int64_t                n_acts                        = 0;                    // by expert, each beginning with a group
    size_t                 input_bytes[SPAC_N_ACT_FORMS] = {}, hidden_bytes = 0; // of one activation
    size_t                 hidden_panel = 0, out_panel = 0;                      // bytes of the largest
    size_t                 thread_bytes = 0;                                     // of a thread's panels

    std::vector<expert>    experts;
    std::vector<act_group> groups;
    std::vector<int32_t>   order; // [rows] row in the output, by expert
    std::vector<int32_t>   n_per_expert;

    struct free_aligned {
        void operator()(void * p) const;
    };

    struct arena {
        std::unique_ptr<char, free_aligned> data;
        size_t                              bytes = 0;
        void                                reserve(size_t n);
    };

    arena inputs[SPAC_N_ACT_FORMS]; // [n_tokens * n_inputs] activations; [n_acts] those that lie interleaved
    arena hidden;                   // [rows, n_ff] f32, by position in order
    arena hidden_act;               // [n_acts] activations
    arena panels;                   // [n_threads]

    // written by all threads; each on a cache line of its own
    struct alignas(64) counter {
        std::atomic<int32_t> n{ 0 };
    };

    alignas(64) std::atomic<int64_t> next{ 0 };
    alignas(64) std::atomic<int64_t> n_inputs_left{ 0 };
    std::atomic<int>           next_panels{ 0 };
    std::unique_ptr<counter[]> n_hidden_left; // [n_expert] tasks and the preparation after them
    size_t                     n_counters = 0;
};
