// The experts of a model once more, in fewer bits: out of another GGUF of the same model, whose expert tensors have the same
// names and shapes, into memory. What is lossy may compute an expert that is not there from it.
#pragma once

#include "layers/moe-layer.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "gguf.h"

#include <cstdint>
#include <map>
#include <string>
#include <vector>

struct spac_expert_copy {
    // path: of a GGUF, or of the first of several; layers: the model's
    // reads headers; throws SPAC_STATUS_INVALID_ARGUMENT where it is no copy of them
    spac_expert_copy(const std::string & path, const std::vector<const spac_moe_layer *> & layers);

    void load(); // until then no tensor has data; throws SPAC_STATUS_OUT_OF_MEMORY, and as spac_weight_reader does

    uint64_t bytes() const;

    std::map<int, spac_moe_layer> by_il; // the model's layers with the copy's matrices and scales

  private:
    struct file {
        explicit file(const std::string & path);
        file(const file &) = delete;
        ~file();

        const std::string path;
        int               fd      = -1;
        uint64_t          n_bytes = 0;
        ggml_context_ptr  tensors;
        gguf_context_ptr  header;
    };

    void          open(const std::string & path);
    ggml_tensor * find(const std::string & name, file ** holder = nullptr) const;
    ggml_tensor * take(const ggml_tensor & like);
    void          check_whole(const file & f, const std::string & name) const;

    std::vector<std::unique_ptr<file>> files;
    std::vector<ggml_tensor *>         taken;
    ggml_backend_buffer_ptr            buffer; // of their data
};
