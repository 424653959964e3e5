// A node that reads a tensor while the graph runs, and changes nothing.
#pragma once

#include "ggml-backend.h"
#include "ggml.h"
#include "llama-moe-hook.h"

// adds it to the hook's graph, on a backend that can call it; op: gets `src` as its only source, and writes one unused number
inline void spac_add_reader_node(const llama_moe_hook_params & p, ggml_backend_t backend, const char * name, ggml_tensor * src, ggml_custom_op_t op,
                                 void * user_data) {
    ggml_tensor * node = ggml_custom_4d(p.ctx, GGML_TYPE_I32, 1, 1, 1, 1, &src, 1, op, 1, user_data);
    ggml_backend_sched_set_tensor_backend(p.sched, node, backend);
    ggml_format_name(node, "%s-%d", name, p.il);
    ggml_build_forward_expand(p.gf, node);
}
