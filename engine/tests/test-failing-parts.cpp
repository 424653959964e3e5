// An expert is read in parts: every order in which they begin, end and fail, and what the layer, a device or the next forward
// does meanwhile. Run under ASan and TSan too.
#include "model-file.h"

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <map>
#include <mutex>

// a disk whose reads end when they are told to
struct held_disk {
    const model_file &       file;
    std::mutex               mutex;
    std::condition_variable  begun, changed;
    std::map<uint64_t, bool> outcome; // by offset, of reads that may end
    bool                     holds   = true;
    int                      n_begun = 0;

    explicit held_disk(const model_file & file) :
        file(file) {}

    long read(void * data, size_t bytes, uint64_t offset) {
        std::unique_lock<std::mutex> lock(mutex);
        n_begun++;
        begun.notify_one();
        changed.wait(lock, [&] { return !holds || outcome.count(offset); });
        if (outcome.count(offset) && !outcome[offset]) {
            errno = EIO;
            return -1;
        }
        const size_t n = std::min<size_t>(bytes, file.content.size() - offset);
        memcpy(data, file.content.data() + offset, n);
        return (long) n;
    }

    void set(uint64_t offset, bool ok) {
        std::lock_guard<std::mutex> lock(mutex);
        outcome[offset] = ok;
        changed.notify_all();
    }

    void wait_begun(int n) {
        std::unique_lock<std::mutex> lock(mutex);
        begun.wait(lock, [&] { return n_begun >= n; });
    }

    // every thread has a read, and is done with the one before
    void end_one(uint64_t offset, bool ok) {
        const int n = n_begun_now();
        set(offset, ok);
        wait_begun(n + 1);
    }

    int n_begun_now() {
        std::lock_guard<std::mutex> lock(mutex);
        return n_begun;
    }

    void let_go() {
        std::lock_guard<std::mutex> lock(mutex);
        holds = false;
        changed.notify_all();
    }

    void heal() {
        std::lock_guard<std::mutex> lock(mutex);
        outcome.clear();
    }
};

static constexpr int PARTS[]  = { SPAC_PART_UP, SPAC_PART_GATE, SPAC_PART_DOWN }; // in the order in which they are read
static constexpr int N_PARTS  = 3;
static constexpr int N_EXPERT = 12, N_FILLERS = 10, N_MARKERS = 5, NEIGHBOUR = 0, VICTIM = 1;
static constexpr int N_THREADS = spac_disk_reader::DEPTH + spac_disk_reader::N_URGENT;

#ifdef __SANITIZE_THREAD__
static constexpr size_t STEP = 11; // forty threads for each take long
#else
static constexpr size_t STEP = 1;
#endif

enum action { DROPPED, // the layer runs without it, and what it asks for cannot be read
              ASKED_FOR,
              ABANDONED, // as well, by a forward that is aborted
              COPIED,    // to a device
              NOBODY,
              N_ACTIONS };

struct scenario {
    int              n_begun; // parts under way when the first one ends
    std::vector<int> order;   // in which these end
    int              n_ended; // before the action; the others after it
    int              mask;    // of parts that can be read
    action           what;
};

static uint64_t place_of(const model_file & file, int il, int ie, int part) {
    return (uint64_t) (file.layers[il].part_data(PARTS[part], ie) - file.data) / SPAC_DISK_ALIGNMENT * SPAC_DISK_ALIGNMENT;
}

// Layer 0's experts and layer 2's keep all threads busy: so what begins, and when, is no chance. A thread whose read ended takes
// an urgent one, of layer 2.
static void occupy_threads(spac_memory_tier & tier, const model_file & file, held_disk & disk, int n_begun) {
    std::vector<int32_t> fillers(N_FILLERS), markers(N_MARKERS);
    for (int32_t i = 0; i < N_FILLERS; i++) {
        fillers[i] = i;
    }
    for (int32_t i = 0; i < N_MARKERS; i++) {
        markers[i] = i;
    }
    CHECK(tier.expect(file.layers[0].il, fillers) == N_FILLERS);
    CHECK(tier.expect(file.layers[1].il, { NEIGHBOUR }) == 1); // 33 reads by now, of which 32 begin
    CHECK(tier.expect(file.layers[1].il, { VICTIM }) == 1);
    disk.wait_begun(spac_disk_reader::DEPTH);
    for (int i = 0; i <= n_begun; i++) { // the 33rd takes the place of the first
        disk.end_one(place_of(file, 0, i / N_PARTS, i % N_PARTS), true);
    }
    const std::vector<int32_t> n_rows(N_MARKERS, 1);
    bool                       there[N_MARKERS];
    tier.request(file.layers[2], markers.data(), n_rows.data(), N_MARKERS, 1, there);
    disk.wait_begun(N_THREADS + 1 + n_begun);
}

static void ask(spac_memory_tier & tier, const model_file & file, int32_t ie) {
    const int32_t n_rows = 1;
    bool          there;
    tier.request(file.layers[1], &ie, &n_rows, 1, 1, &there);
}

// whatever was before: a forward fails, the next one heals it, and all experts are what the file holds
static void check_after(spac_memory_tier & tier, const model_file & file, held_disk & disk) {
    disk.heal();
    const int32_t fresh = N_EXPERT - 1;
    disk.set(place_of(file, 0, fresh, 2), false);
    CHECK(!use(tier, file, file.layers[0], { fresh }) && tier.has_failed());
    disk.heal();
    std::vector<int32_t> all(N_EXPERT);
    for (int32_t ie = 0; ie < N_EXPERT; ie++) {
        all[ie] = ie;
    }
    for (const spac_moe_layer & layer : file.layers) {
        CHECK(use(tier, file, layer, all) && !tier.has_failed());
    }
    CHECK(tier.info().n_resident == 3 * N_EXPERT);
}

static void play(const model_file & file, const scenario & s) {
    held_disk        disk(file);
    const auto       read = [&](int, void * data, size_t bytes, uint64_t offset) { return disk.read(data, bytes, offset); };
    spac_memory_tier tier(file.all(), 1 << 30, true, read); // room for all
    occupy_threads(tier, file, disk, s.n_begun);

    const auto ok = [&](int part) { return (s.mask >> part & 1) != 0; };
    for (int i = 0; i < s.n_ended; i++) {
        disk.end_one(place_of(file, 1, VICTIM, s.order[i]), ok(s.order[i]));
    }
    std::thread device;
    bool        was_copied = false;
    if (s.what == DROPPED) {
        ask(tier, file, NEIGHBOUR);
        disk.set(place_of(file, 1, NEIGHBOUR, 1), false);
    } else if (s.what == ASKED_FOR || s.what == ABANDONED) {
        ask(tier, file, VICTIM);
        if (s.what == ABANDONED) {
            tier.begin_forward();
        }
    } else if (s.what == COPIED) {
        device = std::thread([&] {
            was_copied = tier.copy_to_device(file.layers[1].il, VICTIM, [&](const spac_expert_parts & parts) { CHECK(file.is_right(parts, file.layers[1], VICTIM)); });
        });
    }
    for (int part = 0; part < N_PARTS; part++) {
        disk.set(place_of(file, 1, VICTIM, part), ok(part));
    }
    disk.let_go();

    const bool is_whole = s.mask == 7;
    if (s.what == DROPPED) {
        CHECK(!tier.wait(file.layers[1].il, NEIGHBOUR) && tier.has_failed());
    } else if (s.what == ASKED_FOR) {
        CHECK(tier.wait(file.layers[1].il, VICTIM) == is_whole && tier.has_failed() == !is_whole);
        CHECK(!is_whole || file.is_right(tier, file.layers[1], VICTIM));
    } else if (s.what == ABANDONED) {
        ask(tier, file, NEIGHBOUR);
        CHECK(tier.wait(file.layers[1].il, NEIGHBOUR) && !tier.has_failed());
    } else if (s.what == COPIED) {
        device.join();
        CHECK(was_copied == is_whole && !tier.has_failed());
    }
    check_after(tier, file, disk);
}

// how many parts are under way, who of them ends when, and when somebody comes
static std::vector<scenario> all_scenarios(action what) {
    std::vector<scenario> all;
    for (int n_begun = 0; n_begun <= N_PARTS; n_begun++) {
        std::vector<int> order(n_begun);
        for (int i = 0; i < n_begun; i++) {
            order[i] = i;
        }
        do {
            for (int n_ended = 0; n_ended <= n_begun; n_ended++) {
                const bool is_another = std::is_sorted(order.begin() + n_ended, order.end()); // the others end as they please
                for (int mask = 0; is_another && mask < 8; mask++) {
                    all.push_back({ n_begun, order, n_ended, mask, what });
                }
            }
        } while (std::next_permutation(order.begin(), order.end()));
    }
    return all;
}

int main() {
    const model_file file(3, N_EXPERT, "test-failing-parts");
    for (int what = 0; what < N_ACTIONS; what++) {
        const std::vector<scenario> all = all_scenarios((action) what);
        for (size_t i = 0; i < all.size(); i += STEP) {
            play(file, all[i]);
        }
        printf("every %zu. of %zu orders of case %d\n", STEP, all.size(), what);
    }
    return 0;
}
