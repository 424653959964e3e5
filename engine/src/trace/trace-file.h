// The file of a routing trace: records, one behind the other, of all contexts that record at the same time.
//
//   "spactrc1", then per record: its kind, the context (0: the first that was made), the bytes that follow
//   SPAC_TRACE_FORWARD  int32 [4][n_tokens]: ids (-1: an embedding), positions, sequences (of several the lowest), whether a token has an output
//   SPAC_TRACE_NODE     spac_trace_node, then the tensor's elements without gaps
//   SPAC_TRACE_END      nothing: the context's last forward was computed to its end
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

enum spac_trace_kind : uint32_t {
    SPAC_TRACE_FORWARD = 1,
    SPAC_TRACE_NODE    = 2,
    SPAC_TRACE_END     = 3,
};

// what: "topk", "weights" (the last of a layer counts), "logits" (likewise), and behind logits "input" [n_embd, n_tokens];
// "router" [n_embd, n_expert] and "bias" [n_expert] once per context
struct spac_trace_node {
    char    what[16];
    int32_t il;
    int32_t type; // ggml_type
    int64_t ne[4];
};

struct spac_trace_file {
    // the file of that path, which is emptied where no context of this process has it already
    // throws SPAC_STATUS_INVALID_ARGUMENT where it cannot be written, or another process writes it
    static std::shared_ptr<spac_trace_file> open(const std::string & path);

    explicit spac_trace_file(const std::string & path);
    ~spac_trace_file();

    spac_trace_file(const spac_trace_file &) = delete;

    uint32_t add_context() { return n_contexts++; }

    // the parts of a record follow each other; the first error is said, and nothing is written after it
    void write(spac_trace_kind kind, uint32_t context, const std::vector<std::pair<const void *, size_t>> & parts);
    void flush(); // readers see all that was written
    bool has_failed() const { return failed; }

  private:
    void check(bool is_good);

    const std::string path;
    FILE *            file       = nullptr;
    uint32_t          n_contexts = 0;
    bool              failed     = false;
    std::mutex        mutex;
};
