// Runs a grid: blocks one after another, the threads of a block as fibers that change at warp and block operations.
// Kernels of different streams take turns.
#include "emulator.h"

#include <sys/mman.h>

#include <mutex>
#include <random>
#include <vector>

#ifndef __x86_64__
#    error "fibers are switched in x86-64 assembly"
#endif

emu_thread * emu_self;
uint3        emu_block_index;
dim3         emu_block_dim, emu_grid_dim;
char *       emu_dynamic_shared;

static constexpr int    MAX_THREADS = 1024, MAX_SHARED = 227 * 1024; // of a block
static constexpr size_t STACK  = 256 * 1024;
static constexpr char   POISON = 0x5a; // shared memory that was not written

enum fiber_state {
    RUNS,
    IN_WARP_OP,
    IN_BLOCK_OP,
    ENDED,
};

struct fiber : emu_thread {
    void *      stack_pointer;
    fiber_state state;
    unsigned    round; // of the barrier that it waits at
};

// all that live arrive, then the next round begins
struct barrier {
    int      n_live, n_arrived;
    unsigned round;

    bool arrive() {
        n_arrived++;
        return end_round_if_all();
    }

    void leave() {
        n_live--;
        end_round_if_all();
    }

    bool end_round_if_all() {
        if (n_live == 0 || n_arrived < n_live) {
            return false;
        }
        n_arrived = 0;
        round++;
        return true;
    }
};

struct warp : barrier {
    uint32_t live_lanes;
    alignas(16) char table[2][EMU_WARP * EMU_SLOT]; // by turns: who is late may still read the last round's
};

static fiber                         fibers[MAX_THREADS];
static warp                          warps[MAX_THREADS / EMU_WARP];
static barrier                       block_barrier;
static bool                          block_any;
static char *                        stacks;
static void *                        scheduler_stack_pointer;
static const std::function<void()> * thread_body;

// System V ABI: these registers are the callee's to keep
extern "C" void emu_switch(void ** from, void * to);
asm(R"(
.text
emu_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov  %rsp, (%rdi)
    mov  %rsi, %rsp
    pop  %r15
    pop  %r14
    pop  %r13
    pop  %r12
    pop  %rbx
    pop  %rbp
    ret
)");
static constexpr int N_SAVED = 6;

static fiber & self() {
    return *static_cast<fiber *>(emu_self);
}

static void back_to_scheduler(fiber_state state) {
    self().state = state;
    emu_switch(&self().stack_pointer, scheduler_stack_pointer);
}

static void wait_at(barrier & b, fiber_state state) {
    self().round = b.round;
    if (!b.arrive()) {
        back_to_scheduler(state);
    }
}

const char * emu_exchange(const void * mine, size_t size) {
    warp & w     = warps[self().warp];
    char * table = w.table[w.round % 2];
    if (size > EMU_SLOT) {
        __trap();
    }
    memcpy(table + self().lane * EMU_SLOT, mine, size);
    wait_at(w, IN_WARP_OP);
    return table;
}

uint32_t emu_live_lanes() {
    return warps[self().warp].live_lanes;
}

void emu_sync_warp() {
    wait_at(warps[self().warp], IN_WARP_OP);
}

void emu_sync_block() {
    wait_at(block_barrier, IN_BLOCK_OP);
}

bool emu_any_of_block(bool value) {
    block_any = block_any || value;
    emu_sync_block();
    const bool any = block_any;
    emu_sync_block(); // all have read it
    block_any = false;
    emu_sync_block(); // before anyone votes again
    return any;
}

static void run_thread() {
    (*thread_body)();
    warp & w = warps[self().warp];
    w.live_lanes &= ~(1u << self().lane);
    w.leave();
    block_barrier.leave();
    back_to_scheduler(ENDED);
}

static void prepare(fiber & f, int i, dim3 block) {
    f.index = { i % block.x, i / block.x % block.y, i / block.x / block.y };
    f.lane  = i % EMU_WARP;
    f.warp  = i / EMU_WARP;
    f.state = RUNS;
    // as if run_thread had called emu_switch: 8 bytes off 16 on entry, as after a call
    void ** top     = (void **) (stacks + (i + 1) * STACK) - 3;
    *--top          = (void *) run_thread;
    f.stack_pointer = top - N_SAVED;
}

static bool can_run(const fiber & f) {
    return f.state == RUNS || (f.state == IN_WARP_OP && f.round != warps[f.warp].round) ||
           (f.state == IN_BLOCK_OP && f.round != block_barrier.round);
}

// all lanes, until each waits for another warp or has ended; how many ended, -1: none could run
static int run_warp(int first, int end) {
    int  n_ended = 0;
    bool any     = false;
    for (bool again = true; again;) {
        again = false;
        for (int i = first; i < end; i++) {
            if (can_run(fibers[i])) {
                fibers[i].state = RUNS;
                emu_self        = &fibers[i];
                emu_switch(&scheduler_stack_pointer, fibers[i].stack_pointer);
                n_ended += fibers[i].state == ENDED;
                again = any = true;
            }
        }
    }
    return any ? n_ended : -1;
}

[[noreturn]] static void stuck(const char * name, int n) {
    const int n_warp  = std::count_if(fibers, fibers + n, [](const fiber & f) { return f.state == IN_WARP_OP; });
    const int n_block = std::count_if(fibers, fibers + n, [](const fiber & f) { return f.state == IN_BLOCK_OP; });
    fprintf(stderr, "cuda-emulator: %s is stuck: %d threads in a warp's, %d in the block's operation\n", name, n_warp, n_block);
    abort();
}

static void run_block(dim3 block, const char * name) {
    static std::mt19937 rng(1);
    const int           n = block.x * block.y * block.z, n_warps = (n + EMU_WARP - 1) / EMU_WARP;
    block_barrier = { n, 0, 0 };
    std::vector<int> order(n_warps);
    for (int i = 0; i < n_warps; i++) {
        const int n_lanes                = std::min(EMU_WARP, n - i * EMU_WARP);
        static_cast<barrier &>(warps[i]) = { n_lanes, 0, 0 };
        warps[i].live_lanes              = ~0u >> (EMU_WARP - n_lanes);
        order[i]                         = i;
    }
    for (int i = 0; i < n; i++) {
        prepare(fibers[i], i, block);
    }
    for (int n_ended = 0; n_ended < n;) {
        std::shuffle(order.begin(), order.end(), rng); // warps have no order
        bool any = false;
        for (int i : order) {
            const int ended = run_warp(i * EMU_WARP, std::min(n, (i + 1) * EMU_WARP));
            n_ended += std::max(0, ended);
            any = any || ended >= 0;
        }
        if (!any) {
            stuck(name, n);
        }
    }
}

void emu_run_grid(dim3 grid, dim3 block, size_t n_shared, const char * name, const std::function<void()> & thread) {
    static std::mutex           one_at_a_time;
    std::lock_guard<std::mutex> lock(one_at_a_time);
    if (block.x * block.y * block.z > MAX_THREADS || grid.x * grid.y * grid.z == 0 || n_shared > MAX_SHARED) {
        fprintf(stderr, "cuda-emulator: %s cannot be launched like this\n", name);
        abort();
    }
    if (!stacks) {
        stacks = (char *) mmap(nullptr, MAX_THREADS * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    }
    alignas(128) static char shared[MAX_SHARED];
    emu_dynamic_shared = shared;
    emu_block_dim      = block;
    emu_grid_dim       = grid;
    thread_body        = &thread;
    for (unsigned z = 0; z < grid.z; z++) {
        for (unsigned y = 0; y < grid.y; y++) {
            for (unsigned x = 0; x < grid.x; x++) {
                emu_block_index = { x, y, z };
                memset(shared, POISON, n_shared);
                run_block(block, name);
            }
        }
    }
}
