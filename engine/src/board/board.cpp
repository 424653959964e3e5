#include "board.h"

#include "base/status.h"
#include "board-file.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static constexpr uint64_t BOARD_MAGIC = 0x3142444341505321; // "!SPACDB1"
static constexpr size_t   ALIGN       = 64;

// offsets follow from the geometry alone, so that a reader need not trust the writer's
struct board_layout {
    size_t counts, prompt_counts, residency, expert_bytes, group, group_slots, layer_device, layer_stats, counters, ahead, devices, tier,
        in_memory, whole; // the engine's, with the header before them
    size_t records, n_records, routed_tokens, routed_experts, n_routed, upcoming, n_upcoming, n_looks;
    size_t decision_seq, utility, tau, load, n_load, byte_budget, want_whole, n_draft_max, looks_ahead, fallback; // the scheduler's
    size_t size;
};

struct spac_board_header {
    uint64_t            magic;
    uint32_t            abi_version;
    int32_t             pid; // of the engine's process
    uint64_t            size;
    spac_board_geometry geometry;
};

static board_layout make_layout(const spac_board_geometry & g) {
    const size_t n_layer = g.n_layer, n_cell = n_layer * g.n_expert, row_bytes = n_layer * g.n_expert_used * sizeof(uint16_t);

    board_layout l;
    size_t       end = 0;

    auto place = [&](size_t bytes) {
        const size_t offset = end;
        end                 = (end + bytes + ALIGN - 1) / ALIGN * ALIGN;
        return offset;
    };

    place(sizeof(spac_board_header));
    l.counts         = place(n_cell * sizeof(uint32_t));
    l.prompt_counts  = place(n_cell * sizeof(uint32_t));
    l.residency      = place(n_cell);
    l.expert_bytes   = place(n_layer * sizeof(uint32_t));
    l.group          = place(n_layer * sizeof(uint32_t));
    l.group_slots    = place(n_layer * sizeof(uint32_t));
    l.layer_device   = place(n_layer * sizeof(uint32_t));
    l.layer_stats    = place(n_layer * sizeof(spac_layer_stats));
    l.counters       = place(sizeof(spac_counters));
    l.ahead          = place(SPAC_N_AHEAD * sizeof(spac_ahead_stats));
    l.devices        = place(g.n_device * sizeof(spac_device_stats));
    l.tier           = place(sizeof(spac_tier_info));
    l.in_memory      = place(n_cell);
    l.whole          = place(n_layer);
    l.records        = place(SPAC_N_RECORDS * sizeof(spac_step_record));
    l.n_records      = place(sizeof(uint64_t));
    l.routed_tokens  = place(SPAC_N_ROUTED * sizeof(int32_t));
    l.routed_experts = place(SPAC_N_ROUTED * row_bytes);
    l.n_routed       = place(2 * sizeof(uint64_t));
    l.upcoming       = place(SPAC_N_UPCOMING * sizeof(int32_t));
    l.n_upcoming     = place(sizeof(uint32_t));
    l.n_looks        = place(sizeof(uint64_t));
    l.decision_seq   = place(sizeof(uint64_t));
    l.utility        = place(n_cell);
    l.tau            = place(n_layer);
    l.load           = place(n_cell * sizeof(uint32_t));
    l.n_load         = place(sizeof(uint32_t));
    l.byte_budget    = place(g.n_device * sizeof(uint64_t));
    l.want_whole     = place(n_layer);
    l.n_draft_max    = place(SPAC_N_SERVER_SLOTS * sizeof(int32_t));
    l.looks_ahead    = place(sizeof(uint32_t));
    l.fallback       = place(2 * sizeof(int32_t));
    l.size           = end;
    return l;
}

// ---- making and opening

static bool read_header(int fd, spac_board_header & header) {
    return pread(fd, &header, sizeof(header), 0) == (ssize_t) sizeof(header) && header.magic == BOARD_MAGIC;
}

int32_t spac_board::owner(const std::string & name) {
    const int         fd     = spac_board_file::open(name, O_RDONLY);
    spac_board_header header = {};
    const bool        is_one = read_header(fd, header);
    const bool        lives  = spac_board_file::is_locked(fd);
    close(fd);
    if (!is_one && !lives) {
        throw spac_error(SPAC_STATUS_BOARD, spac_format("\"%s\" is not a pyspac board", name.c_str()));
    }
    return lives ? std::max(1, header.pid) : 0;
}

static std::string name_owner(int fd) {
    spac_board_header header = {};
    return read_header(fd, header) ? spac_format("process %d", header.pid) : "a process";
}

spac_board::spac_board() = default;

spac_board * spac_board::create(const spac_board_geometry & geometry) {
    const board_layout          l = make_layout(geometry);
    std::unique_ptr<spac_board> board(new spac_board);
    board->geo    = geometry;
    board->memory = (char *) aligned_alloc(ALIGN, l.size);
    if (!board->memory) {
        throw spac_error(SPAC_STATUS_OUT_OF_MEMORY, spac_format("no memory for the board: %zu bytes for %u layers x %u experts", l.size,
                                                                geometry.n_layer, geometry.n_expert));
    }
    memset(board->memory, 0, l.size);
    const spac_board_view v = board->view();
    memset(v.tau, 1, geometry.n_layer);
    std::fill_n(v.byte_budget, geometry.n_device, UINT64_MAX);
    memset(v.n_draft_max, 0xff, SPAC_N_SERVER_SLOTS * sizeof(int32_t));
    *board->at<spac_board_header>(0) = { BOARD_MAGIC, SPAC_ABI_VERSION, getpid(), l.size, geometry };
    return board.release();
}

void spac_board::share(const std::string & name) {
    file = std::make_unique<spac_board_file>(name, memory, make_layout(geo).size, name_owner);
}

static void check_header(const spac_board_header & header, size_t length, const std::string & name) {
    if (header.abi_version != SPAC_ABI_VERSION) {
        throw spac_error(SPAC_STATUS_BOARD, spac_format("board \"%s\" has ABI version %u, this library %u: use the same build on both sides",
                                                        name.c_str(), header.abi_version, SPAC_ABI_VERSION));
    }
    const spac_board_geometry & g    = header.geometry;
    const bool                  sane = g.n_layer > 0 && g.n_layer <= 4096 && g.n_expert > 0 && g.n_expert <= 65536 && g.n_device > 0 && g.n_device <= SPAC_N_DEVICES;
    if (!sane || header.size != length) {
        throw spac_error(SPAC_STATUS_BOARD, spac_format("board \"%s\" is damaged: %zu bytes, of which its header says %llu, for %u layers x %u experts; "
                                                        "start its server again",
                                                        name.c_str(), length, (unsigned long long) header.size, g.n_layer, g.n_expert));
    }
    if (make_layout(g).size != length) { // builds of one ABI version, but not of one day
        throw spac_error(SPAC_STATUS_BOARD, spac_format("board \"%s\" comes from another build of pyspac: its %zu bytes for %u layers x %u experts are laid "
                                                        "out otherwise than here (%zu bytes); use the same build on both sides, and start its server again",
                                                        name.c_str(), length, g.n_layer, g.n_expert, make_layout(g).size));
    }
}

// what was checked is what is used: the header is read once
static spac_board_geometry read_geometry(int fd, const std::string & name, size_t & size) {
    struct stat       st     = {};
    spac_board_header header = {};
    if (fstat(fd, &st) != 0 || !read_header(fd, header)) {
        throw spac_error(SPAC_STATUS_BOARD, spac_format("\"%s\" is not a pyspac board", name.c_str()));
    }
    check_header(header, st.st_size, name);
    size = st.st_size;
    return header.geometry;
}

spac_board * spac_board::open(const std::string & name) {
    const int                   fd = spac_board_file::open(name, O_RDWR);
    std::unique_ptr<spac_board> board(new spac_board);
    try {
        size_t size = 0;
        board->geo  = read_geometry(fd, name, size);
        if (void * memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0); memory != MAP_FAILED) {
            board->memory = (char *) memory;
            board->mapped = size;
        } else {
            throw spac_error(SPAC_STATUS_BOARD, spac_format("board \"%s\" of %zu bytes cannot be mapped: %s", name.c_str(), size, strerror(errno)));
        }
    } catch (...) {
        close(fd);
        throw;
    }
    close(fd);
    return board.release();
}

spac_board::~spac_board() {
    if (mapped > 0) {
        munmap(memory, mapped);
    } else {
        ::free(memory);
    }
}

// ---- arrays

uint32_t * spac_board::counts() const {
    return at<uint32_t>(make_layout(geo).counts);
}

uint32_t * spac_board::prompt_counts() const {
    return at<uint32_t>(make_layout(geo).prompt_counts);
}
uint8_t * spac_board::residency() const {
    return at<uint8_t>(make_layout(geo).residency);
}
uint32_t * spac_board::expert_bytes() const {
    return at<uint32_t>(make_layout(geo).expert_bytes);
}
uint32_t * spac_board::group() const {
    return at<uint32_t>(make_layout(geo).group);
}
uint32_t * spac_board::group_slots() const {
    return at<uint32_t>(make_layout(geo).group_slots);
}
uint32_t * spac_board::layer_device() const {
    return at<uint32_t>(make_layout(geo).layer_device);
}
spac_device_stats * spac_board::devices() const {
    return at<spac_device_stats>(make_layout(geo).devices);
}
spac_layer_stats * spac_board::layer_stats() const {
    return at<spac_layer_stats>(make_layout(geo).layer_stats);
}
spac_ahead_stats * spac_board::ahead() const {
    return at<spac_ahead_stats>(make_layout(geo).ahead);
}

spac_counters * spac_board::counters() const {
    return at<spac_counters>(make_layout(geo).counters);
}

spac_tier_info * spac_board::tier() const {
    return at<spac_tier_info>(make_layout(geo).tier);
}

uint8_t * spac_board::in_memory() const {
    return at<uint8_t>(make_layout(geo).in_memory);
}

uint8_t * spac_board::whole() const {
    return at<uint8_t>(make_layout(geo).whole);
}

int32_t * spac_board::routed_tokens() const {
    return at<int32_t>(make_layout(geo).routed_tokens);
}
uint16_t * spac_board::routed_experts() const {
    return at<uint16_t>(make_layout(geo).routed_experts);
}

spac_board_view spac_board::view() const {
    const board_layout l = make_layout(geo);

    spac_board_view v = {};
    v.size            = sizeof(v);
    v.n_layer         = geo.n_layer;
    v.n_expert        = geo.n_expert;
    v.n_expert_used   = geo.n_expert_used;
    v.n_slots         = geo.n_slots;
    v.max_batch       = geo.max_batch;
    v.n_load_max      = geo.n_layer * geo.n_expert;
    v.counts          = counts();
    v.prompt_counts   = prompt_counts();
    v.residency       = residency();
    v.expert_bytes    = expert_bytes();
    v.group           = group();
    v.group_slots     = group_slots();
    v.layer_stats     = layer_stats();
    v.n_device        = geo.n_device;
    v.layer_device    = layer_device();
    v.devices         = devices();
    v.counters        = counters();
    v.ahead           = ahead();
    v.records         = at<spac_step_record>(l.records);
    v.n_records       = at<uint64_t>(l.n_records);
    v.routed_tokens   = routed_tokens();
    v.routed_experts  = routed_experts();
    v.n_routed        = at<uint64_t>(l.n_routed);
    v.upcoming        = at<int32_t>(l.upcoming);
    v.n_upcoming      = at<uint32_t>(l.n_upcoming);
    v.n_looks         = at<uint64_t>(l.n_looks);
    v.utility         = at<uint8_t>(l.utility);
    v.tau             = at<uint8_t>(l.tau);
    v.load            = at<uint32_t>(l.load);
    v.n_load          = at<uint32_t>(l.n_load);
    v.byte_budget     = at<uint64_t>(l.byte_budget);
    v.n_draft_max     = at<int32_t>(l.n_draft_max);
    v.looks_ahead     = at<uint32_t>(l.looks_ahead);
    v.fallback        = at<int32_t>(l.fallback);
    v.tier            = tier();
    v.in_memory       = in_memory();
    v.whole           = whole();
    v.want_whole      = at<uint8_t>(l.want_whole);
    return v;
}

// ---- what passes between the two sides

bool spac_board::write(size_t offset, size_t n) {
    return file->write(offset, memory + offset, n);
}

// from the file, if there is one: it is there that another process writes
bool spac_board::read(size_t offset, void * to, size_t n) const {
    if (file) {
        return file->read(offset, to, n);
    }
    std::copy_n(memory + offset, n, (char *) to); // of an empty decision nothing, to nowhere
    return true;
}

void spac_board::publish(bool even_if_idle) {
    if (!file) {
        return;
    }
    const board_layout          l = make_layout(geo);
    std::lock_guard<std::mutex> lock(file_mutex);
    is_torn = is_torn || !file->is_whole();
    if (is_torn) {
        is_torn = !file->resize() || !write(0, l.size);
    } else if (even_if_idle || memcmp(&published, counters(), sizeof(published)) != 0) {
        write(0, l.records);
    }
    published = *counters();
}

void spac_board::push_record(const spac_step_record & record) {
    const board_layout l = make_layout(geo);
    uint64_t *         n = at<uint64_t>(l.n_records);
    const size_t       i = *n % SPAC_N_RECORDS;

    at<spac_step_record>(l.records)[i] = record;
    __atomic_store_n(n, *n + 1, __ATOMIC_RELEASE);
    if (file) {
        std::lock_guard<std::mutex> lock(file_mutex);
        write(l.records + i * sizeof(record), sizeof(record));
        std::atomic_thread_fence(std::memory_order_release);
        write(l.n_records, sizeof(*n));
    }
}

uint64_t spac_board::begin_rows(int64_t n) {
    const board_layout l      = make_layout(geo);
    uint64_t * const   counts = at<uint64_t>(l.n_routed);
    __atomic_store_n(counts + 1, counts[0] + n, __ATOMIC_RELAXED);
    std::atomic_thread_fence(std::memory_order_release);
    if (file) {
        std::lock_guard<std::mutex> lock(file_mutex);
        write(l.n_routed + sizeof(*counts), sizeof(*counts));
    }
    return counts[0];
}

void spac_board::end_rows() {
    const board_layout l      = make_layout(geo);
    uint64_t * const   counts = at<uint64_t>(l.n_routed);
    const uint64_t     begin = counts[0], end = counts[1];
    if (file) {
        std::lock_guard<std::mutex> lock(file_mutex);
        const size_t                row_bytes = (size_t) geo.n_layer * geo.n_expert_used * sizeof(uint16_t);
        for (uint64_t first = begin; first < end;) { // the ring's two ends
            const size_t slot = first % SPAC_N_ROUTED, n = std::min<uint64_t>(end - first, SPAC_N_ROUTED - slot);
            write(l.routed_tokens + slot * sizeof(int32_t), n * sizeof(int32_t));
            write(l.routed_experts + slot * row_bytes, n * row_bytes);
            first += n;
        }
        std::atomic_thread_fence(std::memory_order_release);
    }
    __atomic_store_n(counts, end, __ATOMIC_RELEASE);
    if (file) {
        std::lock_guard<std::mutex> lock(file_mutex);
        write(l.n_routed, sizeof(*counts));
    }
}

bool spac_board::looks_ahead() const {
    uint32_t is_set = 0;
    return file && read(make_layout(geo).looks_ahead, &is_set, sizeof(is_set)) && is_set != 0;
}

void spac_board::look_ahead(const int32_t * tokens, int32_t n_tokens) {
    const board_layout          l       = make_layout(geo);
    uint64_t *                  n_looks = at<uint64_t>(l.n_looks);
    std::lock_guard<std::mutex> lock(file_mutex);
    *at<uint32_t>(l.n_upcoming) = (uint32_t) std::clamp(n_tokens, 0, SPAC_N_UPCOMING);
    std::copy_n(tokens, *at<uint32_t>(l.n_upcoming), at<int32_t>(l.upcoming));
    ++*n_looks;
    write(l.n_looks, sizeof(*n_looks));
    std::atomic_thread_fence(std::memory_order_release);
    write(l.upcoming, *at<uint32_t>(l.n_upcoming) * sizeof(int32_t));
    write(l.n_upcoming, sizeof(uint32_t));
    std::atomic_thread_fence(std::memory_order_release);
    ++*n_looks;
    write(l.n_looks, sizeof(*n_looks));
}

bool spac_board::read_decision(uint64_t seen, spac_decision & decision) const {
    const board_layout l   = make_layout(geo);
    const uint64_t     seq = decision_seq();
    if (seq == seen || seq == 0 || (seq & 1)) {
        return false;
    }
    const size_t n_cell = (size_t) geo.n_layer * geo.n_expert;
    decision.utility.resize(n_cell);
    decision.tau.resize(geo.n_layer);
    decision.byte_budget.resize(geo.n_device);
    uint32_t n_load = 0;
    bool     ok     = read(l.utility, decision.utility.data(), n_cell) && read(l.tau, decision.tau.data(), geo.n_layer) &&
              read(l.byte_budget, decision.byte_budget.data(), geo.n_device * sizeof(uint64_t)) && read(l.n_load, &n_load, sizeof(n_load));
    decision.load.resize(std::min<size_t>(n_load, n_cell));
    decision.want_whole.resize(geo.n_layer);
    ok = ok && read(l.load, decision.load.data(), decision.load.size() * sizeof(uint32_t)) && read(l.want_whole, decision.want_whole.data(), geo.n_layer);

    std::atomic_thread_fence(std::memory_order_acquire); // the second look comes after what was read
    decision.seq = seq;
    return ok && decision_seq() == seq; // else written meanwhile: next time
}

int32_t spac_board::n_draft_max(int32_t server_slot) const {
    if (server_slot < 0 || server_slot >= SPAC_N_SERVER_SLOTS) {
        return -1;
    }
    const size_t offset = make_layout(geo).n_draft_max + server_slot * sizeof(int32_t);
    int32_t      n      = -1;
    if (read(offset, &n, sizeof(n)) && n >= 0) {
        return n;
    }
    return std::max(-1, *at<int32_t>(offset)); // of a scheduler in the engine's own process, where the board has a file
}

void spac_board::decision_begin() {
    __atomic_fetch_or(at<uint64_t>(make_layout(geo).decision_seq), 1, __ATOMIC_ACQ_REL);
    std::atomic_thread_fence(std::memory_order_release); // what follows is seen after the odd number
}

// an engine's own board with a name: the scheduler is in its process, but the file is where decisions are read
void spac_board::decision_end() {
    const board_layout l   = make_layout(geo);
    uint64_t *         seq = at<uint64_t>(l.decision_seq);
    if (file) {
        std::lock_guard<std::mutex> lock(file_mutex);
        write(l.decision_seq, sizeof(*seq));
        std::atomic_thread_fence(std::memory_order_release);
        write(l.utility, l.n_draft_max - l.utility); // limits are written each for itself
        std::atomic_thread_fence(std::memory_order_release);
        __atomic_fetch_add(seq, 1, __ATOMIC_ACQ_REL);
        write(l.decision_seq, sizeof(*seq));
        return;
    }
    __atomic_fetch_add(seq, 1, __ATOMIC_ACQ_REL);
}

uint64_t spac_board::decision_seq() const {
    const size_t offset = make_layout(geo).decision_seq;
    uint64_t     seq    = 0;
    if (!file) {
        return __atomic_load_n(at<uint64_t>(offset), __ATOMIC_ACQUIRE);
    }
    if (!read(offset, &seq, sizeof(seq))) {
        return 0; // truncated
    }
    std::atomic_thread_fence(std::memory_order_acquire);
    return seq;
}
