#include "board.h"

#include "base/status.h"
#include "board-file.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <functional>
#include <numeric>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static constexpr uint64_t BOARD_MAGIC = 0x3142444341505321; // "!SPACDB1"
static constexpr size_t   ALIGN       = 64;

struct spac_board_header {
    uint64_t            magic;
    uint32_t            abi_version;
    int32_t             pid; // of the engine's process
    uint64_t            size;
    spac_board_geometry geometry;
};

static size_t aligned(size_t n_bytes) {
    return (n_bytes + ALIGN - 1) / ALIGN * ALIGN;
}

static spac_board_field make_field(spac_board_field field, size_t n_bytes, std::initializer_list<uint32_t> dims) {
    std::copy(dims.begin(), dims.end(), field.dims);
    field.n_dims  = (int32_t) dims.size();
    field.n_bytes = std::accumulate(dims.begin(), dims.end(), n_bytes, std::multiplies<size_t>());
    return field;
}

// the arrays follow only from the geometry, so that a reader need not trust the writer's
static std::vector<spac_board_field> list_fields(const spac_board_geometry & g) {
    const auto [n_layer, n_expert, n_expert_used, n_slots, max_batch, n_device] = g;

#define SPAC_DIMS(...) { __VA_ARGS__ }
#define SPAC_FIELD(name, type, shape, writer, meaning) \
    make_field({ #name, #type, #shape, meaning, SPAC_WRITER_##writer, 0, {}, 0, nullptr }, sizeof(type), SPAC_DIMS shape),
    return { SPAC_BOARD_FIELDS(SPAC_FIELD) };
#undef SPAC_FIELD
#undef SPAC_DIMS
}

static size_t size_of(const std::vector<spac_board_field> & fields) {
    return std::accumulate(fields.begin(), fields.end(), aligned(sizeof(spac_board_header)),
                           [](size_t sum, const spac_board_field & field) { return sum + aligned(field.n_bytes); });
}

void spac_board::place() {
    char * end = memory + aligned(sizeof(spac_board_header));
    for (spac_board_field & field : list) {
        field.data = end;
        end += aligned(field.n_bytes);
    }
    const spac_board_field * field = list.data();
#define SPAC_POINTER(name, type, shape, writer, meaning) arrays.name = (type *) (field++)->data;
    SPAC_BOARD_FIELDS(SPAC_POINTER)
#undef SPAC_POINTER
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
    std::unique_ptr<spac_board> board(new spac_board);
    board->arrays.geometry = geometry;
    board->list            = list_fields(geometry);
    const size_t size      = size_of(board->list);
    board->memory          = (char *) aligned_alloc(ALIGN, size);
    if (!board->memory) {
        throw spac_error(SPAC_STATUS_OUT_OF_MEMORY, spac_format("no memory for the board: %zu bytes for %u layers x %u experts", size,
                                                                geometry.n_layer, geometry.n_expert));
    }
    memset(board->memory, 0, size);
    board->place();
    memset(board->tau(), 1, geometry.n_layer);
    std::fill_n(board->byte_budget(), geometry.n_device, UINT64_MAX);
    std::fill_n(board->n_draft_max(), SPAC_N_SERVER_SLOTS, -1);
    std::fill_n(board->n_draft_matched(), SPAC_N_SERVER_SLOTS * SPAC_N_MATCHES, -1);
    *(spac_board_header *) board->memory = { BOARD_MAGIC, SPAC_ABI_VERSION, getpid(), size, geometry };
    return board.release();
}

void spac_board::share(const std::string & name) {
    file = std::make_unique<spac_board_file>(name, memory, size_of(list), name_owner);
}

bool spac_board::is_sane(const spac_board_geometry & g) {
    return g.n_layer > 0 && g.n_layer <= 4096 && g.n_expert > 0 && g.n_expert <= 65536 && g.n_device > 0 && g.n_device <= SPAC_N_DEVICES;
}

static void check_header(const spac_board_header & header, size_t length, const std::string & name) {
    if (header.abi_version != SPAC_ABI_VERSION) {
        throw spac_error(SPAC_STATUS_BOARD, spac_format("board \"%s\" has ABI version %u, this library %u: use the same build on both sides",
                                                        name.c_str(), header.abi_version, SPAC_ABI_VERSION));
    }
    const spac_board_geometry & g = header.geometry;
    if (!spac_board::is_sane(g) || header.size != length) {
        throw spac_error(SPAC_STATUS_BOARD, spac_format("board \"%s\" is damaged: %zu bytes, of which its header says %llu, for %u layers x %u experts; "
                                                        "start its server again",
                                                        name.c_str(), length, (unsigned long long) header.size, g.n_layer, g.n_expert));
    }
    if (const size_t size = size_of(list_fields(g)); size != length) { // builds of one ABI version, but not of one day
        throw spac_error(SPAC_STATUS_BOARD, spac_format("board \"%s\" comes from another build of pyspac: its %zu bytes for %u layers x %u experts are laid "
                                                        "out otherwise than here (%zu bytes); use the same build on both sides, and start its server again",
                                                        name.c_str(), length, g.n_layer, g.n_expert, size));
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
        size_t size            = 0;
        board->arrays.geometry = read_geometry(fd, name, size);
        board->list            = list_fields(board->geometry());
        if (void * memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0); memory != MAP_FAILED) {
            board->memory = (char *) memory;
            board->mapped = size;
            board->place();
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

// ---- what passes between the two sides

bool spac_board::write(const void * first, const void * end) {
    return file->write((const char *) first - memory, first, (const char *) end - (const char *) first);
}

// from the file, if there is one: it is there that another process writes
template <typename T>
bool spac_board::read(const T * from, T * to, size_t n) const {
    if (file) {
        return file->read((const char *) from - memory, to, n * sizeof(T));
    }
    std::copy_n(from, n, to); // of an empty decision nothing, to nowhere
    return true;
}

void spac_board::publish(bool even_if_idle) {
    if (!file) {
        return;
    }
    std::lock_guard<std::mutex> lock(file_mutex);
    is_torn = is_torn || !file->is_whole();
    if (is_torn) {
        is_torn = !file->resize() || !write(memory, memory + size_of(list));
    } else if (even_if_idle || memcmp(&published, counters(), sizeof(published)) != 0) {
        const bool has_tier = tier()->n_slots > 0;
        write(memory, has_tier ? (const void *) records() : tier()); // all of SPAC_WRITER_FORWARD, but what has nothing to say
    }
    published = *counters();
}

void spac_board::push_record(const spac_step_record & record) {
    uint64_t * const         n    = n_records();
    spac_step_record * const here = records() + *n % SPAC_N_RECORDS;

    *here = record;
    __atomic_store_n(n, *n + 1, __ATOMIC_RELEASE);
    if (file) {
        std::lock_guard<std::mutex> lock(file_mutex);
        write(here, here + 1);
        std::atomic_thread_fence(std::memory_order_release);
        write(n, n + 1);
    }
}

uint64_t spac_board::begin_rows(int64_t n) {
    uint64_t * const counts = n_routed();
    __atomic_store_n(counts + 1, counts[0] + n, __ATOMIC_RELAXED);
    std::atomic_thread_fence(std::memory_order_release);
    if (file) {
        std::lock_guard<std::mutex> lock(file_mutex);
        write(counts + 1, counts + 2);
    }
    return counts[0];
}

void spac_board::end_rows() {
    uint64_t * const counts = n_routed();
    const uint64_t   begin = counts[0], end = counts[1];
    if (file) {
        std::lock_guard<std::mutex> lock(file_mutex);
        const size_t                n_cells = (size_t) geometry().n_layer * geometry().n_expert_used;
        for (uint64_t first = begin; first < end;) { // the ring's two ends
            const size_t slot = first % SPAC_N_ROUTED, n = std::min<uint64_t>(end - first, SPAC_N_ROUTED - slot);
            write(routed_tokens() + slot, routed_tokens() + slot + n);
            write(routed_experts() + slot * n_cells, routed_experts() + (slot + n) * n_cells);
            first += n;
        }
        std::atomic_thread_fence(std::memory_order_release);
    }
    __atomic_store_n(counts, end, __ATOMIC_RELEASE);
    if (file) {
        std::lock_guard<std::mutex> lock(file_mutex);
        write(counts, counts + 1);
    }
}

bool spac_board::is_asked_ahead() const {
    return asks_ahead || __atomic_load_n(looks_ahead(), __ATOMIC_RELAXED) != 0;
}

void spac_board::look_ahead(const int32_t * tokens, int32_t n_tokens) {
    if (!file) {
        return;
    }
    std::lock_guard<std::mutex> lock(file_mutex);
    *n_upcoming() = (uint32_t) std::clamp(n_tokens, 0, SPAC_N_UPCOMING);
    std::copy_n(tokens, *n_upcoming(), upcoming());
    ++*n_looks();
    write(n_looks(), n_looks() + 1);
    std::atomic_thread_fence(std::memory_order_release);
    write(upcoming(), upcoming() + *n_upcoming());
    write(n_upcoming(), n_upcoming() + 1);
    std::atomic_thread_fence(std::memory_order_release);
    ++*n_looks();
    write(n_looks(), n_looks() + 1);
}

bool spac_board::read_decision(uint64_t seen, spac_decision & decision) {
    const uint64_t seq = look_at_decision();
    if (seq == seen || seq == 0 || (seq & 1)) {
        return false;
    }
    const auto take = [&](auto & to, const auto * from, size_t n) {
        to.resize(n);
        return read(from, to.data(), n);
    };
    const spac_board_geometry & g      = geometry();
    const size_t                n_cell = (size_t) g.n_layer * g.n_expert;
    uint32_t                    n      = 0;
    const bool                  ok     = take(decision.utility, utility(), n_cell) && take(decision.tau, tau(), g.n_layer) &&
                    take(decision.byte_budget, byte_budget(), g.n_device) && take(decision.want_whole, want_whole(), g.n_layer) &&
                    read(n_load(), &n, 1) && take(decision.load, load(), std::min<size_t>(n, n_cell));

    std::atomic_thread_fence(std::memory_order_acquire); // the second look comes after what was read
    decision.seq = seq;
    return ok && look_at_decision() == seq; // else written meanwhile: next time
}

// 4 to 7 tokens are alike, and so on
static int32_t match_kind(int32_t n_matched) {
    return n_matched < 4 ? n_matched : 33 - __builtin_clz(std::min(n_matched, SPAC_N_MATCHED_MAX));
}

int32_t spac_board::draft_limit(int32_t server_slot, int32_t n_matched) const {
    if (server_slot < 0 || server_slot >= SPAC_N_SERVER_SLOTS) {
        return -1;
    }
    const int32_t * const limit = n_matched > 0 ? n_draft_matched() + server_slot * SPAC_N_MATCHES + match_kind(n_matched) : n_draft_max() + server_slot;
    int32_t               n     = -1;
    if (read(limit, &n, 1) && n >= 0) {
        return n;
    }
    return std::max(-1, *limit); // of a scheduler in the engine's own process, where the board has a file
}

void spac_board::decision_begin() {
    __atomic_fetch_or(decision_seq(), 1, __ATOMIC_ACQ_REL);
    std::atomic_thread_fence(std::memory_order_release); // what follows is seen after the odd number
}

// an engine's own board with a name: the scheduler is in its process, but the file is where decisions are read
void spac_board::decision_end() {
    uint64_t * const seq = decision_seq();
    if (file) {
        std::lock_guard<std::mutex> lock(file_mutex);
        write(seq, seq + 1);
        std::atomic_thread_fence(std::memory_order_release);
        write(utility(), n_draft_max()); // all of SPAC_WRITER_DECISION
        std::atomic_thread_fence(std::memory_order_release);
        __atomic_fetch_add(seq, 1, __ATOMIC_ACQ_REL);
        write(seq, seq + 1);
        return;
    }
    __atomic_fetch_add(seq, 1, __ATOMIC_ACQ_REL);
}

// in one read where it is in a file: it is done for every forward
uint64_t spac_board::look_at_decision() {
    if (!file) {
        return __atomic_load_n(decision_seq(), __ATOMIC_ACQUIRE);
    }
    struct {
        alignas(ALIGN) uint32_t looks_ahead;
        alignas(ALIGN) uint64_t seq;
    } found = {};
    static_assert(sizeof(found) == 2 * ALIGN, "as they lie on the board, one after the other");
    const bool ok = read((const char *) looks_ahead(), (char *) &found, sizeof(found));
    asks_ahead    = ok && found.looks_ahead != 0;
    std::atomic_thread_fence(std::memory_order_acquire);
    return ok ? found.seq : 0; // truncated
}
