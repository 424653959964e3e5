#include "board.h"

#include "status.h"

#include <cerrno>
#include <csignal>
#include <cstdio>
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
    size_t counts, residency, expert_bytes, group, group_slots, layer_stats, counters, records, n_records;
    size_t utility, tau, load, n_load, byte_budget, n_draft_max;
    size_t size;
};

struct spac_board_header {
    uint64_t            magic;
    uint32_t            abi_version;
    int32_t             pid; // of the engine's process
    uint64_t            size;
    spac_board_geometry geometry;
    uint64_t            decision_seq;
};

static board_layout make_layout(const spac_board_geometry & g) {
    const size_t n_layer = g.n_layer, n_cell = n_layer * g.n_expert;

    board_layout l;
    size_t       end = 0;

    auto place = [&](size_t bytes) {
        const size_t offset = end;
        end                 = (end + bytes + ALIGN - 1) / ALIGN * ALIGN;
        return offset;
    };

    place(sizeof(spac_board_header));
    l.counts       = place(n_cell * sizeof(uint32_t));
    l.residency    = place(n_cell);
    l.expert_bytes = place(n_layer * sizeof(uint32_t));
    l.group        = place(n_layer * sizeof(uint32_t));
    l.group_slots  = place(n_layer * sizeof(uint32_t));
    l.layer_stats  = place(n_layer * sizeof(spac_layer_stats));
    l.counters     = place(sizeof(spac_counters));
    l.records      = place(SPAC_N_RECORDS * sizeof(spac_step_record));
    l.n_records    = place(sizeof(uint64_t));
    l.utility      = place(n_cell);
    l.tau          = place(n_layer);
    l.load         = place(n_cell * sizeof(uint32_t));
    l.n_load       = place(sizeof(uint32_t));
    l.byte_budget  = place(sizeof(uint64_t));
    l.n_draft_max  = place(SPAC_N_SERVER_SLOTS * sizeof(int32_t));
    l.size         = end;
    return l;
}

static std::string shm_path(const std::string & name) {
    const bool ok = !name.empty() && name.size() < 200 && name.find('/') == std::string::npos;
    if (!ok) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_format("board name \"%s\": use 1 to 199 characters without '/'", name.c_str()));
    }
    return "/pyspac." + name;
}

static spac_board_header read_header(const std::string & path, const std::string & name) {
    const int         fd       = shm_open(path.c_str(), O_RDONLY, 0);
    spac_board_header header   = {};
    const bool        readable = fd >= 0 && read(fd, &header, sizeof(header)) == (ssize_t) sizeof(header);
    if (fd >= 0) {
        close(fd);
    }
    if (!readable || header.magic != BOARD_MAGIC) {
        throw spac_error(SPAC_STATUS_BOARD, spac_format("no board \"%s\": is its server running?", name.c_str()));
    }
    return header;
}

int32_t spac_board::owner(const std::string & name) {
    return read_header(shm_path(name), name).pid;
}

// a zombie has given up its memory, whatever kill() says
static bool is_alive(int32_t pid) {
    if (pid <= 0 || (kill(pid, 0) != 0 && errno != EPERM)) {
        return false;
    }
    FILE * stat  = fopen(spac_format("/proc/%d/stat", pid).c_str(), "r");
    char   state = '?';
    if (stat) {
        if (fscanf(stat, "%*d (%*[^)]) %c", &state) != 1) {
            state = '?';
        }
        fclose(stat);
    }
    return state != 'Z';
}

// a board left behind by a killed process is removed; one in use is refused
static void remove_stale(const std::string & path, const std::string & name) {
    const int fd = shm_open(path.c_str(), O_RDONLY, 0);
    if (fd < 0) {
        return;
    }
    spac_board_header header   = {};
    const bool        readable = read(fd, &header, sizeof(header)) == (ssize_t) sizeof(header);
    close(fd);

    if (readable && header.magic == BOARD_MAGIC && is_alive(header.pid)) {
        throw spac_error(SPAC_STATUS_BOARD, spac_format("board \"%s\" is in use by process %d: choose another name or stop that process",
                                                        name.c_str(), header.pid));
    }
    shm_unlink(path.c_str());
}

static char * map_shared(const std::string & path, int flags, size_t size) {
    const int fd = shm_open(path.c_str(), flags, 0600);
    if (fd < 0) {
        throw spac_error(SPAC_STATUS_BOARD, spac_format("shared memory %s: %s", path.c_str(), strerror(errno)));
    }
    struct stat  st       = {};
    const bool   creating = flags & O_CREAT;
    const bool   sized    = creating ? posix_fallocate(fd, 0, size) == 0 : fstat(fd, &st) == 0;
    const size_t length   = creating ? size : (size_t) st.st_size;

    void * memory = sized && length >= sizeof(spac_board_header) ? mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
    close(fd);
    if (memory == MAP_FAILED) {
        if (creating) {
            shm_unlink(path.c_str());
        }
        throw spac_error(SPAC_STATUS_BOARD, spac_format("shared memory %s of %zu bytes could not be mapped", path.c_str(), length));
    }
    return (char *) memory;
}

void spac_board::map(void * memory, size_t size) {
    this->memory = (char *) memory;
    this->size   = size;
    this->header = (spac_board_header *) memory;
}

spac_board * spac_board::create(const std::string & name, const spac_board_geometry & geometry) {
    const size_t size  = make_layout(geometry).size;
    spac_board * board = new spac_board;

    board->geo      = geometry;
    board->is_owner = true;
    try {
        if (name.empty()) {
            board->map(aligned_alloc(ALIGN, size), size);
        } else {
            const std::string path = shm_path(name);
            remove_stale(path, name);
            board->map(map_shared(path, O_CREAT | O_EXCL | O_RDWR, size), size);
            board->shm_name = path;
        }
    } catch (...) {
        delete board;
        throw;
    }

    memset(board->memory, 0, size);
    const spac_board_view v = board->view();
    memset(v.tau, 1, geometry.n_layer);
    *v.byte_budget = UINT64_MAX;
    memset(v.n_draft_max, 0xff, SPAC_N_SERVER_SLOTS * sizeof(int32_t));

    board->header->abi_version = SPAC_ABI_VERSION;
    board->header->pid         = getpid();
    board->header->size        = size;
    board->header->geometry    = geometry;
    __atomic_store_n(&board->header->magic, BOARD_MAGIC, __ATOMIC_RELEASE);
    return board;
}

static void check_header(const spac_board_header & header, size_t length, const std::string & name) {
    if (header.magic != BOARD_MAGIC) {
        throw spac_error(SPAC_STATUS_BOARD, spac_format("\"%s\" is not a pyspac board", name.c_str()));
    }
    if (header.abi_version != SPAC_ABI_VERSION) {
        throw spac_error(SPAC_STATUS_BOARD, spac_format("board \"%s\" has ABI version %u, this library %u: use the same build on both sides",
                                                        name.c_str(), header.abi_version, SPAC_ABI_VERSION));
    }
    const spac_board_geometry & g    = header.geometry;
    const bool                  sane = g.n_layer > 0 && g.n_layer <= 4096 && g.n_expert > 0 && g.n_expert <= 65536;
    if (!sane || header.size != length || make_layout(g).size != length) {
        throw spac_error(SPAC_STATUS_BOARD, spac_format("board \"%s\": %u layers x %u experts do not fit its %zu bytes", name.c_str(),
                                                        g.n_layer, g.n_expert, length));
    }
}

spac_board * spac_board::open(const std::string & name) {
    const std::string path = shm_path(name);
    struct stat       st   = {};
    const int         fd   = shm_open(path.c_str(), O_RDONLY, 0);
    if (fd < 0 || fstat(fd, &st) != 0) {
        throw spac_error(SPAC_STATUS_BOARD, spac_format("no board \"%s\": is its server running?", name.c_str()));
    }
    close(fd);

    char *       memory = map_shared(path, O_RDWR, 0);
    spac_board * board  = new spac_board;
    board->map(memory, st.st_size);
    try {
        check_header(*board->header, st.st_size, name);
    } catch (...) {
        delete board;
        throw;
    }
    board->geo = board->header->geometry;
    return board;
}

spac_board::~spac_board() {
    if (shm_name.empty() && is_owner) {
        ::free(memory);
        return;
    }
    if (memory) {
        munmap(memory, size);
    }
    if (is_owner) {
        shm_unlink(shm_name.c_str());
    }
}

uint32_t * spac_board::counts() const {
    return at<uint32_t>(make_layout(geo).counts);
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
spac_layer_stats * spac_board::layer_stats() const {
    return at<spac_layer_stats>(make_layout(geo).layer_stats);
}
spac_counters * spac_board::counters() const {
    return at<spac_counters>(make_layout(geo).counters);
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
    v.residency       = residency();
    v.expert_bytes    = expert_bytes();
    v.group           = group();
    v.group_slots     = group_slots();
    v.layer_stats     = layer_stats();
    v.counters        = counters();
    v.records         = at<spac_step_record>(l.records);
    v.n_records       = at<uint64_t>(l.n_records);
    v.utility         = at<uint8_t>(l.utility);
    v.tau             = at<uint8_t>(l.tau);
    v.load            = at<uint32_t>(l.load);
    v.n_load          = at<uint32_t>(l.n_load);
    v.byte_budget     = at<uint64_t>(l.byte_budget);
    v.n_draft_max     = at<int32_t>(l.n_draft_max);
    return v;
}

void spac_board::push_record(const spac_step_record & record) {
    const board_layout l                                 = make_layout(geo);
    uint64_t *         n                                 = at<uint64_t>(l.n_records);
    at<spac_step_record>(l.records)[*n % SPAC_N_RECORDS] = record;
    __atomic_store_n(n, *n + 1, __ATOMIC_RELEASE);
}

void spac_board::decision_begin() {
    __atomic_fetch_or(&header->decision_seq, 1, __ATOMIC_ACQ_REL);
}

void spac_board::decision_end() {
    __atomic_fetch_add(&header->decision_seq, 1, __ATOMIC_ACQ_REL);
}

uint64_t spac_board::decision_seq() const {
    return __atomic_load_n(&header->decision_seq, __ATOMIC_ACQUIRE);
}
