#include "memory-tier.h"

#include "base/clock.h"
#include "base/status.h"
#include "direct-file.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstring>
#include <iterator>
#include <numeric>
#include <system_error>

#include <sys/mman.h>

static constexpr double PROMPT_TOKENS = 8.0; // what a wide batch counts as, at most: as for the scheduler

static double weight_of(int64_t n_batch) { // of a use in it
    return std::min(1.0, PROMPT_TOKENS / n_batch);
}

// matrices; biases and scales are a few kilobytes, and stay where llama.cpp has them
static bool is_on_disk(const spac_moe_layer & layer, int part) {
    return part < SPAC_PART_UP_B && layer.parts[part] != nullptr;
}

size_t spac_memory_tier::round_up(size_t n) const {
    const size_t block = files.alignment();
    return (n + block - 1) / block * block;
}

// of one part in a slot: any expert's bytes, in whole blocks of the disk
size_t spac_memory_tier::part_room(const spac_moe_layer & layer, int part) const {
    return round_up(layer.part_bytes(part) + files.alignment() - 1);
}

size_t spac_memory_tier::slot_room(const spac_moe_layer & layer) const {
    size_t bytes = 0;
    for (int part = 0; part < SPAC_N_PARTS; part++) {
        bytes += is_on_disk(layer, part) ? part_room(layer, part) : 0;
    }
    return bytes;
}

// ---- making it

spac_memory_tier::spac_memory_tier(const std::vector<const spac_moe_layer *> & split, uint64_t bytes, bool feeds_device, spac_disk_reader::read_fn read,
                                   size_t alignment) :
    files(alignment), n_extra(feeds_device) {
    for (const spac_moe_layer * layer : split) {
        add(*layer);
    }
    make_slots(bytes);
    reader = std::make_unique<spac_disk_reader>([this](const spac_disk_read & r, int error) { on_read(r, error); }, !files.is_direct(), std::move(read),
                                                files.alignment());
    try { // the last thing: nothing would end it if something after it failed
        toucher = std::thread([this] { touch(); });
    } catch (const std::system_error & e) {
        spac_log("memory for experts is cleared as it is used, the system has no thread for it (%s): the first reads may be slower", e.what());
    }
}

void spac_memory_tier::add(const spac_moe_layer & layer) {
    auto info   = std::make_unique<layer_info>();
    info->layer = &layer;
    info->experts.resize(layer.n_expert);
    for (int part = 0; part < SPAC_N_PARTS; part++) {
        if (is_on_disk(layer, part)) {
            info->parts[part] = files.find(layer.parts[part]->data, ggml_nbytes(layer.parts[part]));
        }
    }
    if (!layers.empty()) {
        layers.back()->next = info.get();
    }
    by_il.resize(std::max<size_t>(by_il.size(), layer.il + 1), -1);
    by_il[layer.il] = (int32_t) layers.size();
    layers.push_back(std::move(info));
}

spac_memory_tier::~spac_memory_tier() {
    reader.reset();
    is_ending = true;
    if (toucher.joinable()) {
        toucher.join();
    }
}

// Slots are as large as the largest expert, so that every layer can use each: a few percent more where quantisations
// differ from layer to layer.
void spac_memory_tier::make_slots(uint64_t bytes) {
    size_t  room     = 0;
    int64_t n_least  = 0; // experts of a layer: they must fit at once
    int64_t n_expert = 0;
    for (const auto & info : layers) {
        room    = std::max(room, slot_room(*info->layer));
        n_least = std::max(n_least, info->layer->n_expert);
        n_expert += info->layer->n_expert;
    }
    const size_t spare = files.alignment() > SPAC_DISK_ALIGNMENT ? files.alignment() : 0; // mmap gives whole pages
    n_slots            = (int32_t) std::min<uint64_t>((bytes - std::min<uint64_t>(bytes, spare)) / room, n_expert + n_extra) - n_extra;
    if (n_slots < n_least) {
        const double mib = 1024.0 * 1024.0;
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_format("%.0f MiB of memory cannot hold the experts of one layer at once: give %.0f MiB at least",
                                                                   bytes / mib, std::ceil(((n_least + n_extra) * room + spare) / mib)));
    }
    pool.bytes = (n_slots + n_extra) * room + spare;
    pool.data  = (char *) mmap(nullptr, pool.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pool.data == MAP_FAILED) {
        throw spac_error(SPAC_STATUS_OUT_OF_MEMORY, spac_format("no %.0f MiB of memory for experts", pool.bytes / 1024.0 / 1024.0));
    }
#ifdef MADV_HUGEPAGE
    madvise(pool.data, pool.bytes, MADV_HUGEPAGE); // a request only
#endif
    slots              = std::make_unique<slot[]>(n_slots + n_extra);
    char * const first = (char *) round_up((uintptr_t) pool.data);
    for (int32_t is = 0; is < n_slots + n_extra; is++) {
        slots[is].data = first + is * room;
    }
    victims = std::make_unique<spac_victims>(n_slots);
    for (int32_t is = 0; is < n_slots; is++) {
        rate(is);
    }
}

spac_memory_tier::mapping::~mapping() {
    if (data != MAP_FAILED) {
        munmap(data, bytes);
    }
}

// The kernel hands out memory when it is touched, and clears it, which the first reads would wait for: it is had while the
// rest of the model is loaded. (On a virtual machine whose host takes back what is free, 0.3 GB/s were measured.)
void spac_memory_tier::touch() const {
#ifdef MADV_POPULATE_WRITE
    static constexpr size_t PIECE = 64 << 20;
    for (size_t at = 0; at < pool.bytes && !is_ending; at += PIECE) {
        if (madvise(pool.data + at, std::min<size_t>(PIECE, pool.bytes - at), MADV_POPULATE_WRITE) != 0) {
            return; // an old kernel: as it is used, then
        }
    }
#endif
}

// ---- by the thread that plans

void spac_memory_tier::unpin_all() {
    for (int32_t is : pinned) {
        slots[is].is_pinned = false;
        rate(is);
    }
    pinned.clear();
}

void spac_memory_tier::pin(int32_t is) {
    slots[is].is_pinned = true;
    pinned.push_back(is);
    rate(is);
}

void spac_memory_tier::take(expert & e, double n_uses) {
    e.use  = (float) (e.use * std::exp2(-(n_tokens - e.last) / HALF_LIFE) + n_uses);
    e.last = n_tokens;
    e.rank = std::log2(e.use) + e.last / HALF_LIFE;
    if (e.slot >= 0) {
        rate(e.slot);
    }
}

// after every change of a slot, or of the expert in it
void spac_memory_tier::rate(int32_t is) {
    if (is >= n_slots) {
        return; // the extra one has no owner
    }
    const slot & s = slots[is];
    if (s.is_pinned || s.is_copied || s.now.load(std::memory_order_relaxed) == READING) {
        victims->set(is, spac_victims::IN_USE, 0.0);
    } else if (s.il < 0) {
        victims->set(is, spac_victims::FREE, 0.0);
    } else {
        const expert & e = info_of(s.il).experts[s.ie];
        victims->set(is, s.is_expected ? spac_victims::EXPECTED : spac_victims::HELD,
                     e.is_on_device ? -INFINITY : e.rank); // what the device has is not asked for here
    }
}

// the least useful that is not needed now, or (spares_expected) soon; -1: none
int32_t spac_memory_tier::find_victim(bool spares_expected) const {
    const int32_t            is   = victims->first();
    const spac_victims::kind kind = victims->kind_of(is);
    return kind == spac_victims::IN_USE || (kind == spac_victims::EXPECTED && spares_expected) ? -1 : is;
}

void spac_memory_tier::load(layer_info & info, int32_t ie, int32_t is, bool is_urgent) {
    if (slots[is].il >= 0) {
        forget(slots[is]);
    }
    info.experts[ie].slot = is;
    read(info, ie, is, is_urgent);
}

// into a free slot
void spac_memory_tier::read(layer_info & info, int32_t ie, int32_t is, bool is_urgent) {
    slot & s       = slots[is];
    s.il           = info.layer->il;
    s.ie           = ie;
    s.is_broken    = false;
    s.is_expected  = false;
    s.n_reads_left = 0;
    s.parts        = {};
    s.now.store(READING, std::memory_order_relaxed);
    rate(is);

    std::vector<spac_disk_read> reads;
    char *                      data = s.data;
    for (int part = 0; part < SPAC_N_PARTS; part++) {
        if (!is_on_disk(*info.layer, part)) {
            continue;
        }
        const uint64_t begin = info.parts[part].offset + ie * (uint64_t) info.layer->parts[part]->nb[2];
        const uint64_t end   = begin + info.layer->part_bytes(part);
        const uint64_t first = begin / files.alignment() * files.alignment();
        s.parts[part]        = data + (begin - first);
        reads.push_back({ info.parts[part].fd, first, round_up(end - first), (size_t) (end - first), data, is });
        data += part_room(*info.layer, part);
    }
    s.n_reads_left = (int32_t) reads.size();
    for (const spac_disk_read & read : reads) {
        reader->submit(read, is_urgent);
    }
}

void spac_memory_tier::forget(slot & s) {
    info_of(s.il).experts[s.ie].slot = -1;
    s.il = s.ie   = -1;
    s.is_expected = s.is_broken = false;
    rate((int32_t) (&s - slots.get()));
}

void spac_memory_tier::begin_forward() {
    std::unique_lock<std::mutex> lock(mutex);
    unpin_all(); // by the forward before, if it was aborted: what is still read for that is no failure of this one
    if (!has_failed()) {
        return;
    }
    const auto is_reading = [this](int32_t is) { return slots[is].now.load(std::memory_order_relaxed) == READING; };
    for (int32_t is = 0; is < n_slots; is++) {
        changed.wait(lock, [&] { return !is_reading(is); });
        slot & s = slots[is];
        if (s.is_broken) {
            forget(s);
        }
    }
    failed = false;
}

void spac_memory_tier::request(const spac_moe_layer & layer, const int32_t * experts, const int32_t * n_rows, size_t n, int64_t n_batch, bool * there) {
    std::unique_lock<std::mutex> lock(mutex);
    layer_info &                 info   = info_of(layer.il);
    const double                 weight = weight_of(n_batch);
    unpin_all();
    stop_expecting(info);
    if (&info == layers.front().get()) { // a forward begins
        n_tokens += std::min<double>(n_batch, PROMPT_TOKENS);
    }
    for (size_t i = 0; i < n; i++) { // before anybody has to leave
        expert & e = info.experts[experts[i]];
        take(e, n_rows[i] * weight);
        if (e.slot >= 0) {
            pin(e.slot);
        }
    }
    drop_unneeded(info);
    for (size_t i = 0; i < n; i++) {
        expert & e = info.experts[experts[i]];
        if (e.slot >= 0) {
            there[i] = slots[e.slot].now.load(std::memory_order_relaxed) == THERE;
            total.n_hit++;
            if (!there[i]) {
                reader->hurry(e.slot);
            }
            continue;
        }
        int32_t is = find_victim();
        while (is < 0 && (is = find_victim(false)) < 0) { // the rest is being read ahead; a pool holds a layer at least
            changed.wait(lock);
        }
        load(info, experts[i], is, true);
        pin(is);
        there[i] = false;
        total.n_miss++;
    }
    if (2 * (int64_t) n > layer.n_expert && info.next) {
        std::vector<int32_t> all(info.next->experts.size()); // in the file's order
        std::iota(all.begin(), all.end(), 0);
        read_ahead(*info.next, all);
    }
}

// of whose place it would be
double spac_memory_tier::rank_of(int32_t is) const {
    const slot & s = slots[is];
    return s.il < 0 || info_of(s.il).experts[s.ie].is_on_device ? -INFINITY : info_of(s.il).experts[s.ie].rank;
}

void spac_memory_tier::want(const spac_moe_layer & layer, const int32_t * experts, const int32_t * n_rows, size_t n, int64_t n_batch) {
    std::lock_guard<std::mutex> lock(mutex);
    layer_info &                info = info_of(layer.il);
    for (size_t i = 0; i < n; i++) {
        expert & e = info.experts[experts[i]];
        take(e, n_rows[i] * weight_of(n_batch));
        const int32_t is = e.slot < 0 && !e.is_on_device && !has_failed() ? find_victim() : -1;
        if (is >= 0 && rank_of(is) < e.rank) {
            load(info, experts[i], is, false);
            total.n_ahead++;
        }
    }
}

size_t spac_memory_tier::expect(int il, const std::vector<int32_t> & experts) {
    std::lock_guard<std::mutex> lock(mutex);
    layer_info &                info = info_of(il);
    std::vector<int32_t>        wanted; // of the host
    std::copy_if(experts.begin(), experts.end(), std::back_inserter(wanted), [&](int32_t ie) { return !info.experts[ie].is_on_device; });
    return has_failed() ? 0 : read_ahead(info, wanted);
}

// What was to be read ahead for a layer that runs now, and does without: as far as it has not begun. Of a prompt's experts
// read so that is a fifth where the disk is what it waits for.
void spac_memory_tier::drop_unneeded(layer_info & info) {
    for (const expert & e : info.experts) {
        slot * s = e.slot >= 0 ? &slots[e.slot] : nullptr;
        if (s && s->now.load(std::memory_order_relaxed) == READING && !s->is_pinned && !s->is_copied && reader->drop(e.slot, s->n_reads_left)) {
            s->now.store(FREE, std::memory_order_relaxed);
            forget(*s);
            total.n_ahead--;
        }
    }
}

void spac_memory_tier::stop_expecting(layer_info & info) {
    for (const expert & e : info.experts) {
        if (e.slot >= 0) {
            set_expected(e.slot, false);
        }
    }
}

void spac_memory_tier::set_expected(int32_t is, bool is_expected) {
    if (slots[is].is_expected != is_expected) {
        slots[is].is_expected = is_expected;
        rate(is);
    }
}

// as far as there are slots that are not needed; not urgent
size_t spac_memory_tier::read_ahead(layer_info & info, const std::vector<int32_t> & experts) {
    size_t n_begun = 0;
    for (int32_t ie : experts) { // before anybody has to leave
        if (const int32_t is = info.experts[ie].slot; is >= 0) {
            set_expected(is, true);
        }
    }
    for (int32_t ie : experts) {
        if (info.experts[ie].slot >= 0) {
            continue;
        }
        const int32_t is = find_victim();
        if (is < 0) {
            break;
        }
        load(info, ie, is, false);
        set_expected(is, true);
        n_begun++;
    }
    total.n_ahead += n_begun;
    return n_begun;
}

// ---- by those that compute

bool spac_memory_tier::wait(int il, int32_t ie) {
    const slot & s = slots[info_of(il).experts[ie].slot];
    if (s.now.load(std::memory_order_acquire) == THERE) {
        return true;
    }
    std::unique_lock<std::mutex> lock(mutex);
    if (n_waiting++ == 0) {
        waiting_since = spac_now_us();
    }
    changed.wait(lock, [&] { return s.now.load(std::memory_order_relaxed) != READING; });
    if (--n_waiting == 0) {
        total.wait_us += spac_now_us() - waiting_since;
    }
    return s.now.load(std::memory_order_relaxed) == THERE;
}

const char * spac_memory_tier::weights(int il, int32_t ie, int part) const {
    return slots[info_of(il).experts[ie].slot].parts[part];
}

// ---- on the reader's threads

void spac_memory_tier::on_read(const spac_disk_read & read, int error) {
    std::lock_guard<std::mutex> lock(mutex);
    slot &                      s = slots[read.slot];
    if (error) {
        s.is_broken           = true;
        const std::string why = error == ENODATA ? "the file has become shorter" : spac_format("%s (errno %d)", strerror(error), error);
        error_text            = spac_format("expert %d of layer %d cannot be read: %s, at byte %" PRIu64 " of %s", s.ie, s.il, why.c_str(), read.offset,
                                            spac_path_of(read.fd).c_str());
    }
    if (--s.n_reads_left > 0) {
        return;
    }
    const bool is_whole = !s.is_broken;
    if (!is_whole && s.is_pinned) {
        if (!has_failed()) {
            spac_log("%s", error_text.c_str());
        }
        failed.store(true, std::memory_order_relaxed);
    } else if (!is_whole && read.slot < n_slots) { // read ahead: whoever needs it reads it again, and hears of it then
        forget(s);
    }
    s.now.store(is_whole ? THERE : FREE, std::memory_order_release);
    rate(read.slot);
    changed.notify_all();
}

// ---- what was seen

spac_tier_info spac_memory_tier::info() const {
    std::lock_guard<std::mutex> lock(mutex);
    spac_tier_info              info = total;
    const spac_disk_stats       disk = reader->stats();
    info.pool_bytes                  = pool.bytes;
    info.n_slots                     = n_slots;
    info.is_direct                   = reader->is_direct();
    info.n_reads                     = disk.n_reads;
    info.read_bytes                  = disk.bytes;
    info.read_us                     = disk.read_us;
    info.busy_us                     = disk.busy_us;
    for (int32_t is = 0; is < n_slots; is++) {
        info.n_resident += slots[is].now.load(std::memory_order_relaxed) == THERE;
    }
    if (has_failed()) {
        snprintf(info.error, sizeof(info.error), "%s", error_text.c_str());
    }
    return info;
}

bool spac_memory_tier::is_there(int il, int32_t ie) const {
    std::lock_guard<std::mutex> lock(mutex);
    const int32_t               is = info_of(il).experts[ie].slot;
    return is >= 0 && slots[is].now.load(std::memory_order_relaxed) == THERE;
}

void spac_memory_tier::show(spac_board & board) const {
    *board.tier()         = info();
    const size_t n_expert = board.geometry().n_expert;
    std::fill_n(board.in_memory(), board.geometry().n_layer * n_expert, (uint8_t) 0);
    std::lock_guard<std::mutex> lock(mutex);
    board.tier()->n_resident = 0; // the same moment's
    for (int32_t is = 0; is < n_slots; is++) {
        const slot & s = slots[is];
        if (s.now.load(std::memory_order_relaxed) == THERE) {
            board.in_memory()[s.il * n_expert + s.ie] = 1;
            board.tier()->n_resident++;
        }
    }
}
