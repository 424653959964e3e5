// Experts on disk without a model: a file that is mapped, and a layer's use of a tier over it.
#pragma once

#include "check.h"
#include "tier/memory-tier.h"

#include "ggml.h"

#include <atomic>
#include <cstring>
#include <random>
#include <string>
#include <thread>

#include <sys/mman.h>
#include <unistd.h>

// layers of Q8_0 experts in a temporary file that is mapped, as llama.cpp maps a model's; parts begin at odd offsets
struct model_file {
    static constexpr int64_t N_EMBD = 256, N_FF = 96;
    static constexpr size_t  HEADER = 1000 * 32 + 64;

    const int                   n_layer, n_expert;
    std::string                 path;
    int                         fd;
    std::vector<char>           content;
    char *                      data = nullptr;
    ggml_context *              ctx;
    std::vector<spac_moe_layer> layers;

    model_file(int n_layer, int n_expert, const char * name = "test-memory-tier") :
        n_layer(n_layer), n_expert(n_expert), path(std::string("/tmp/") + name + "-XXXXXX") {
        ctx = ggml_init({ ggml_tensor_overhead() * n_layer * 3, nullptr, true });
        std::vector<ggml_tensor *> tensors;
        for (int il = 0; il < n_layer; il++) {
            for (int part : { SPAC_PART_UP, SPAC_PART_GATE, SPAC_PART_DOWN }) {
                const bool is_down = part == SPAC_PART_DOWN;
                tensors.push_back(ggml_new_tensor_3d(ctx, GGML_TYPE_Q8_0, is_down ? N_FF : N_EMBD, is_down ? N_EMBD : N_FF, n_expert));
            }
        }
        size_t n_bytes = HEADER;
        for (const ggml_tensor * t : tensors) {
            n_bytes += GGML_PAD(ggml_nbytes(t), 32);
        }
        content.resize(n_bytes);
        std::mt19937 rng(1);
        for (char & c : content) {
            c = (char) rng();
        }
        fd = mkstemp(&path[0]);
        CHECK(fd >= 0 && write(fd, content.data(), n_bytes) == (ssize_t) n_bytes && fsync(fd) == 0);
        data = (char *) mmap(nullptr, n_bytes, PROT_READ, MAP_SHARED, fd, 0);
        CHECK(data != MAP_FAILED);

        char * at = data + HEADER;
        layers.resize(n_layer);
        for (int il = 0; il < n_layer; il++) {
            spac_moe_layer & layer = layers[il];
            layer.il               = 2 * il + 1; // with dense ones between
            layer.n_embd           = N_EMBD;
            layer.n_expert         = n_expert;
            layer.n_expert_used    = 2;
            for (int i = 0; i < 3; i++) {
                ggml_tensor * t = tensors[3 * il + i];
                t->data         = at;
                at += GGML_PAD(ggml_nbytes(t), 32);
                layer.parts[i == 0 ? SPAC_PART_UP : i == 1 ? SPAC_PART_GATE
                                                           : SPAC_PART_DOWN] = t;
            }
        }
    }

    ~model_file() {
        ggml_free(ctx);
        munmap(data, content.size());
        close(fd);
        unlink(path.c_str());
    }

    std::vector<const spac_moe_layer *> all() const {
        std::vector<const spac_moe_layer *> result;
        for (const spac_moe_layer & layer : layers) {
            result.push_back(&layer);
        }
        return result;
    }

    uint64_t expert_bytes() const { return layers[0].expert_bytes() + 3 * 2 * SPAC_DISK_ALIGNMENT; } // at most, in a slot

    // what a slot holds against what was written, not against the mapping: the file may change
    bool is_right(const spac_expert_parts & parts, const spac_moe_layer & layer, int32_t ie) const {
        for (int part : { SPAC_PART_UP, SPAC_PART_GATE, SPAC_PART_DOWN }) {
            const size_t at = layer.part_data(part, ie) - data;
            if (memcmp(parts[part], content.data() + at, layer.part_bytes(part)) != 0) {
                return false;
            }
        }
        return true;
    }

    bool is_right(const spac_memory_tier & tier, const spac_moe_layer & layer, int32_t ie) const {
        spac_expert_parts parts = {};
        for (int part : { SPAC_PART_UP, SPAC_PART_GATE, SPAC_PART_DOWN }) {
            parts[part] = tier.weights(layer.il, ie, part);
        }
        return is_right(parts, layer, ie);
    }
};

// the layer's experts, asked for as a batch of n_tokens would; false: one could not be read
static bool use(spac_memory_tier & tier, const model_file & file, const spac_moe_layer & layer, const std::vector<int32_t> & experts, int n_tokens = 1,
                int n_threads = 1) {
    const std::vector<int32_t> n_rows(experts.size(), 1);
    const auto                 there = std::make_unique<bool[]>(experts.size());
    if (&layer == &file.layers[0]) {
        tier.begin_forward();
    }
    tier.request(layer, experts.data(), n_rows.data(), experts.size(), n_tokens, there.get());

    std::atomic<bool>        all_read{ true };
    std::vector<std::thread> threads;
    for (int i = 0; i < n_threads; i++) {
        threads.emplace_back([&] {
            for (int32_t ie : experts) {
                if (!tier.wait(layer.il, ie)) {
                    all_read = false;
                } else {
                    CHECK(file.is_right(tier, layer, ie));
                }
            }
        });
    }
    for (std::thread & thread : threads) {
        thread.join();
    }
    return all_read;
}
