// The C ABI of the pyspac engine: the only public header.
//
// An engine attaches to a llama_context and splits each Mixture-of-Experts layer between a device and the host,
// expert by expert. Decisions (utilities, thresholds, loads) and observations (activation counts, residency, times)
// pass through a board: one block of memory, private to the process or in POSIX shared memory, whose arrays are read
// and written in place. See docs/c-abi.md.
//
// Rules: handles are opaque; each _init/_attach/_open has one _free/_close; functions return a status and never throw;
// spac_last_error() holds the text of the calling thread's last failure; a caller's SPAC_ABI_VERSION must be spac_abi_version().
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(SPAC_BUILD)
#    define SPAC_API __attribute__((visibility("default")))
#else
#    define SPAC_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

// The board's arrays, in their order: name, type of an element, dimensions, writer (SPAC_WRITER_...), meaning. Nothing else lists
// them: layout, view, accessors (engine/src/board/board.h), numpy's arrays (pyspac/engine/board.py) and the table in docs/c-abi.md come
// from here. Those of one writer FORWARD, and those of DECISION, follow each other.
#define SPAC_BOARD_FIELDS(X)                                                                                                                                                                                                \
    X(counts, uint32_t, (n_layer, n_expert), FORWARD, "activations in split forwards, ever; wraps")                                                                                                                         \
    X(prompt_counts, uint32_t, (n_layer, n_expert), FORWARD, "the same of batches wider than max_batch, which are not split: prompts")                                                                                      \
    X(residency, uint8_t, (n_layer, n_expert), FORWARD, "spac_residency")                                                                                                                                                   \
    X(expert_bytes, uint32_t, (n_layer), FORWARD, "of one expert; 0: the layer is not split")                                                                                                                               \
    X(info, spac_engine_info, (1), FORWARD, "what attaching decided: devices, sizes, who computes")                                                                                                                         \
    X(declined, spac_reason, (n_layer), FORWARD, "why llama.cpp computes a MoE layer by itself; empty: it does not")                                                                                                        \
    X(group, uint32_t, (n_layer), FORWARD, "layout group: slots are shared within a group only")                                                                                                                            \
    X(group_slots, uint32_t, (n_layer), FORWARD, "slots of that layer's group")                                                                                                                                             \
    X(layer_device, uint32_t, (n_layer), FORWARD, "index of the device with the layer's experts")                                                                                                                           \
    X(layer_stats, spac_layer_stats, (n_layer), FORWARD, "experts and rows of each side, times; only grow")                                                                                                                 \
    X(counters, spac_counters, (1), FORWARD, "hits, misses, loads, bytes, waits; only grow")                                                                                                                                \
    X(ahead, spac_ahead_stats, (SPAC_N_AHEAD), FORWARD, "by spac_ahead_source: what the engine's own predictors said, what it took, what became of the copies")                                                             \
    X(devices, spac_device_stats, (n_device), FORWARD, "slots, loads and waits of each device")                                                                                                                             \
    X(whole, uint8_t, (n_layer), FORWARD, "spac_layer_mode")                                                                                                                                                                \
    X(threads, spac_thread_info, (1), FORWARD, "that compute without a device; zeros beside one, and before the first forward")                                                                                             \
    X(tier, spac_tier_info, (1), FORWARD, "experts on disk, as of the last forward; zeros without")                                                                                                                         \
    X(in_memory, uint8_t, (n_layer, n_expert), FORWARD, "as of then: 1: the memory tier has the expert; zeros without one")                                                                                                 \
    X(records, spac_step_record, (SPAC_N_RECORDS), ENGINE, "a ring of decoding steps: the one with index i is at i % SPAC_N_RECORDS")                                                                                       \
    X(n_records, uint64_t, (1), ENGINE, "records ever written")                                                                                                                                                             \
    X(routed_tokens, int32_t, (SPAC_N_ROUTED), ENGINE, "the routing log, a ring of tokens, written while looks_ahead is set: id of the vocabulary; -1: the input were embeddings, or the token is not counted")             \
    X(routed_experts, uint16_t, (SPAC_N_ROUTED, n_layer, n_expert_used), ENGINE, "what they used; 65535: none, or the layer did not run for all of the batch")                                                              \
    X(n_routed, uint64_t, (2), ENGINE, "rows ever written; rows ever begun, which is raised first: others may be overwritten")                                                                                              \
    X(upcoming, int32_t, (SPAC_N_UPCOMING), ENGINE, "ids of the tokens that a server's next batch computes, as far as they are known; told while looks_ahead is set")                                                       \
    X(n_upcoming, uint32_t, (1), ENGINE, "of these")                                                                                                                                                                        \
    X(n_looks, uint64_t, (1), ENGINE, "rises by two with each look ahead; odd while one is being written")                                                                                                                  \
    X(looks_ahead, uint32_t, (1), SCHEDULER, "not 0: keep the routing log, tell of upcoming tokens, and take decisions over between layers too")                                                                            \
    X(decision_seq, uint64_t, (1), SCHEDULER, "only of spac_decision_begin and spac_decision_end: rises with each decision, odd while one is being written")                                                                \
    X(utility, uint8_t, (n_layer, n_expert), DECISION, "expected demand")                                                                                                                                                   \
    X(tau, uint8_t, (n_layer), DECISION, "experts with utility >= tau belong on the device")                                                                                                                                \
    X(load, uint32_t, (n_layer * n_expert), DECISION, "il * n_expert + ie, most wanted first")                                                                                                                              \
    X(n_load, uint32_t, (1), DECISION, "of these")                                                                                                                                                                          \
    X(byte_budget, uint64_t, (n_device), DECISION, "bytes that may be copied per forward; UINT64_MAX: no limit")                                                                                                            \
    X(want_whole, uint8_t, (n_layer), DECISION, "1: the device shall have all of the layer's experts")                                                                                                                      \
    X(n_draft_max, int32_t, (SPAC_N_SERVER_SLOTS), SCHEDULER, "limit of the draft length by server slot, each entry a decision of its own; -1: none")                                                                       \
    X(n_draft_matched, int32_t, (SPAC_N_SERVER_SLOTS, SPAC_N_MATCHES), SCHEDULER, "the same of copied drafts (ngram), by how many of the last tokens stood before: 0 (unused), 1, 2, 3, from 4, 8 and 16 on, 32; -1: none") \
    X(fallback, int32_t, (2), SCHEDULER, "for display: whether copies pay, as measured: 0: not compared yet, 1: they go on, 2: there are none, 3: there are only whole layers, 4: they go on and no layer is whole; by how many thousandths of tokens/s that is faster")
#define SPAC_VIEW_FIELD(name, type, shape, writer, meaning) type * name;

// cdef-begin: the body between the two markers goes to cffi (constants as they are, SPAC_API removed)

#define SPAC_ABI_VERSION     13
#define SPAC_N_RECORDS       256 // length of the ring of step records
#define SPAC_N_ROUTED        512 // rows of the ring of routed tokens
#define SPAC_N_ROUTED_MAX    256 // of them that one forward writes: a longer batch's last tokens
#define SPAC_N_UPCOMING      512 // tokens of a look ahead, at most
#define SPAC_N_SERVER_SLOTS  64
#define SPAC_N_MATCHED_MAX   32  // tokens of a match: longer ones are alike
#define SPAC_N_MATCHES       8   // kinds of them, by length
#define SPAC_BOARD_NAME_MAX  100 // letters, digits, '_', '.' and '-'
#define SPAC_N_AHEAD         2   // predictors of the engine's own
#define SPAC_NEXT_LAYER_MAX  3   // layers that one of them looks ahead
#define SPAC_MAX_BATCH       512 // tokens of the widest batch that can be split
#define SPAC_MAX_THREADS     512 // of the host executor, and cores that can be named: as many as ggml has room for
#define SPAC_AUTO_MARGIN_MIB 768 // of a device's free memory, left by the cache "auto" for what still grows: CUDA's modules and graphs, compute buffers
#define SPAC_MIN_MARGIN_MIB  256 // the least that a cache of a given size has to leave
#define SPAC_DRAFT_MAX       256 // tokens of a draft
#define SPAC_N_DEVICES       16  // of one context, at most

struct llama_context;

typedef struct spac_engine        spac_engine;
typedef struct spac_board         spac_board;
typedef struct spac_hidden_states spac_hidden_states;

typedef enum spac_status {
    SPAC_STATUS_SUCCESS          = 0,
    SPAC_STATUS_INVALID_ARGUMENT = 1, // a value the caller passed; the text names it and what is allowed
    SPAC_STATUS_OUT_OF_MEMORY    = 2, // the pool or the board does not fit
    SPAC_STATUS_NOTHING_TO_SPLIT = 3, // no MoE layer, or every layer declined: the text lists the reasons
    SPAC_STATUS_DEVICE           = 4, // the device failed or is not there
    SPAC_STATUS_BOARD            = 5, // board missing, of another ABI version or geometry, or already in use
    SPAC_STATUS_TIMEOUT          = 6,
    SPAC_STATUS_INTERNAL         = 7,
} spac_status;

// where an expert's weights are on the device; a pin is a count kept beside it, not a state
typedef enum spac_residency {
    SPAC_RESIDENCY_ABSENT   = 0,
    SPAC_RESIDENCY_QUEUED   = 1,
    SPAC_RESIDENCY_LOADING  = 2,
    SPAC_RESIDENCY_RESIDENT = 3,
} spac_residency;

// of a layer: who computes it
typedef enum spac_layer_mode {
    SPAC_LAYER_SPLIT   = 0, // device and host, expert by expert
    SPAC_LAYER_FILLING = 1, // as before, but all of its experts are on their way to slots that are reserved for them
    SPAC_LAYER_WHOLE   = 2, // in the last forward the device, which has all of its experts; nothing of it is counted
} spac_layer_mode;

// how the experts that are not resident are computed
typedef enum spac_host_mode {
    SPAC_HOST_AUTO      = 0, // in-graph if the device is the CPU, in-stream if it can be and all routers are there, else executor
    SPAC_HOST_IN_GRAPH  = 1, // ordinary graph nodes on the context's threads
    SPAC_HOST_EXECUTOR  = 2, // the engine's own threads, concurrent with the device; the graph's thread waits for both in each layer
    SPAC_HOST_IN_STREAM = 3, // the same, but the device's stream calls the engine: no wait before the graph's end
} spac_host_mode;

// whose kernels compute the host's experts
typedef enum spac_host_kernels {
    SPAC_KERNELS_AUTO = 0, // ggml's where the device is the CPU, else the engine's own where it has them
    SPAC_KERNELS_SPAC = 1, // the engine's own where it has them for this machine and a layer's types, else ggml's
    SPAC_KERNELS_GGML = 2, // ggml's: bit-identical to llama.cpp's results where the device is the CPU
} spac_host_kernels;

// what the name of a device says by itself
typedef enum spac_device_kind {
    SPAC_DEVICE_AUTO     = 0, // "auto": all GPUs of the machine, each once; of a context all of its devices; none where there is no GPU
    SPAC_DEVICE_NONE     = 1, // "none": all experts on the host
    SPAC_DEVICE_EMULATED = 2, // "emulated", or "cpu": slots in host memory, to try the split without a GPU; "emulated:0.3": beside the
                              // host's threads, at 0.3 of their speed
    SPAC_DEVICE_NAMED = 3,    // ggml's name, such as "CUDA0"
} spac_device_kind;

// whether the experts of a batch wider than max_batch pass through the slots (docs/gpu.md)
typedef enum spac_stage {
    SPAC_STAGE_AUTO   = 0, // where the device takes such batches over from the host, and while it is the faster way
    SPAC_STAGE_ALWAYS = 1, // wherever there are slots for two layers' experts
    SPAC_STAGE_NEVER  = 2,
} spac_stage;

typedef struct spac_engine_params {
    const char * device;                           // "auto", "none", "emulated" ("cpu"), or a ggml name such as "CUDA0": see spac_device_kind; several with commas
    const char * cache;                            // slot pool: "17%" of its layers' experts, "4096" MiB, "auto" (free device memory); each device's, or with commas one for each; without a device "auto" or "0"
    const char * board_name;                       // NULL: private memory; else POSIX shared memory /NAME
    int32_t      host_mode;                        // spac_host_mode
    int32_t      n_threads;                        // of the host experts; 0: as the context's, less one that waits for the device (own kernels) and one that copies (more than 4)
    int32_t      max_batch;                        // more tokens than this take stock's path; at least the draft length + 1
    double       copy_gb_s;                        // throttle of copies, to emulate a slower link; 0: none
    bool         evict;                            // false: a resident expert never leaves
    bool         verbose;                          // log one line per layer group
    int32_t      host_kernels;                     // spac_host_kernels
    const char * cpu_range;                        // "0-7": the host's own threads run there, each pinned to one core; NULL: anywhere
    bool         fill;                             // experts that were just used take free slots at once, those of prompts included
    int32_t      next_layer;                       // 1 .. 3: a layer's input is put through the router of so many MoE layers further on, too; 0: not
    const char * lossy;                            // "drop:2": an expert that is not there and that is not among its token's best 2 is left out; "lowbit:2:FILE": computed from FILE, the same model in fewer bits; "substitute:0.1": one on the device stands in for it; "route:0.2": routers prefer those that are there; NULL: all are computed
    uint64_t     ram_bytes;                        // memory for experts, which lie in mapped files; 0: they are in memory
    int32_t      stage;                            // spac_stage
    double       device_copy_gb_s[SPAC_N_DEVICES]; // copy_gb_s of each of several devices; 0: copy_gb_s
    const char * baseline;                         // "lru+fetch": who leaves the device, and what becomes of experts that a layer does not find there; NULL: decisions say it
} spac_engine_params;

typedef struct spac_engine_info {
    char     device[64];    // ggml's name of the device; of several, with commas
    bool     is_emulated;   // the device is the CPU itself, or the link is throttled
    int32_t  host_mode;     // spac_host_mode, as it was chosen
    int32_t  n_layer;       // of the model
    int32_t  n_expert;      // largest of any layer
    int32_t  n_expert_used; // largest of any layer
    int32_t  n_layer_split;
    int32_t  n_layer_declined;
    int32_t  n_group;     // layout groups (layers with equal types and shapes of experts)
    int32_t  n_slots;     // over all groups
    uint64_t pool_bytes;  // device memory of the pools, guard slots included
    uint64_t total_bytes; // of all experts of the split layers
    int32_t  max_batch;
    int32_t  n_layer_kernels;  // split layers whose host experts the engine's own kernels compute
    char     kernels[16];      // which of them: "amx", "avx512", "avxvnni", "avx2", "neon"; "" if they compute nothing
    int32_t  n_layer_unpinned; // split layers whose experts are not in memory pinned by the device: copies are slower
    int32_t  n_dense_kernels;  // other matrices that they multiply; only without a device
    int32_t  n_device;         // 0: "none"
} spac_engine_info;

typedef struct spac_reason {
    char text[128];
} spac_reason;

// one of the devices: each has slots for the experts of its own layers. Counts are cumulative; what it computed is in the
// layers' stats
typedef struct spac_device_stats {
    char     name[64];    // ggml's
    double   copy_gb_s;   // of an emulated link; 0: it is the device's own
    uint64_t is_emulated; // the device is the CPU
    uint64_t is_in_graph; // host and device take turns on the same cores; 0: they work at once
    uint64_t n_slots;
    uint64_t pool_bytes;   // of device memory, guard slots included
    uint64_t expert_bytes; // of all experts of its layers
    uint64_t n_loads;      // copies completed
    uint64_t n_load_failures;
    uint64_t loaded_bytes;
    uint64_t load_us; // loaded_bytes / load_us is the link's speed
    uint64_t wait_us; // time in its layers that the graph waited for the host executor
} spac_device_stats;

// the memory tier: experts that lie in files, and the pool that holds some of them; counts are cumulative
typedef struct spac_tier_info {
    uint64_t pool_bytes;
    int32_t  n_slots;
    int32_t  n_resident; // of the slots: with an expert in it
    uint64_t n_hit;      // distinct (layer, expert) asked for: in memory, or on the way
    uint64_t n_miss;     // not: read while the layer waits
    uint64_t n_ahead;    // read before they were asked for
    uint64_t n_reads;    // of one matrix each
    uint64_t read_bytes;
    uint64_t read_us;          // of all reads, added up
    uint64_t busy_us;          // at least one read was under way: read_us / busy_us is the queue's depth
    uint64_t wait_us;          // a layer waited for a read
    bool     is_direct;        // around the page cache; false: the file system cannot, and pages are dropped after each read
    char     error[256];       // why the last forward failed: an expert could not be read; "": it did not
    uint64_t n_to_device;      // experts copied to the device beside it
    uint64_t n_to_device_read; // of these: straight from disk
} spac_tier_info;

// the threads that compute graphs without a device, beside other programs as well
typedef struct spac_thread_info {
    int32_t  n_threads;  // of the last forward
    int32_t  n_most;     // that the context has for it
    bool     is_crowded; // other programs want their cores
    double   share;      // of the time in which it wanted a core: the thread that had one least, lately
    uint64_t n_moves;    // threads that shared a core with another of them, and were moved
} spac_thread_info;

// cumulative, written only by the engine; read at any time
typedef struct spac_counters {
    uint64_t n_forward;      // graph evaluations that took the split path
    uint64_t n_forward_both; // of these: device and host experts both at work
    uint64_t n_hit;          // distinct (layer, expert) asked for and resident
    uint64_t n_miss;         // asked for and absent or queued
    uint64_t n_late;         // asked for while its copy was in flight
    uint64_t n_hit_rows;     // the same, counted per (token, expert)
    uint64_t n_miss_rows;
    uint64_t n_late_rows;
    uint64_t n_loads; // copies completed
    uint64_t n_load_failures;
    uint64_t n_evictions;
    uint64_t loaded_bytes;
    uint64_t load_us;         // time the worker spent copying, throttle included
    uint64_t dispatch_us;     // time in the dispatch nodes
    uint64_t wait_us;         // time the graph waited for the host executor
    uint64_t n_decisions;     // decisions taken over from the board
    uint64_t n_pinned_steals; // must stay 0: a slot in use was taken
    uint64_t n_prompt_tokens; // tokens of batches wider than max_batch, which are counted only in prompt_counts
    uint64_t n_staged;        // copies for such a batch, which are among n_loads; their bytes and time are below
    uint64_t staged_bytes;
    uint64_t staged_us;
    uint64_t stage_wait_us;      // time such batches waited for them: the rest was hidden
    uint64_t n_left_out_rows;    // (token, expert) that were left out, or not computed exactly (spac_engine_params.lossy)
    uint64_t router_weight;      // of all experts of the forwards that may leave some out, in millionths
    uint64_t router_weight_kept; // of those that were computed exactly
    uint64_t n_kl_tokens;        // tokens that may be lossy, while their divergence is limited
    uint64_t kl_total;           // their KL divergence from exact ones as estimated, in millionths of a nat
    uint64_t n_kl_samples;       // tokens that were computed both ways, to estimate it
    uint64_t kl_sampled;         // the divergence of these, in millionths of a nat
} spac_counters;

// the engine's own predictors of experts
typedef enum spac_ahead_source {
    SPAC_AHEAD_NEXT_LAYER = 0, // a layer's input through the router of a later layer
    SPAC_AHEAD_DRAFT_GATE = 1, // the draft model's through the routers of the target (SP-MoE)
} spac_ahead_source;

// cumulative, of one predictor; experts are distinct ones of a layer in one forward
typedef struct spac_ahead_stats {
    uint64_t n_inputs;    // router inputs of a layer, of all tokens of a batch, that were looked at
    uint64_t n_late;      // of these: given up, as their layer ran already
    uint64_t us;          // time that it took
    uint64_t n_predicted; // experts of layers that then ran
    uint64_t n_chosen;    // experts that those layers' own routers chose
    uint64_t n_hit;       // both; recall: of n_chosen, precision: of n_predicted
    uint64_t n_queued;    // absent, and queued before all else
    uint64_t n_cut;       // absent, and not queued: the copy would come too late, delay better ones or exceed the byte budget
    uint64_t n_dropped;   // queued, but their layer ran first, or there was no slot
    uint64_t n_copied;
    uint64_t n_used;       // copied, and used before they left
    uint64_t n_wasted;     // copied, and gone unused
    uint64_t cutoff_layer; // draft-gate: experts of so many MoE layers are copied while the draft model runs, the first ones
} spac_ahead_stats;

// cumulative per layer; times in microseconds
typedef struct spac_layer_stats {
    uint64_t n_calls;
    uint64_t n_device_experts; // distinct experts computed on the device, summed over calls
    uint64_t n_host_experts;
    uint64_t n_device_rows; // (token, expert) pairs
    uint64_t n_host_rows;
    uint64_t n_timed_calls, n_timed_experts; // calls whose device's time was observed, and the device's experts of those
    uint64_t device_us;                      // of those, from dispatch until the device is done
    uint64_t host_us;                        // in-graph: the host experts' nodes; executor: its busy time
    uint64_t layer_us;                       // from this layer's dispatch to the next one's
} spac_layer_stats;

// one decoding step (one draft + verify cycle), written by the program that drives the context
typedef struct spac_step_record {
    uint64_t step;
    int32_t  server_slot;
    int32_t  request; // the server's task: another one means that a new request began; -1: not known
    int32_t  n_draft;
    int32_t  n_accepted;
    int32_t  n_tokens; // width of the verified batch
    uint32_t draft_us;
    uint32_t verify_us;
    uint32_t process_us;
    uint32_t sample_us;
    int32_t  n_masks;       // tokens of the batch that only draft this sequence's next ones
    int32_t  n_matched;     // ngram: of the tokens before its drafts, that stood together before, too; 0: none, or not looked for
    int32_t  n_passed_over; // ngram: of a step before, whose draft was not made: its match if the first token would have held, else the negative; 0: none
} spac_step_record;

typedef struct spac_board_geometry {
    uint32_t n_layer;
    uint32_t n_expert;
    uint32_t n_expert_used;
    uint32_t n_slots;
    uint32_t max_batch;
    uint32_t n_device; // at least 1: "none" counts as one
} spac_board_geometry;

typedef enum spac_board_writer {
    SPAC_WRITER_FORWARD   = 0, // the engine; others see it when a forward ends, and every 25 ms while there is nothing to copy
    SPAC_WRITER_ENGINE    = 1, // the engine; others see it at once
    SPAC_WRITER_DECISION  = 2, // the scheduler, between spac_decision_begin and spac_decision_end
    SPAC_WRITER_SCHEDULER = 3, // the scheduler, at any time
} spac_board_writer;

// one of SPAC_BOARD_FIELDS
typedef struct spac_board_field {
    const char * name;
    const char * type;  // of an element
    const char * shape; // "(n_layer, n_expert)"
    const char * meaning;
    int32_t      writer; // spac_board_writer
    int32_t      n_dims;
    uint32_t     dims[3];
    uint64_t     n_bytes;
    void *       data;
} spac_board_field;

typedef struct spac_board_view {
    spac_board_geometry geometry;
    SPAC_BOARD_FIELDS(SPAC_VIEW_FIELD) // pointers
} spac_board_view;

// who was at work; only with the executor
typedef enum spac_span_kind {
    SPAC_SPAN_DISPATCH = 0,
    SPAC_SPAN_DEVICE   = 1, // between dispatch and collect, in which the graph waits for the device: contains its work
    SPAC_SPAN_HOST     = 2, // host experts on the engine's threads
    SPAC_SPAN_COLLECT  = 3, // the graph waited for them
    SPAC_SPAN_COPY     = 4, // of one expert to the device
} spac_span_kind;

typedef struct spac_span {
    int32_t  kind; // spac_span_kind
    int32_t  il;
    uint64_t t_begin_us; // of CLOCK_MONOTONIC
    uint64_t t_end_us;
} spac_span;

typedef struct spac_device_info {
    char     name[64];
    char     description[128];
    int32_t  type;        // enum ggml_backend_dev_type
    uint64_t memory_free; // bytes
    uint64_t memory_total;
    void *   handle;     // ggml_backend_dev_t
    bool     has_pinned; // host memory of its own, from which copies are fast
} spac_device_info;

SPAC_API uint32_t     spac_abi_version(void);
SPAC_API const char * spac_last_error(void); // text of this thread's last failure; "" if none

// engine: one per context; free it before the context
SPAC_API spac_engine_params spac_engine_default_params(void);
SPAC_API spac_status        spac_engine_attach(struct llama_context * ctx, const spac_engine_params * params, spac_engine ** engine);
SPAC_API void               spac_engine_free(spac_engine * engine);                                                      // stops the worker, removes the hook, frees the pools
SPAC_API spac_status        spac_engine_get_tier(spac_engine * engine, spac_tier_info * info);                           // all zeros without one
SPAC_API spac_status        spac_engine_watch_draft(spac_engine * engine, struct llama_context * draft);                 // the predictor draft-gate, from now on
SPAC_API spac_board *       spac_engine_board(spac_engine * engine);                                                     // owned by the engine
SPAC_API spac_status        spac_engine_apply(spac_engine * engine);                                                     // take over the board's decision now (else at the next forward)
SPAC_API spac_status        spac_engine_wait_idle(spac_engine * engine, int32_t timeout_ms);                             // until no load is queued or in flight
SPAC_API spac_status        spac_engine_end_forward(spac_engine * engine);                                               // no forward is running: unpin, renew the byte budget
SPAC_API spac_status        spac_engine_cancel(spac_engine * engine);                                                    // drop queued loads; one in flight completes
SPAC_API spac_status        spac_engine_count_first(spac_engine * engine, int32_t n_tokens);                             // of the next forwards' tokens only the first ones are learned from; 0: all
SPAC_API spac_status        spac_engine_slot(spac_engine * engine, int32_t il, int32_t ie, int32_t * slot);              // -1: not resident
SPAC_API spac_status        spac_engine_take_spans(spac_engine * engine, spac_span * spans, int32_t n_max, int32_t * n); // since the last call; the first one starts recording

// board
SPAC_API spac_status             spac_board_open(const char * name, spac_board ** board); // of a running engine, by another process
SPAC_API void                    spac_board_close(spac_board * board);
SPAC_API spac_status             spac_board_owner(const char * name, int32_t * pid);                                // process of its engine, as that one numbers itself; 0: it is gone
SPAC_API spac_status             spac_board_remove(const char * name);                                              // one that a killed process left behind; a running engine's stays
SPAC_API spac_status             spac_board_make(const spac_board_geometry * geometry, spac_board ** board);        // of no engine, in private memory: for tests and simulations
SPAC_API const spac_board_view * spac_board_get_view(spac_board * board);                                           // its arrays; valid until it is closed, or its engine freed
SPAC_API bool                    spac_board_get_field(spac_board * board, int32_t index, spac_board_field * field); // one of them; false: there are no more
SPAC_API spac_status             spac_board_record_step(spac_board * board, const spac_step_record * record);
SPAC_API void                    spac_decision_begin(spac_board * board);
SPAC_API void                    spac_decision_end(spac_board * board);

// hidden states: the inputs of some layers, kept by each batch that is computed after it was opened; close it before the
// context. Only for architectures whose graphs name them: at the others llama.cpp aborts.
SPAC_API spac_status spac_hidden_states_open(struct llama_context * ctx, const int32_t * layers, int32_t n_layers, spac_hidden_states ** states); // the context is empty
SPAC_API spac_status spac_hidden_states_read(spac_hidden_states * states, int32_t n_tokens, float * out);                                         // of the last batch's first tokens, [n_tokens][n_layers][n_embd]
SPAC_API void        spac_hidden_states_close(spac_hidden_states * states);

// devices and memory
SPAC_API spac_status spac_backend_load_all(void); // register the ggml backends built beside this library
SPAC_API int32_t     spac_device_count(void);
SPAC_API spac_status spac_device_get_info(int32_t index, spac_device_info * info);
SPAC_API spac_status spac_device_add_rpc(const char * endpoint);                                                 // HOST:PORT; adds its devices
SPAC_API spac_status spac_devices_find(const char * names, int32_t * indices, int32_t * n);                      // [SPAC_N_DEVICES] what "auto" or names mean
SPAC_API void *      spac_cpu_buffer_type(void);                                                                 // for llama_model_params.tensor_buft_overrides
SPAC_API void *      spac_host_buffer_type(void);                                                                // the same: huge pages, weights as in the file
SPAC_API spac_status spac_has_kernels(int32_t type, bool * found);                                               // of the engine's own, for this machine; type: enum ggml_type
SPAC_API spac_status spac_kernels_name(const char ** name);                                                      // of those: "avx512"; "" if there are none
SPAC_API spac_status spac_tokens_per_expert(int32_t * n);                                                        // of a prompt, computed at once, that these kernels want; 0: few
SPAC_API spac_status spac_measure_host_gb_s(int32_t n_threads, double * gb_s);                                   // streaming read
SPAC_API spac_status spac_measure_kernel_gb_s(int32_t type, int32_t n_tokens, int32_t n_threads, double * gb_s); // weights of a type times 1 to 512 tokens, by the engine's own kernels
SPAC_API spac_status spac_measure_attention_gop_s(int32_t n_tokens, int32_t n_threads, double * gop_s);          // of 1 to 512 tokens to 512, 1e9 operations per second
SPAC_API spac_status spac_measure_link_gb_s(const char * device, double * gb_s);                                 // host to device copies

// values as they are written in options, flags and the environment: how each is read is decided only here
SPAC_API spac_status spac_read_size(const char * name, const char * text, uint64_t total_bytes, uint64_t * bytes); // "25%" of total_bytes, "4096" MiB, "4G", "4096B"; UINT64_MAX: "auto"; name: of the option, for the error
SPAC_API spac_status spac_check_value(const char * variable, const char * name, const char * text);                // whether it may be the value of PYSPAC_LOSSY, PYSPAC_BASELINE ... (env-values.cpp); of others it says nothing
SPAC_API spac_status spac_read_device_kind(const char * text, int32_t * kind);                                     // spac_device_kind
SPAC_API spac_status spac_read_cpu_range(const char * text, int32_t * first, int32_t * last);                      // "0-7", all open to this process

// cdef-end

#ifdef __cplusplus
}
#endif
