// The ABI: checks arguments, turns exceptions into a status.
#include "base/engine-params.h"
#include "base/status.h"
#include "board/board-file.h"
#include "engine.h"

static void require(bool ok, const char * what) {
    if (!ok) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, what);
    }
}

static void require_between(const char * name, int32_t value, int32_t low, int32_t high) {
    if (value < low || value > high) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_format("%s cannot be %d: give %d to %d", name, value, low, high));
    }
}

uint32_t spac_abi_version(void) {
    return SPAC_ABI_VERSION;
}

// ---- engine

// what takes its locks, or waits for its threads
static void require_at_home(const spac_engine * engine) {
    require(!engine->is_away(), spac_home_process::ELSEWHERE);
}

spac_engine_params spac_engine_default_params(void) {
    spac_engine_params p = {};
    p.device             = "auto";
    p.cache              = "auto";
    p.host_mode          = SPAC_HOST_AUTO;
    p.max_batch          = 16;
    p.evict              = true;
    p.fill               = true;
    return p;
}

static spac_engine_params checked(const spac_engine_params * params) {
    const spac_engine_params p = params ? *params : spac_engine_default_params();
    require_between("max_batch", p.max_batch, 1, SPAC_MAX_BATCH);
    require_between("n_threads", p.n_threads, 0, SPAC_MAX_THREADS);
    require_between("next_layer", p.next_layer, 0, SPAC_NEXT_LAYER_MAX);
    require(p.host_mode >= SPAC_HOST_AUTO && p.host_mode <= SPAC_HOST_IN_STREAM, "host_mode has to be auto, in-graph, executor or in-stream");
    require(p.stage >= SPAC_STAGE_AUTO && p.stage <= SPAC_STAGE_NEVER, "stage has to be auto, always or never");
    require(p.host_kernels >= SPAC_KERNELS_AUTO && p.host_kernels <= SPAC_KERNELS_GGML, "host_kernels has to be auto, spac or ggml");
    require(p.copy_gb_s == 0 || p.copy_gb_s >= 0.001, "copy_gb_s has to be 0 (no throttle), or 0.001 and more");
    return p;
}

spac_status spac_engine_attach(struct llama_context * ctx, const spac_engine_params * params, spac_engine ** engine) {
    return spac_guard([&] {
        require(ctx && engine, "spac_engine_attach: no context, or nowhere to put the engine");
        *engine = nullptr;
        *engine = new spac_engine(ctx, checked(params));
    });
}

void spac_engine_free(spac_engine * engine) {
    spac_engine::free(engine);
}

spac_status spac_engine_get_tier(spac_engine * engine, spac_tier_info * info) {
    return spac_guard([&] {
        require(engine && info, "spac_engine_get_tier: no engine, or no info");
        spac_tier_info tier = {};
        if (engine->is_away()) {
            snprintf(tier.error, sizeof(tier.error), "%s", spac_home_process::ELSEWHERE);
        } else if (engine->tier) {
            tier = engine->tier->info();
        }
        *info = tier;
    });
}

spac_status spac_engine_watch_draft(spac_engine * engine, struct llama_context * draft) {
    return spac_guard([&] {
        require(engine && draft, "spac_engine_watch_draft: no engine, or no context of a draft model");
        require_at_home(engine);
        engine->watch_draft(draft);
    });
}

spac_board * spac_engine_board(spac_engine * engine) {
    return engine ? engine->board.get() : nullptr;
}

spac_status spac_engine_apply(spac_engine * engine) {
    return spac_guard([&] {
        require(engine, "spac_engine_apply: no engine");
        require_at_home(engine);
        engine->decisions.take_over();
    });
}

spac_status spac_engine_wait_idle(spac_engine * engine, int32_t timeout_ms) {
    return spac_guard([&] {
        require(engine, "spac_engine_wait_idle: no engine");
        require_at_home(engine);
        if (!engine->cache.wait_idle(timeout_ms)) {
            throw spac_error(SPAC_STATUS_TIMEOUT, spac_format("loads were still under way after %d ms", timeout_ms));
        }
    });
}

spac_status spac_engine_end_forward(spac_engine * engine) {
    return spac_guard([&] {
        require(engine, "spac_engine_end_forward: no engine");
        require_at_home(engine);
        engine->end_forward();
    });
}

spac_status spac_engine_cancel(spac_engine * engine) {
    return spac_guard([&] {
        require(engine, "spac_engine_cancel: no engine");
        require_at_home(engine);
        engine->cache.cancel();
    });
}

spac_status spac_engine_count_first(spac_engine * engine, int32_t n_tokens) {
    return spac_guard([&] {
        require(engine && n_tokens >= 0, "spac_engine_count_first: no engine, or fewer than no tokens");
        require_at_home(engine);
        engine->count_first(n_tokens);
    });
}

spac_status spac_engine_slot(spac_engine * engine, int32_t il, int32_t ie, int32_t * slot) {
    return spac_guard([&] {
        require(engine && slot, "spac_engine_slot: no engine, or nowhere to put the slot");
        require_at_home(engine);
        const spac_board_geometry & g = engine->board->geometry();
        require(il >= 0 && (uint32_t) il < g.n_layer && ie >= 0 && (uint32_t) ie < g.n_expert, "spac_engine_slot: no such layer or expert");
        *slot = engine->cache.slot_of(il, ie);
    });
}

spac_status spac_engine_take_spans(spac_engine * engine, spac_span * spans, int32_t n_max, int32_t * n) {
    return spac_guard([&] {
        require(engine && spans && n && n_max >= 0, "spac_engine_take_spans: no engine, or nowhere to put the spans");
        require_at_home(engine);
        *n = engine->timeline.take(spans, n_max);
    });
}

// ---- board

spac_status spac_board_open(const char * name, spac_board ** board) {
    return spac_guard([&] {
        require(name && board, "spac_board_open: no name, or nowhere to put the board");
        *board = nullptr;
        *board = spac_board::open(name);
    });
}

spac_status spac_board_owner(const char * name, int32_t * pid) {
    return spac_guard([&] {
        require(name && pid, "spac_board_owner: no name, or nowhere to put the process id");
        *pid = spac_board::owner(name);
    });
}

spac_status spac_board_remove(const char * name) {
    return spac_guard([&] {
        require(name, "spac_board_remove: no name");
        spac_board_file::remove_left_behind(name);
    });
}

void spac_board_close(spac_board * board) {
    delete board;
}

spac_status spac_board_make(const spac_board_geometry * geometry, spac_board ** board) {
    return spac_guard([&] {
        require(geometry && board, "spac_board_make: no geometry, or nowhere to put the board");
        *board = nullptr;
        require(spac_board::is_sane(*geometry), "spac_board_make: no layers, experts or devices, or too many of them");
        *board = spac_board::create(*geometry);
    });
}

const spac_board_view * spac_board_get_view(spac_board * board) {
    return board ? &board->view() : nullptr;
}

bool spac_board_get_field(spac_board * board, int32_t index, spac_board_field * field) {
    if (!board || !field || index < 0 || index >= (int32_t) board->fields().size()) {
        return false;
    }
    *field = board->fields()[index];
    return true;
}

spac_status spac_board_record_step(spac_board * board, const spac_step_record * record) {
    return spac_guard([&] {
        require(board && record, "spac_board_record_step: no board, or no record");
        board->push_record(*record);
    });
}

void spac_decision_begin(spac_board * board) {
    if (board) {
        board->decision_begin();
    }
}

void spac_decision_end(spac_board * board) {
    if (board) {
        board->decision_end();
    }
}

// ---- values

spac_status spac_read_size(const char * name, const char * text, uint64_t total_bytes, uint64_t * bytes) {
    return spac_guard([&] {
        require(name && text && bytes, "spac_read_size: no name, no text, or nowhere to put the bytes");
        *bytes = spac_size_bytes(name, text, total_bytes);
    });
}

spac_status spac_read_device_kind(const char * text, int32_t * kind) {
    return spac_guard([&] {
        require(text && kind, "spac_read_device_kind: no text, or nowhere to put the kind");
        *kind = spac_read_device(text);
    });
}

spac_status spac_read_cpu_range(const char * text, int32_t * first, int32_t * last) {
    return spac_guard([&] {
        require(text && first && last, "spac_read_cpu_range: no text, or nowhere to put the cores");
        const std::vector<int> cpus = spac_parse_cpu_range(text);
        *first                      = cpus.front();
        *last                       = cpus.back();
    });
}
