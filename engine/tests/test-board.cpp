#include "board.h"
#include "check.h"
#include "status.h"

#include <cstring>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static const spac_board_geometry GEOMETRY = { 3, 8, 2, 5, 16 };

static std::string unique_name() {
    return "test-" + std::to_string(getpid());
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
    spac_board *          board = spac_board::create("", GEOMETRY);
    const spac_board_view v     = board->view();
    CHECK(v.n_layer == 3 && v.n_expert == 8 && v.n_slots == 5 && v.n_load_max == 24);
    CHECK(*v.byte_budget == UINT64_MAX && v.tau[2] == 1 && v.n_draft_max[63] == -1);
    delete board;
}

// what one side writes, the other sees; nothing is left in the end
static void test_shared() {
    spac_board * engine    = spac_board::create(unique_name(), GEOMETRY);
    spac_board * scheduler = spac_board::open(unique_name());

    struct stat st;
    CHECK(stat(shm_file().c_str(), &st) == 0 && (st.st_mode & 0777) == 0600);

    engine->counts()[11] = 42;
    CHECK(scheduler->view().counts[11] == 42);

    CHECK(spac_board::owner(unique_name()) == getpid());

    const uint64_t before = engine->decision_seq();
    scheduler->decision_begin();
    CHECK(engine->decision_seq() & 1);
    scheduler->view().utility[23] = 9;
    scheduler->decision_end();
    CHECK(engine->decision_seq() == before + 2 && engine->view().utility[23] == 9);

    CHECK(error_of([] { spac_board::create(unique_name(), GEOMETRY); }).find("in use") != std::string::npos);

    delete scheduler;
    delete engine;
    CHECK(stat(shm_file().c_str(), &st) != 0);
    CHECK(!error_of([] { spac_board::open(unique_name()); }).empty());
}

// a scheduler that died between begin and end must not block the next one
static void test_interrupted_decision() {
    spac_board * board = spac_board::create("", GEOMETRY);
    board->decision_begin();
    board->decision_begin();
    board->decision_end();
    CHECK(board->decision_seq() == 2);
    delete board;
}

static void test_left_behind() {
    const std::string name  = unique_name();
    const pid_t       child = fork();
    if (child == 0) {
        spac_board::create(name, GEOMETRY);
        _exit(0); // as if killed
    }
    siginfo_t ended;
    waitid(P_PID, child, &ended, WEXITED | WNOWAIT); // a zombie still
    spac_board * board = spac_board::create(name, GEOMETRY);
    CHECK(board);
    delete board;
    waitpid(child, nullptr, 0);
}

static void test_refuses_what_it_does_not_know() {
    spac_board * engine = spac_board::create(unique_name(), GEOMETRY);
    FILE *       f      = fopen(shm_file().c_str(), "r+b");
    CHECK(f);
    for (long offset : { 0L, 8L, 16L, 24L, 28L }) { // magic, version, size, n_layer, n_expert
        uint32_t saved, bad = 0xfffffff0;
        fseek(f, offset, SEEK_SET);
        CHECK(fread(&saved, 4, 1, f) == 1);
        fseek(f, offset, SEEK_SET);
        fwrite(&bad, 4, 1, f);
        fflush(f);
        CHECK(!error_of([] { spac_board::open(unique_name()); }).empty());
        fseek(f, offset, SEEK_SET);
        fwrite(&saved, 4, 1, f);
        fflush(f);
    }
    fclose(f);
    delete spac_board::open(unique_name());
    delete engine;
    CHECK(!error_of([] { spac_board::create("a/b", GEOMETRY); }).empty());
}

static void test_records() {
    spac_board * board = spac_board::create("", GEOMETRY);
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
    test_shared();
    test_interrupted_decision();
    test_left_behind();
    test_refuses_what_it_does_not_know();
    test_records();
    return 0;
}
