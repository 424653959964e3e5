#include "expert-copy.h"

#include "base/status.h"
#include "weight-reader.h"

#include "llama.h"

#include <cerrno>
#include <cinttypes>
#include <cstring>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

static constexpr size_t ALIGNMENT = 64;

static spac_error refusal(const std::string & path, const std::string & why) {
    return spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_format("a copy of the experts cannot be read from %s: %s", path.c_str(), why.c_str()));
}

// ---- the files

spac_expert_copy::file::file(const std::string & path) :
    path(path) {
    ggml_context * ctx = nullptr;
    struct stat    st  = {};
    fd                 = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st) != 0) {
        const std::string why = strerror(errno);
        if (fd >= 0) {
            close(fd);
        }
        throw refusal(path, why);
    }
    n_bytes = st.st_size;
    header.reset(S_ISREG(st.st_mode) ? gguf_init_from_file(path.c_str(), { true, &ctx }) : nullptr);
    tensors.reset(ctx);
    if (!header || !tensors) {
        close(fd);
        throw refusal(path, "it is no GGUF, or its header is cut off");
    }
}

spac_expert_copy::file::~file() {
    close(fd);
}

void spac_expert_copy::open(const std::string & path) {
    files.push_back(std::make_unique<file>(path));
    const gguf_context * header = files[0]->header.get();
    const int64_t        key    = gguf_find_key(header, "split.count");
    const int            n      = key >= 0 && gguf_get_kv_type(header, key) == GGUF_TYPE_UINT16 ? gguf_get_val_u16(header, key) : 1;
    std::vector<char>    prefix(path.size() + 1), name(path.size() + 32);
    if (n > 1 && llama_split_prefix(prefix.data(), prefix.size(), path.c_str(), 0, n) <= 0) {
        throw refusal(path, spac_format("it is one of %d files, but not the first by name: give the one that ends in -00001-of-%05d.gguf", n, n));
    }
    for (int i = 1; i < n; i++) {
        llama_split_path(name.data(), name.size(), prefix.data(), i, n);
        files.push_back(std::make_unique<file>(name.data()));
    }
}

// ---- the tensors

// NULL: there is none
ggml_tensor * spac_expert_copy::find(const std::string & name, file ** holder) const {
    for (const auto & f : files) {
        if (ggml_tensor * t = ggml_get_tensor(f->tensors.get(), name.c_str())) {
            if (holder) {
                *holder = f.get();
            }
            return t;
        }
    }
    return nullptr;
}

static std::string shape_of(const ggml_tensor & t) {
    return spac_format("[%" PRId64 ", %" PRId64 ", %" PRId64 "]", t.ne[0], t.ne[1], t.ne[2]);
}

void spac_expert_copy::check_whole(const file & f, const std::string & name) const {
    const int64_t  i   = gguf_find_tensor(f.header.get(), name.c_str());
    const uint64_t end = gguf_get_data_offset(f.header.get()) + gguf_get_tensor_offset(f.header.get(), i) + gguf_get_tensor_size(f.header.get(), i);
    if (end > f.n_bytes) {
        throw refusal(f.path, spac_format("it is cut off: %s ends at byte %" PRIu64 ", the file at %" PRIu64 "; fetch it again", name.c_str(), end, f.n_bytes));
    }
}

// the copy's tensor of this name, to be loaded
ggml_tensor * spac_expert_copy::take(const ggml_tensor & like) {
    file *        holder = nullptr;
    ggml_tensor * found  = find(like.name, &holder);
    if (!found) {
        throw refusal(files[0]->path, spac_format("it has no %s, which the model has: give a file of the same model", like.name));
    }
    if (!ggml_are_same_shape(found, &like)) {
        throw refusal(holder->path, spac_format("its %s is %s, the model's %s: give a file of the same model", like.name, shape_of(*found).c_str(),
                                                shape_of(like).c_str()));
    }
    check_whole(*holder, like.name);
    taken.push_back(found);
    return found;
}

// a format may come with a scale for each expert, which another one has not
static constexpr const char * SCALE_OF[] = { "up", "gate", "down" };

spac_expert_copy::spac_expert_copy(const std::string & path, const std::vector<const spac_moe_layer *> & layers) {
    open(path);
    for (const spac_moe_layer * layer : layers) {
        spac_moe_layer & copy = by_il[layer->il] = *layer;
        copy.copy                                = nullptr; // an earlier one is no copy of this one
        for (int part = 0; part < SPAC_PART_UP_B; part++) {
            copy.parts[part] = layer->parts[part] ? take(*layer->parts[part]) : nullptr;
        }
        ggml_tensor ** const scales[] = { &copy.up_s, &copy.gate_s, &copy.down_s };
        for (int i = 0; i < 3; i++) {
            ggml_tensor * found = find(spac_format("blk.%d.ffn_%s_exps.scale", layer->il, SCALE_OF[i]));
            *scales[i]          = found && !(i == 1 && layer->parts[SPAC_PART_GATE_UP]) ? take(*found) : nullptr;
            if (*scales[i] && ((*scales[i])->type != GGML_TYPE_F32 || (*scales[i])->ne[0] != layer->n_expert)) {
                throw refusal(path, spac_format("%s are not %" PRId64 " of F32: give another quantisation", found->name, layer->n_expert));
            }
        }
    }
}

uint64_t spac_expert_copy::bytes() const {
    uint64_t sum = 0;
    for (const ggml_tensor * t : taken) {
        sum += GGML_PAD(ggml_nbytes(t), ALIGNMENT);
    }
    return sum;
}

void spac_expert_copy::load() {
    buffer.reset(ggml_backend_buft_alloc_buffer((ggml_backend_buffer_type_t) spac_host_buffer_type(), bytes()));
    if (!buffer) {
        throw spac_error(SPAC_STATUS_OUT_OF_MEMORY, spac_format("no %.0f MiB of memory for the copy of the experts from %s", bytes() / 1048576.0, files[0]->path.c_str()));
    }
    std::vector<llama_weight_read> reads;
    char *                         at = (char *) ggml_backend_buffer_get_base(buffer.get());
    for (ggml_tensor * t : taken) {
        file * f = nullptr;
        find(t->name, &f);
        const int64_t i = gguf_find_tensor(f->header.get(), t->name);
        reads.push_back({ f->fd, gguf_get_data_offset(f->header.get()) + gguf_get_tensor_offset(f->header.get(), i), ggml_nbytes(t), at });
        t->data   = at;
        t->buffer = buffer.get();
        at += GGML_PAD(ggml_nbytes(t), ALIGNMENT);
    }
    spac_weight_reader(reads.data(), reads.size()).run([](uint64_t) { return true; });
}
