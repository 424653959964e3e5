// The board, private and shared: two sides, many at once, and a file that somebody else truncates, removes or scribbles on.
#include "base/status.h"
#include "board/board.h"
#include "check.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <fcntl.h>
#include <memory>
#include <sched.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

static const spac_board_geometry GEOMETRY = { 3, 8, 2, 5, 16, 1 };

static const pid_t TEST_PID = getpid(); // in its children too

static std::string unique_name() {
    return "test-" + std::to_string(TEST_PID);
}

static std::string shm_file() {
    return "/dev/shm/pyspac." + unique_name();
}

template <typename F>
static std::string error_of(F && fn) {
    try {
        fn();
    } catch (const spac_error & e) {
        CHECK(e.status == SPAC_STATUS_BOARD || e.status == SPAC_STATUS_INVALID_ARGUMENT);
        return e.what();
    }
    return "";
}

static void test_private() {
    spac_board *            board = spac_board::create(GEOMETRY);
    const spac_board_view & v     = board->view();
    CHECK(v.geometry.n_layer == 3 && v.geometry.n_expert == 8 && v.geometry.n_slots == 5);
    CHECK(*v.byte_budget == UINT64_MAX && v.tau[2] == 1 && v.n_draft_max[63] == -1);
    delete board;
}

// what is written in one go lies together
static void test_order_of_fields() {
    const std::unique_ptr<spac_board> board(spac_board::create(GEOMETRY));
    for (const spac_board_field & field : board->fields()) {
        const bool is_forward  = field.data < board->records();
        const bool is_decision = field.data >= board->utility() && field.data < board->n_draft_max();
        CHECK(is_forward == (field.writer == SPAC_WRITER_FORWARD) && is_decision == (field.writer == SPAC_WRITER_DECISION));
        CHECK(field.data < board->tier() || !is_forward || field.data == board->tier() || field.data == board->in_memory());
    }
    const auto               is_routed = [](const spac_board_field & field) { return strcmp(field.name, "routed_experts") == 0; };
    const spac_board_field & routed    = *std::find_if(board->fields().begin(), board->fields().end(), is_routed);
    CHECK(strcmp(routed.shape, "(SPAC_N_ROUTED, n_layer, n_expert_used)") == 0);
    CHECK(routed.n_dims == 3 && routed.dims[0] == SPAC_N_ROUTED && routed.dims[1] == 3 && routed.dims[2] == 2);
    CHECK(routed.n_bytes == SPAC_N_ROUTED * 3 * 2 * sizeof(uint16_t) && routed.data == board->routed_experts());
}

static void test_several_devices() {
    spac_board_geometry geometry = GEOMETRY;
    geometry.n_device            = 2;
    const std::unique_ptr<spac_board> board(spac_board::create(geometry));
    const spac_board_view             v = board->view();
    CHECK(v.geometry.n_device == 2 && v.byte_budget[0] == UINT64_MAX && v.byte_budget[1] == UINT64_MAX);
    CHECK(v.devices == board->devices() && v.layer_device == board->layer_device() && v.layer_device[2] == 0);
    board->decision_begin();
    v.byte_budget[1] = 7;
    board->decision_end();
    spac_decision decision;
    CHECK(board->read_decision(0, decision) && (decision.byte_budget == std::vector<uint64_t>{ UINT64_MAX, 7 }));
}

static std::unique_ptr<spac_board> make_shared_board() {
    std::unique_ptr<spac_board> board(spac_board::create(GEOMETRY));
    board->share(unique_name());
    return board;
}

static std::unique_ptr<spac_board> open_board() {
    return std::unique_ptr<spac_board>(spac_board::open(unique_name()));
}

static bool exists() {
    struct stat st;
    return lstat(shm_file().c_str(), &st) == 0;
}

static void decide(spac_board & board, uint8_t utility) {
    const spac_board_view v = board.view();
    board.decision_begin();
    memset(v.utility, utility, 24);
    *v.n_load = 1;
    v.load[0] = 23;
    board.decision_end();
}

// what one side writes, the other sees; nothing is left in the end
static void test_shared() {
    auto engine    = make_shared_board();
    auto scheduler = open_board();

    struct stat st;
    CHECK(stat(shm_file().c_str(), &st) == 0 && (st.st_mode & 0777) == 0600);

    engine->counts()[11] = 42;
    CHECK(scheduler->view().counts[11] == 0);
    engine->publish();
    CHECK(scheduler->view().counts[11] == 42);

    CHECK(spac_board::owner(unique_name()) == getpid());

    spac_decision decision;
    CHECK(!engine->read_decision(0, decision));
    scheduler->decision_begin();
    CHECK(!engine->read_decision(0, decision));
    scheduler->decision_end();
    decide(*scheduler, 9);
    CHECK(engine->read_decision(0, decision) && decision.utility[23] == 9 && decision.tau[0] == 1);
    CHECK(decision.load == std::vector<uint32_t>{ 23 } && decision.byte_budget == std::vector<uint64_t>{ UINT64_MAX });
    CHECK(!engine->read_decision(decision.seq, decision));

    scheduler->view().n_draft_max[63] = 5;
    CHECK(engine->draft_limit(63) == 5 && engine->draft_limit(0) == -1 && engine->draft_limit(64) == -1 && engine->draft_limit(-1) == -1);
    CHECK(engine->draft_limit(63, 9) == -1);
    scheduler->view().n_draft_matched[63 * SPAC_N_MATCHES + 5] = 2; // 8 to 15 tokens
    CHECK(engine->draft_limit(63, 8) == 2 && engine->draft_limit(63, 15) == 2 && engine->draft_limit(63, 16) == -1 && engine->draft_limit(63, 7) == -1);
    scheduler->view().n_draft_matched[63 * SPAC_N_MATCHES + 7] = 3; // 32 and more
    CHECK(engine->draft_limit(63, 31) == -1 && engine->draft_limit(63, 32) == 3 && engine->draft_limit(63, 1000) == 3);
    scheduler->view().n_draft_max[63] = INT32_MIN;
    CHECK(engine->draft_limit(63) == -1);

    scheduler->view().n_draft_max[1] = 4;
    engine->view().n_draft_max[2]    = 3; // a scheduler in the engine's own process
    decide(*engine, 7);
    CHECK(engine->read_decision(decision.seq, decision) && decision.utility[0] == 7);
    CHECK(engine->draft_limit(1) == 4 && engine->draft_limit(2) == 3);

    CHECK(error_of([] { make_shared_board(); }).find("in use by process " + std::to_string(getpid())) != std::string::npos);

    engine.reset();
    CHECK(!exists());
    CHECK(!error_of([] { open_board(); }).empty());
}

// a scheduler that died between begin and end must not block the next one
static void test_interrupted_decision() {
    spac_board * board = spac_board::create(GEOMETRY);
    board->decision_begin();
    board->decision_begin();
    board->decision_end();
    spac_decision decision;
    CHECK(board->read_decision(0, decision) && decision.seq == 2);
    delete board;
}

// by a process that was killed
static void leave_one_behind() {
    const pid_t child = fork();
    if (child == 0) {
        make_shared_board().release();
        _exit(0);
    }
    waitpid(child, nullptr, 0);
}

static void test_left_behind() {
    const pid_t child = fork();
    if (child == 0) {
        make_shared_board().release();
        _exit(0); // as if killed
    }
    siginfo_t ended;
    waitid(P_PID, child, &ended, WEXITED | WNOWAIT); // a zombie still
    CHECK(exists() && spac_board::owner(unique_name()) == 0);
    make_shared_board();
    CHECK(!exists());
    waitpid(child, nullptr, 0);
}

// whatever is done to the file, the engine lives, keeps what it counted, and makes the file whole again
static void test_truncated() {
    auto engine           = make_shared_board();
    engine->counts()[23]  = 77;
    engine->counters()[0] = {};
    engine->publish();
    struct stat st;
    CHECK(stat(shm_file().c_str(), &st) == 0);
    const off_t size = st.st_size;
    for (const off_t bad : { (off_t) 0, (off_t) 1, (off_t) 100, size / 2, size - 1, 2 * size }) {
        CHECK(truncate(shm_file().c_str(), bad) == 0);
        spac_decision decision;
        CHECK(bad > size / 2 || !engine->read_decision(0, decision));
        CHECK(engine->draft_limit(63) == -1);
        engine->push_record({});
        engine->publish();
        CHECK(stat(shm_file().c_str(), &st) == 0 && st.st_size == size);
        CHECK(open_board()->view().counts[23] == 77 && engine->counts()[23] == 77);
    }
    decide(*open_board(), 3);
    spac_decision decision;
    CHECK(engine->read_decision(0, decision) && decision.utility[5] == 3);

    // cut and extended between two looks: of the right size, with zeros where -1 said that drafts have no limit
    CHECK(truncate(shm_file().c_str(), 0) == 0);
    engine->publish(false);
    CHECK(engine->draft_limit(63) == -1);
}

static void test_scribbled() {
    auto engine          = make_shared_board();
    engine->counts()[23] = 77;
    engine->publish();
    struct stat st;
    CHECK(stat(shm_file().c_str(), &st) == 0);
    const std::vector<char> junk(st.st_size, '\xa5');
    const int               fd = open(shm_file().c_str(), O_WRONLY);
    CHECK(pwrite(fd, junk.data(), junk.size(), 0) == (ssize_t) junk.size());
    close(fd);
    spac_decision decision;
    engine->read_decision(0, decision); // of no sense, but within its bounds
    CHECK(decision.load.size() <= 24 && engine->draft_limit(1) == -1);
    CHECK(spac_board::owner(unique_name()) > 0);
    engine->publish();
    CHECK(open_board()->view().counts[23] == 77); // the header, too, is as it was
}

// the file of another board that took the name is not removed
static void test_removed() {
    auto first = make_shared_board();
    CHECK(unlink(shm_file().c_str()) == 0);
    auto second = make_shared_board();
    first->publish();
    first.reset();
    CHECK(exists());
    second.reset();
    CHECK(!exists());
}

// of many that start at once, over a board left behind or none, exactly one has the name
static void test_starts_at_once() {
    constexpr int N_ROUNDS = 60, N_STARTS = 4;
    for (int round = 0; round < N_ROUNDS; round++) {
        if (round % 2) {
            leave_one_behind();
        }
        int go[2], result[2], hold[2];
        CHECK(pipe(go) == 0 && pipe(result) == 0 && pipe(hold) == 0);
        for (int i = 0; i < N_STARTS; i++) {
            if (fork() == 0) {
                close(go[1]);
                close(hold[1]);
                char c;
                CHECK(read(go[0], &c, 1) == 0); // all at once
                spac_board * board = nullptr;
                try {
                    board = make_shared_board().release();
                } catch (const spac_error &) {
                }
                c = board ? 'y' : 'n';
                CHECK(write(result[1], &c, 1) == 1);
                CHECK(read(hold[0], &c, 1) == 0); // until all have tried
                delete board;
                _exit(0);
            }
        }
        close(go[1]);
        int n_owners = 0;
        for (int i = 0; i < N_STARTS; i++) {
            char c;
            CHECK(read(result[0], &c, 1) == 1);
            n_owners += c == 'y';
        }
        CHECK(n_owners == 1);
        close(hold[1]);
        for (int fd : { go[0], result[0], result[1], hold[0] }) {
            close(fd);
        }
        while (wait(nullptr) > 0) {
        }
        CHECK(!exists());
    }
}

// a FIFO, a folder or a link at the name neither hangs the start nor is followed or removed
static void test_something_else_at_its_path() {
    const std::string target = shm_file() + ".target";
    for (const char * kind : { "fifo", "folder", "link" }) {
        if (kind[1] == 'i' && kind[0] == 'f') {
            CHECK(mkfifo(shm_file().c_str(), 0600) == 0);
        } else if (kind[0] == 'f') {
            CHECK(mkdir(shm_file().c_str(), 0700) == 0);
        } else {
            fclose(fopen(target.c_str(), "w"));
            CHECK(symlink(target.c_str(), shm_file().c_str()) == 0);
        }
        CHECK(error_of([] { make_shared_board(); }).find("in the way") != std::string::npos);
        CHECK(!error_of([] { open_board(); }).empty());
        CHECK(!error_of([] { spac_board::owner(unique_name()); }).empty());
        CHECK(exists() && remove(shm_file().c_str()) == 0);
    }
    remove(target.c_str());
}

// process numbers mean nothing in another PID namespace: the lock does
static void test_other_pid_namespace() {
    auto        engine = make_shared_board();
    const pid_t child  = fork();
    if (child == 0) {
        if (unshare(CLONE_NEWUSER | CLONE_NEWPID) != 0 && unshare(CLONE_NEWPID) != 0) {
            _exit(2);
        }
        const pid_t inner = fork();
        if (inner == 0) {
            const bool ok = spac_board::owner(unique_name()) > 0 && error_of([] { make_shared_board(); }).find("in use") != std::string::npos;
            _exit(ok ? 0 : 1);
        }
        int status = 0;
        waitpid(inner, &status, 0);
        _exit(WEXITSTATUS(status));
    }
    int status = 0;
    waitpid(child, &status, 0);
    if (WEXITSTATUS(status) == 2) {
        printf("PID namespaces cannot be made here: not tested\n");
    } else {
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    CHECK(exists());
}

// a decision is taken over whole or not at all, while a scheduler writes as fast as it can
static void test_whole_decisions() {
    auto              engine = make_shared_board(), scheduler = open_board();
    std::atomic<bool> done{ false };
    std::thread       writer([&] {
        for (uint8_t i = 0; !done; i++) {
            decide(*scheduler, i);
            std::this_thread::sleep_for(std::chrono::microseconds(20));
        } });
    spac_decision     decision;
    for (int n_read = 0; n_read < 1000;) {
        if (engine->read_decision(decision.seq, decision)) {
            n_read++;
            for (uint8_t u : decision.utility) {
                CHECK(u == decision.utility[0]);
            }
        }
    }
    done = true;
    writer.join();
}

// the routing log's rows go round the ring; others see them whole or not at all, and which of them are being overwritten
static void test_routing_log() {
    auto                  engine = make_shared_board(), scheduler = open_board();
    const spac_board_view v       = scheduler->view();
    const size_t          n_cells = (size_t) GEOMETRY.n_layer * GEOMETRY.n_expert_used;
    uint64_t              n_rows  = 0;
    for (uint64_t n : { 1, 200, 256, 256, 7, 256 }) {
        const uint64_t first = engine->begin_rows(n);
        CHECK(first == n_rows && v.n_routed[0] == n_rows && v.n_routed[1] == n_rows + n);
        for (uint64_t i = first; i < first + n; i++) {
            engine->routed_tokens()[i % SPAC_N_ROUTED] = (int32_t) i;
            std::fill_n(engine->routed_experts() + i % SPAC_N_ROUTED * n_cells, n_cells, (uint16_t) i);
        }
        engine->publish();
        CHECK(v.routed_tokens[first % SPAC_N_ROUTED] != (int32_t) first || first == 0);
        engine->end_rows();
        n_rows += n;
        CHECK(v.n_routed[0] == n_rows && v.n_routed[1] == n_rows);
        for (uint64_t i = n_rows > SPAC_N_ROUTED ? n_rows - SPAC_N_ROUTED : 0; i < n_rows; i++) {
            const uint16_t * experts = v.routed_experts + i % SPAC_N_ROUTED * n_cells;
            CHECK(v.routed_tokens[i % SPAC_N_ROUTED] == (int32_t) i && experts[0] == i && experts[n_cells - 1] == i);
        }
    }
}

// upcoming tokens are told to who asks for them
static void test_look_ahead() {
    auto                  engine = make_shared_board(), scheduler = open_board();
    const spac_board_view v = scheduler->view();
    spac_decision         decision;
    CHECK(!engine->is_asked_ahead());
    *v.looks_ahead = 1;
    CHECK(!engine->read_decision(0, decision) && engine->is_asked_ahead()); // looked at with the decision
    std::vector<int32_t> tokens(SPAC_N_UPCOMING + 9);
    for (size_t i = 0; i < tokens.size(); i++) {
        tokens[i] = (int32_t) i + 5;
    }
    engine->look_ahead(tokens.data(), 3);
    CHECK(*v.n_looks == 2 && *v.n_upcoming == 3 && v.upcoming[0] == 5 && v.upcoming[2] == 7);
    engine->look_ahead(tokens.data(), (int32_t) tokens.size());
    CHECK(*v.n_looks == 4 && *v.n_upcoming == SPAC_N_UPCOMING && v.upcoming[SPAC_N_UPCOMING - 1] == SPAC_N_UPCOMING + 4);
    CHECK(truncate(shm_file().c_str(), 10) == 0);
    CHECK(!engine->read_decision(0, decision) && !engine->is_asked_ahead());
    *engine->looks_ahead() = 1; // by a reader in the engine's own process
    CHECK(engine->is_asked_ahead());
}

struct io_calls {
    uint64_t n_reads, n_writes;
};

// of this process; looking takes reads of its own
static io_calls count_io_calls() {
    io_calls calls = {};
    FILE *   f     = fopen("/proc/self/io", "r");
    CHECK(f && fscanf(f, "rchar: %*u wchar: %*u syscr: %lu syscw: %lu", &calls.n_reads, &calls.n_writes) == 2);
    fclose(f);
    return calls;
}

template <typename F>
static io_calls io_calls_of(F && fn) {
    const io_calls start = count_io_calls(), before = count_io_calls();
    fn();
    const io_calls after = count_io_calls();
    return { after.n_reads - before.n_reads - (before.n_reads - start.n_reads), after.n_writes - before.n_writes };
}

// a forward without a new decision looks for one, and publishes what it counted: nothing is told to who did not ask
static void test_calls_of_a_forward() {
    auto           engine = make_shared_board();
    spac_decision  decision;
    const io_calls calls = io_calls_of([&] {
        for (int i = 0; i < 100; i++) {
            engine->read_decision(0, decision);
            if (engine->is_asked_ahead()) {
                const int32_t token = 0;
                engine->look_ahead(&token, 1);
            }
            engine->publish();
        }
    });
    CHECK(calls.n_reads == 100 && calls.n_writes == 100);
}

static void test_refuses_what_it_does_not_know() {
    auto   engine = make_shared_board();
    FILE * f      = fopen(shm_file().c_str(), "r+b");
    CHECK(f);
    for (long offset : { 0L, 8L, 16L, 24L, 28L }) { // magic, version, size, n_layer, n_expert
        uint32_t saved, bad = 0xfffffff0;
        fseek(f, offset, SEEK_SET);
        CHECK(fread(&saved, 4, 1, f) == 1);
        fseek(f, offset, SEEK_SET);
        fwrite(&bad, 4, 1, f);
        fflush(f);
        CHECK(!error_of([] { open_board(); }).empty());
        fseek(f, offset, SEEK_SET);
        fwrite(&saved, 4, 1, f);
        fflush(f);
    }
    fclose(f);
    open_board();
    for (const char * name : { "", "a/b", "a b", ".a", "-a" }) {
        CHECK(!error_of([&] { engine->share(name); }).empty());
    }
}

static void test_records() {
    spac_board * board = spac_board::create(GEOMETRY);
    for (uint64_t i = 0; i < SPAC_N_RECORDS + 3; i++) {
        spac_step_record r = {};
        r.step             = i;
        board->push_record(r);
    }
    const spac_board_view v = board->view();
    CHECK(*v.n_records == SPAC_N_RECORDS + 3 && v.records[2].step == SPAC_N_RECORDS + 2 && v.records[3].step == 3);
    delete board;
}

int main() {
    test_private();
    test_order_of_fields();
    test_several_devices();
    test_shared();
    test_interrupted_decision();
    test_left_behind();
    test_truncated();
    test_scribbled();
    test_removed();
    test_starts_at_once();
    test_something_else_at_its_path();
    test_other_pid_namespace();
    test_whole_decisions();
    test_routing_log();
    test_look_ahead();
    test_calls_of_a_forward();
    test_refuses_what_it_does_not_know();
    test_records();
    return 0;
}
