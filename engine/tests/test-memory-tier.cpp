// Experts on disk: what is handed out is what the file holds, while experts come and go, with a slow disk, one that fails,
// and a file that gets shorter. Run under TSan too.
#include "model-file.h"

#include "base/status.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <random>
#include <thread>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

static std::vector<int32_t> some(std::mt19937 & rng, int n_expert, int n) {
    std::vector<int32_t> all(n_expert);
    for (int i = 0; i < n_expert; i++) {
        all[i] = i;
    }
    std::shuffle(all.begin(), all.end(), rng);
    all.resize(n);
    std::sort(all.begin(), all.end());
    return all;
}

// tokens and prompts in turn, through a pool of a third
static void test_bytes() {
    const model_file file(6, 16);
    spac_memory_tier tier(file.all(), 32 * file.expert_bytes());
    std::mt19937     rng(2);
    for (int i = 0; i < 60; i++) {
        const bool is_prompt = i % 10 == 9;
        for (const spac_moe_layer & layer : file.layers) {
            CHECK(use(tier, file, layer, some(rng, 16, is_prompt ? 16 : 3), is_prompt ? 64 : 1, 2));
        }
    }
    const spac_tier_info info = tier.info();
    CHECK(info.n_slots >= 32 && info.n_slots <= 40 && info.n_resident <= info.n_slots);
    CHECK(info.n_hit > 0 && info.n_miss > 0 && info.n_ahead > 0 && info.n_reads % 3 == 0);
    CHECK(info.n_reads <= 3 * (info.n_miss + info.n_ahead) && info.error[0] == 0);
}

// a disk with larger blocks: readers see only whole ones
static void test_large_blocks() {
    static constexpr size_t BLOCK = 16384;
    const model_file        file(3, 8);
    std::atomic<int>        n_odd{ 0 };
    const auto              read = [&](int fd, void * data, size_t bytes, uint64_t offset) -> long {
        n_odd += (uintptr_t) data % BLOCK != 0 || bytes % BLOCK != 0 || offset % BLOCK != 0;
        return pread(fd, data, bytes, (off_t) offset);
    };
    const uint64_t   bytes = 10 * (file.layers[0].expert_bytes() + 3 * 2 * BLOCK);
    spac_memory_tier tier(file.all(), bytes, false, read, BLOCK);
    std::mt19937     rng(4);
    for (int i = 0; i < 20; i++) {
        for (const spac_moe_layer & layer : file.layers) {
            CHECK(use(tier, file, layer, some(rng, 8, 3)));
        }
    }
    CHECK(n_odd == 0 && tier.info().pool_bytes <= bytes && tier.info().n_slots >= 8);
}

// the kernel lists a newline in a name as \012, and leaves these four characters as they are
static void test_odd_names() {
    for (const char * name : { "test\nmemory\ntier", "test\\012memory" }) {
        const model_file file(1, 4, name);
        spac_memory_tier tier(file.all(), 5 * file.expert_bytes());
        CHECK(use(tier, file, file.layers[0], { 0, 3 }));
    }
}

// what a predictor names is there when its layer runs, whatever others need meanwhile; nothing leaves that is needed now
static void test_expected() {
    const model_file file(3, 16);
    spac_memory_tier tier(file.all(), 18 * file.expert_bytes());
    CHECK(use(tier, file, file.layers[0], { 0, 1 }));
    CHECK(tier.expect(file.layers[2].il, { 7, 8, 9 }) == 3);
    CHECK(tier.expect(file.layers[2].il, { 7, 8, 9 }) == 0); // they are on their way
    for (int i = 0; i < 8; i++) {
        CHECK(use(tier, file, file.layers[1], { 2 * i, 2 * i + 1 }));
    }
    const spac_tier_info before = tier.info();
    CHECK(use(tier, file, file.layers[2], { 7, 8, 9 }));
    CHECK(tier.info().n_hit == before.n_hit + 3 && tier.info().n_miss == before.n_miss);
}

// a wrong guess delays nothing: a whole layer finds room, though all of the pool is expected
static void test_wrongly_expected() {
    const model_file     file(3, 16);
    spac_memory_tier     tier(file.all(), 17 * file.expert_bytes());
    std::mt19937         rng(5);
    std::vector<int32_t> all = some(rng, 16, 16);
    CHECK(tier.expect(file.layers[2].il, all) == 16);
    CHECK(use(tier, file, file.layers[0], all));
    CHECK(use(tier, file, file.layers[1], all));
}

static bool comes(spac_memory_tier & tier, const spac_moe_layer & layer, int32_t ie) {
    for (int i = 0; i < 5000 && !tier.is_there(layer.il, ie); i++) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return tier.is_there(layer.il, ie);
}

// what a copy computes is read where it is more useful than what is there, and not where it is less
static void test_wanted_by_copies() {
    const model_file       file(1, 16);
    const spac_moe_layer & layer = file.layers[0];
    spac_memory_tier       tier(file.all(), 17 * file.expert_bytes());
    const int32_t          once[] = { 1 }, often[] = { 40 }, ie = 3;
    CHECK(tier.info().n_slots >= 16);
    CHECK(use(tier, file, layer, { 0 }));
    tier.want(layer, &ie, once, 1, 1);
    CHECK(comes(tier, layer, ie) && tier.info().n_ahead == 1); // there was room

    const model_file       two(2, 16);
    spac_memory_tier       full(two.all(), 17 * two.expert_bytes());
    const spac_moe_layer & first = two.layers[0];
    for (int i = 0; i < 3; i++) {
        CHECK(use(full, two, two.layers[1], { 0, 1, 2, 3, 4, 5, 6, 7 }));
        CHECK(use(full, two, first, { 0, 1, 2, 3, 4, 5, 6, 7 }));
    }
    const int32_t n_free = full.info().n_slots - 16;
    for (int32_t other = 8; other < 8 + n_free; other++) {
        CHECK(use(full, two, first, { other }));
        CHECK(use(full, two, first, { other }));
    }
    CHECK(use(full, two, first, { 0 }));
    const uint64_t n_ahead = full.info().n_ahead;
    const int32_t  last    = 15;
    full.want(first, &last, once, 1, 1);
    CHECK(full.info().n_ahead == n_ahead && !full.is_there(first.il, last));
    full.want(first, &last, often, 1, 1);
    CHECK(full.info().n_ahead == n_ahead + 1 && comes(full, first, last));
    CHECK(use(full, two, first, { last }));
}

// a predictor's thread guesses, rightly and wrongly, while others compute
static void test_guesses_meanwhile() {
    const model_file  file(4, 16);
    spac_memory_tier  tier(file.all(), 24 * file.expert_bytes());
    std::atomic<bool> is_over{ false };
    std::thread       predictor([&] {
        std::mt19937 rng(6);
        while (!is_over) {
            tier.expect(file.layers[rng() % 4].il, some(rng, 16, 3));
            std::this_thread::yield();
        }
    });
    std::mt19937      rng(7);
    for (int i = 0; i < 40; i++) {
        for (const spac_moe_layer & layer : file.layers) {
            CHECK(use(tier, file, layer, some(rng, 16, i % 8 == 7 ? 16 : 4), i % 8 == 7 ? 64 : 2, 2));
        }
    }
    is_over = true;
    predictor.join();
}

// what cannot be read is a failure only if it is asked for
static void test_unreadable_guess() {
    const model_file  file(2, 8);
    std::atomic<bool> is_broken{ true };
    spac_memory_tier  tier(file.all(), 9 * file.expert_bytes(), false, [&](int fd, void * data, size_t bytes, uint64_t offset) -> long {
        errno = EIO;
        return is_broken ? -1 : pread(fd, data, bytes, (off_t) offset);
    });
    CHECK(tier.expect(file.layers[1].il, { 1, 2 }) == 2);
    while (tier.expect(file.layers[1].il, { 1 }) == 0) { // until it was forgotten
        std::this_thread::yield();
    }
    CHECK(!tier.has_failed());
    is_broken = false;
    CHECK(use(tier, file, file.layers[0], { 1, 2 }));
    is_broken = true;
    CHECK(!use(tier, file, file.layers[1], { 3 }));
    CHECK(strstr(tier.info().error, "cannot be read"));
}

// what is used again and again stays, whatever else comes by
static void test_favourites_stay() {
    const model_file file(2, 32);
    spac_memory_tier tier(file.all(), 36 * file.expert_bytes());
    std::mt19937     rng(3);
    for (int i = 0; i < 200; i++) {
        for (const spac_moe_layer & layer : file.layers) {
            std::vector<int32_t> experts = { 0, 1, 2, 3, (int32_t) (4 + rng() % 28) };
            use(tier, file, layer, experts);
        }
    }
    const spac_tier_info before = tier.info();
    for (const spac_moe_layer & layer : file.layers) {
        use(tier, file, layer, { 0, 1, 2, 3 });
    }
    CHECK(tier.info().n_miss == before.n_miss);
}

// The rule in full: a sum of uses that halves in 32 tokens, free slots first, then the lowest sum, and the first slot of
// equals; nothing leaves that the layer needs. It looks at every slot, each time.
struct plain_pool {
    struct slot {
        int  layer = -1, ie = -1;
        bool is_needed = false;
    };

    std::vector<slot>                slots;
    std::vector<std::vector<double>> sums; // [layer][ie], as of now
    uint64_t                         n_hit = 0, n_miss = 0;

    plain_pool(int n_slots, int n_layer, int n_expert) :
        slots(n_slots), sums(n_layer, std::vector<double>(n_expert)) {}

    slot * find(int layer, int ie) {
        const auto it = std::find_if(slots.begin(), slots.end(), [&](const slot & s) { return s.layer == layer && s.ie == ie; });
        return it == slots.end() ? nullptr : &*it;
    }

    slot * find_victim() {
        slot * best = nullptr;
        for (slot & s : slots) {
            if (s.is_needed) {
                continue;
            }
            if (s.layer < 0) {
                return &s;
            }
            best = !best || sums[s.layer][s.ie] < sums[best->layer][best->ie] * (1 - 1e-12) ? &s : best;
        }
        return best;
    }

    void use(int layer, const std::vector<int32_t> & experts) {
        for (auto & of_layer : sums) {
            for (double & sum : of_layer) {
                sum *= layer == 0 ? std::exp2(-1.0 / 32) : 1.0; // a token begins
            }
        }
        for (slot & s : slots) {
            s.is_needed = s.layer == layer && std::count(experts.begin(), experts.end(), s.ie);
        }
        for (int32_t ie : experts) {
            sums[layer][ie] += 1;
        }
        for (int32_t ie : experts) {
            if (find(layer, ie)) {
                n_hit++;
                continue;
            }
            n_miss++;
            *find_victim() = { layer, ie, true };
        }
    }
};

// step by step who leaves is who would leave by the plain rule
static void test_victims() {
    const model_file file(5, 24);
    spac_memory_tier tier(file.all(), 47 * file.expert_bytes());
    plain_pool       plain(tier.info().n_slots, 5, 24);
    std::mt19937     rng(13);
    for (int i = 0; i < 400; i++) {
        for (int il = 0; il < 5; il++) {
            std::vector<int32_t> experts = some(rng, rng() % 3 ? 12 : 24, 1 + rng() % 6); // some more often than others
            CHECK(use(tier, file, file.layers[il], experts));
            plain.use(il, experts);
            CHECK(tier.info().n_hit == plain.n_hit && tier.info().n_miss == plain.n_miss);
        }
    }
    CHECK(plain.n_hit > 1000 && plain.n_miss > 1000);
}

// only the tournament: the answer is the one that looking at all gives, whatever changes
static void test_tournament() {
    for (int n_slots : { 1, 2, 7, 64, 100 }) {
        spac_victims                                       victims(n_slots);
        std::vector<std::pair<spac_victims::kind, double>> keys(n_slots, { spac_victims::IN_USE, 0.0 });
        std::mt19937                                       rng(n_slots);
        for (int i = 0; i < 5000; i++) {
            const int32_t is = rng() % n_slots;
            keys[is]         = { (spac_victims::kind)(rng() % 4), (double) (rng() % 8) };
            victims.set(is, keys[is].first, keys[is].second);
            const auto best = std::min_element(keys.begin(), keys.end());
            CHECK(victims.kind_of(victims.first()) == best->first);
            CHECK(best->first == spac_victims::IN_USE || victims.first() == best - keys.begin());
        }
    }
}

static void test_too_small() {
    const model_file file(3, 16);
    try {
        spac_memory_tier tier(file.all(), 10 * file.expert_bytes());
        CHECK(!"a layer does not fit");
    } catch (const spac_error & e) {
        CHECK(e.status == SPAC_STATUS_INVALID_ARGUMENT && strstr(e.what(), "at least"));
    }
}

static void test_not_of_a_file() {
    const model_file  file(1, 4);
    std::vector<char> memory(ggml_nbytes(file.layers[0].parts[SPAC_PART_UP]));
    spac_moe_layer    layer         = file.layers[0];
    layer.parts[SPAC_PART_UP]->data = memory.data();
    try {
        spac_memory_tier tier({ &layer }, 1 << 30);
        CHECK(!"there is no file");
    } catch (const spac_error & e) {
        CHECK(e.status == SPAC_STATUS_INVALID_ARGUMENT && strstr(e.what(), "in memory already"));
    }
}

// a disk that fails once: the forward is told, and the next one has it
static void test_read_error() {
    const model_file file(2, 8);
    std::atomic<int> n_left{ 7 };
    spac_memory_tier tier(file.all(), 9 * file.expert_bytes(), false, [&](int fd, void * data, size_t bytes, uint64_t offset) -> long {
        if (--n_left == 0) {
            errno = EIO;
            return -1;
        }
        return pread(fd, data, bytes, (off_t) offset);
    });
    CHECK(use(tier, file, file.layers[0], { 0, 1 }));
    CHECK(!use(tier, file, file.layers[1], { 2, 3 }, 1, 4));
    CHECK(tier.has_failed() && strstr(tier.info().error, "layer 3 cannot be read: Input/output error (errno 5), at byte "));
    CHECK(strstr(tier.info().error, file.path.c_str()));
    for (int i = 0; i < 3; i++) {
        CHECK(use(tier, file, file.layers[0], { 4, 5 }));
        CHECK(!tier.has_failed());
        CHECK(use(tier, file, file.layers[1], { 2, 3 }));
    }
}

// the file loses its second half: an error, not a signal
static void test_truncated() {
    const model_file file(4, 8);
    spac_memory_tier tier(file.all(), 12 * file.expert_bytes());
    CHECK(use(tier, file, file.layers[3], { 1 }));
    CHECK(ftruncate(file.fd, file.content.size() / 2) == 0);
    CHECK(use(tier, file, file.layers[0], { 1, 2 }));
    CHECK(!use(tier, file, file.layers[3], { 2 }));
    CHECK(strstr(tier.info().error, "shorter"));
}

// the file is deleted: it is there as long as it is open
static void test_deleted() {
    const model_file file(2, 8);
    spac_memory_tier tier(file.all(), 9 * file.expert_bytes());
    unlink(file.path.c_str());
    CHECK(use(tier, file, file.layers[1], { 2, 7 }));
}

// pieces come in pieces, a signal interrupts, and the disk stalls
static void test_slow_disk() {
    const model_file file(3, 8);
    std::atomic<int> n_reads{ 0 };
    spac_memory_tier tier(file.all(), 10 * file.expert_bytes(), false, [&](int fd, void * data, size_t bytes, uint64_t offset) -> long {
        const int i = n_reads++;
        if (i % 5 == 1) {
            errno = EINTR;
            return -1;
        }
        if (i % 7 == 2) {
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
        }
        return pread(fd, data, std::min<size_t>(bytes, SPAC_DISK_ALIGNMENT), (off_t) offset);
    });
    for (int i = 0; i < 5; i++) {
        for (const spac_moe_layer & layer : file.layers) {
            CHECK(use(tier, file, layer, { (int32_t) i, (int32_t) i + 2 }, 1, 2));
        }
    }
    CHECK(tier.info().wait_us > 0);
}

// a file system that takes O_DIRECT, and refuses to read that way: through the page cache then
static void test_direct_reads_refused() {
    const model_file file(2, 8);
    std::atomic<int> n_refused{ 0 };
    spac_memory_tier tier(file.all(), 9 * file.expert_bytes(), false, [&](int fd, void * data, size_t bytes, uint64_t offset) -> long {
        if (fcntl(fd, F_GETFL) & O_DIRECT) {
            n_refused++;
            errno = EINVAL;
            return -1;
        }
        return pread(fd, data, bytes, (off_t) offset);
    });
    const bool       had_it = tier.info().is_direct;
    for (const spac_moe_layer & layer : file.layers) {
        CHECK(use(tier, file, layer, { 0, 3, 5, 7 }, 1, 2));
    }
    CHECK(!tier.info().is_direct && had_it == (n_refused > 0) && tier.info().error[0] == 0);
}

// A read around the page cache may end within a block, at a signal or where the file system pleases: only 0 is the file's end.
// It cannot go on from there.
static void test_short_reads(long n_most) {
    const model_file file(2, 8);
    std::atomic<int> n_short{ 0 };
    spac_memory_tier tier(file.all(), 9 * file.expert_bytes(), false, [&](int fd, void * data, size_t bytes, uint64_t offset) -> long {
        if ((fcntl(fd, F_GETFL) & O_DIRECT) && (offset | bytes | (uintptr_t) data) % SPAC_DISK_ALIGNMENT != 0) {
            errno = EINVAL;
            return -1;
        }
        n_short += (long) bytes > n_most;
        return std::min<long>(pread(fd, data, bytes, (off_t) offset), n_most);
    });
    const bool       had_it = tier.info().is_direct;
    for (const spac_moe_layer & layer : file.layers) {
        CHECK(use(tier, file, layer, { 0, 3, 5, 7 }, 1, 2)); // the last one's bytes are the file's last
    }
    CHECK(n_short > 0 && tier.info().is_direct == had_it && tier.info().error[0] == 0);
    CHECK(ftruncate(file.fd, file.content.size() / 2 + 100) == 0);
    CHECK(!use(tier, file, file.layers[1], { 6 }) && strstr(tier.info().error, "shorter"));
}

// any other EINVAL is an error, and no circle
static void test_invalid_reads() {
    const model_file file(1, 4);
    spac_memory_tier tier(file.all(), 5 * file.expert_bytes(), false, [](int, void *, size_t, uint64_t) -> long {
        errno = EINVAL;
        return -1;
    });
    CHECK(!use(tier, file, file.layers[0], { 1 }));
}

// nothing comes for seven seconds: that is waited for, and is no error
static void test_stalled_disk() {
    const model_file  file(2, 8);
    std::atomic<bool> stalls{ false };
    const auto        stall = std::chrono::seconds(7);
    const auto        start = std::chrono::steady_clock::now();
    spac_memory_tier  tier(file.all(), 9 * file.expert_bytes(), false, [&](int fd, void * data, size_t bytes, uint64_t offset) -> long {
        if (stalls) {
            std::this_thread::sleep_for(stall);
        }
        return pread(fd, data, bytes, (off_t) offset);
    });
    CHECK(use(tier, file, file.layers[0], { 0, 1 }));
    stalls           = true;
    const auto begin = std::chrono::steady_clock::now();
    CHECK(use(tier, file, file.layers[1], { 2, 3, 4 }, 1, 2));
    CHECK(std::chrono::steady_clock::now() - begin >= stall);
    stalls = false;
    CHECK(use(tier, file, file.layers[0], { 5, 6 }));
    // a layer waits from when its thread gets there, on a busy machine a moment after the read began
    const std::chrono::microseconds waited(tier.info().wait_us);
    CHECK(waited >= std::chrono::seconds(5) && waited <= std::chrono::steady_clock::now() - start && tier.info().error[0] == 0);
}

// Reads that nothing waits for have as many threads as there are for them, and hold them: what a layer asks for begins all
// the same, and what it finds waiting among them does, too.
static void test_urgent_reads_have_threads() {
    const model_file  file(2, 32);
    std::atomic<bool> holds{ true };
    std::atomic<int>  n_held{ 0 };
    const size_t      first_urgent = file.layers[1].part_data(SPAC_PART_UP, 0) - file.data;
    spac_memory_tier  tier(file.all(), 64 * file.expert_bytes(), false, [&](int fd, void * data, size_t bytes, uint64_t offset) -> long {
        const bool is_first = offset < first_urgent / SPAC_DISK_ALIGNMENT * SPAC_DISK_ALIGNMENT; // of the first layer
        n_held += is_first;
        while (is_first && holds) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        return pread(fd, data, bytes, (off_t) offset);
    });
    std::mt19937      rng(14);
    CHECK(tier.expect(file.layers[0].il, some(rng, 32, 32)) == 32); // 96 reads
    CHECK(tier.expect(file.layers[1].il, { 9 }) == 1);              // behind them all
    CHECK(use(tier, file, file.layers[1], { 3, 9, 11 }));           // would wait for ever
    CHECK(n_held <= spac_disk_reader::DEPTH);
    holds = false;
    CHECK(use(tier, file, file.layers[0], some(rng, 32, 32)));
}

// a layer that runs does without some of what was to be read for it: that is not read any more, unless it has begun
static void test_unneeded_reads_are_dropped() {
    const model_file     file(2, 64);
    std::atomic<bool>    holds{ true };
    spac_memory_tier     tier(file.all(), 128 * file.expert_bytes(), false, [&](int fd, void * data, size_t bytes, uint64_t offset) -> long {
        while (holds) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        return pread(fd, data, bytes, (off_t) offset);
    });
    std::mt19937         rng(15);
    std::vector<int32_t> all = some(rng, 64, 64), n_rows(64, 1);
    CHECK(tier.expect(file.layers[1].il, all) == 64);
    const auto there = std::make_unique<bool[]>(64);
    tier.request(file.layers[1], all.data() + 60, n_rows.data(), 4, 1, there.get());
    holds = false;
    for (int i = 60; i < 64; i++) {
        CHECK(tier.wait(file.layers[1].il, all[i]) && file.is_right(tier, file.layers[1], all[i]));
    }
    const spac_tier_info info = tier.info(); // 40 threads at most had begun, of one expert each
    CHECK(info.n_hit == 4 && info.n_miss == 0 && info.n_ahead < 64 && info.n_ahead >= 4);
    CHECK(use(tier, file, file.layers[1], all));
    CHECK(tier.info().n_miss == 64 - info.n_ahead);
}

// the pool's memory is there before anything is read into it
static void test_memory_is_touched() {
#ifdef MADV_POPULATE_WRITE
    const auto resident = [] {
        long   n_all = 0, n_here = 0;
        FILE * statm = fopen("/proc/self/statm", "r");
        CHECK(statm && fscanf(statm, "%ld %ld", &n_all, &n_here) == 2);
        fclose(statm);
        return n_here * sysconf(_SC_PAGESIZE);
    };
    const model_file file(4, 256);
    const long       before = resident();
    spac_memory_tier tier(file.all(), 1024 * file.expert_bytes());
    const long       bytes = (long) tier.info().pool_bytes;
    CHECK(bytes > 64 << 20);
    if (madvise((void *) (((uintptr_t) file.data + 8191) / 4096 * 4096), 0, MADV_POPULATE_WRITE) != 0) {
        printf("an old kernel touches no memory: skipped\n");
        return;
    }
    for (int i = 0; i < 3000 && resident() < before + bytes / 2; i++) { // sanitizers take and give, too
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    CHECK(resident() >= before + bytes / 2);
#endif
}

// the end comes while reads are under way, and while others wait for a thread
static void test_end_in_the_middle() {
    const model_file file(2, 64);
    for (int i = 0; i < 20; i++) {
        spac_memory_tier     tier(file.all(), 130 * file.expert_bytes(), false, [&](int fd, void * data, size_t bytes, uint64_t offset) -> long {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
            return pread(fd, data, bytes, (off_t) offset);
        });
        std::vector<int32_t> experts(64), n_rows(64, 1);
        for (int ie = 0; ie < 64; ie++) {
            experts[ie] = ie;
        }
        const auto there = std::make_unique<bool[]>(64);
        tier.request(file.layers[0], experts.data(), n_rows.data(), 64, 100, there.get());
        if (i % 2) {
            CHECK(tier.wait(file.layers[0].il, 0));
        }
    }
}

// ---- a device beside memory

static bool copy_right(spac_memory_tier & tier, const model_file & file, const spac_moe_layer & layer, int32_t ie) {
    return tier.copy_to_device(layer.il, ie, [&](const spac_expert_parts & parts) { CHECK(file.is_right(parts, layer, ie)); });
}

// from the pool where it has the expert, else straight from disk, which leaves the pool as it is
static void test_device_takes() {
    const model_file       file(2, 8);
    spac_memory_tier       tier(file.all(), 12 * file.expert_bytes(), true);
    const spac_moe_layer & layer = file.layers[0];
    CHECK(use(tier, file, layer, { 0, 1 }));
    const uint64_t n_reads = tier.info().n_reads;
    CHECK(copy_right(tier, file, layer, 0) && tier.info().n_reads == n_reads);
    CHECK(copy_right(tier, file, layer, 5) && tier.info().n_reads == n_reads + 3);
    const spac_tier_info info = tier.info();
    CHECK(info.n_to_device == 2 && info.n_to_device_read == 1 && info.n_resident == 2);
    CHECK(info.pool_bytes <= 12 * file.expert_bytes() && info.n_slots >= 11);
}

// what the device holds leaves the pool first, however much it was used; once it has left the device it is as useful as ever
static void test_device_holds() {
    const model_file file(2, 16);
    spac_memory_tier tier(file.all(), 17 * file.expert_bytes(), true);
    std::mt19937     rng(8);
    for (int i = 0; i < 20; i++) {
        use(tier, file, file.layers[0], { 7, 8 });
    }
    CHECK(copy_right(tier, file, file.layers[0], 7) && copy_right(tier, file, file.layers[0], 8));
    tier.left_device(file.layers[0].il, 8);
    use(tier, file, file.layers[1], some(rng, 16, 15)); // 17 slots or so: one of the two at least has to go
    const spac_tier_info before = tier.info();
    CHECK(use(tier, file, file.layers[0], { 8 }) && tier.info().n_miss == before.n_miss);
    CHECK(use(tier, file, file.layers[0], { 7 }) && tier.info().n_miss == before.n_miss + 1);
}

// used on the device or on the host: as useful for memory
static void test_device_uses() {
    const model_file       file(2, 16);
    spac_memory_tier       tier(file.all(), 18 * file.expert_bytes(), true);
    const spac_moe_layer & layer = file.layers[0];
    CHECK(use(tier, file, layer, { 1, 2 }));
    const int32_t  experts[] = { 1, 2 }, device_slots[] = { 3, -1 };
    const uint32_t n_rows[] = { 9, 9 };
    tier.use_on_device(layer.il, experts, n_rows, device_slots, 2);
    CHECK(use(tier, file, layer, { 3, 4 }));
    std::mt19937 rng(9);
    use(tier, file, file.layers[1], some(rng, 16, 14));
    const uint64_t n_miss = tier.info().n_miss;
    CHECK(use(tier, file, layer, { 1 }) && tier.info().n_miss == n_miss);
}

// while layers are computed, and others are expected
static void test_device_meanwhile() {
    const model_file  file(4, 16);
    spac_memory_tier  tier(file.all(), 20 * file.expert_bytes(), true);
    std::atomic<bool> is_over{ false };
    std::thread       device([&] {
        std::mt19937                         rng(10);
        std::vector<std::pair<int, int32_t>> held;
        while (!is_over) {
            const spac_moe_layer & layer = file.layers[rng() % 4];
            const int32_t          ie    = rng() % 16;
            CHECK(copy_right(tier, file, layer, ie));
            held.push_back({ layer.il, ie });
            if (held.size() > 8) {
                tier.left_device(held.front().first, held.front().second);
                held.erase(held.begin());
            }
        }
    });
    std::thread       predictor([&] {
        std::mt19937 rng(11);
        while (!is_over) {
            tier.expect(file.layers[rng() % 4].il, some(rng, 16, 3));
            std::this_thread::yield();
        }
    });
    std::mt19937      rng(12);
    for (int i = 0; i < 40; i++) {
        for (const spac_moe_layer & layer : file.layers) {
            CHECK(use(tier, file, layer, some(rng, 16, i % 8 == 7 ? 16 : 4), i % 8 == 7 ? 64 : 2, 2));
        }
    }
    is_over = true;
    device.join();
    predictor.join();
    CHECK(tier.info().n_to_device_read > 0);
}

// what cannot be read is not copied, and no forward fails for it; a stall is waited for
static void test_device_and_faults() {
    const model_file       file(2, 8);
    std::atomic<int>       fault{ 0 };
    spac_memory_tier       tier(file.all(), 10 * file.expert_bytes(), true, [&](int fd, void * data, size_t bytes, uint64_t offset) -> long {
        if (fault == 1) {
            errno = EIO;
            return -1;
        }
        if (fault == 2) {
            std::this_thread::sleep_for(std::chrono::milliseconds(50));
        }
        return pread(fd, data, bytes, (off_t) offset);
    });
    const spac_moe_layer & layer = file.layers[0];
    fault                        = 1;
    CHECK(!tier.copy_to_device(layer.il, 3, [](const spac_expert_parts &) { CHECK(!"there is nothing to copy"); }));
    CHECK(!tier.has_failed() && tier.info().n_to_device == 0);
    CHECK(!use(tier, file, layer, { 3 })); // who needs it hears of it
    CHECK(!copy_right(tier, file, layer, 3));
    fault = 2;
    CHECK(use(tier, file, layer, { 3 })); // a forward begins
    CHECK(copy_right(tier, file, layer, 3) && copy_right(tier, file, layer, 4));
    fault = 0;
    CHECK(ftruncate(file.fd, file.content.size() / 4) == 0);
    CHECK(!copy_right(tier, file, file.layers[1], 7));
}

int main() {
    test_bytes();
    test_large_blocks();
    test_odd_names();
    test_expected();
    test_wrongly_expected();
    test_wanted_by_copies();
    test_guesses_meanwhile();
    test_unreadable_guess();
    test_favourites_stay();
    test_victims();
    test_tournament();
    test_too_small();
    test_not_of_a_file();
    test_read_error();
    test_truncated();
    test_deleted();
    test_slow_disk();
    test_direct_reads_refused();
    for (long n_most : { 100L, (long) SPAC_DISK_ALIGNMENT + 100, 20000L }) {
        test_short_reads(n_most);
    }
    test_invalid_reads();
    test_urgent_reads_have_threads();
    test_stalled_disk();
    test_unneeded_reads_are_dropped();
    test_memory_is_touched();
    test_end_in_the_middle();
    test_device_takes();
    test_device_holds();
    test_device_uses();
    test_device_meanwhile();
    test_device_and_faults();
    return 0;
}
