// What the engine calls of ggml's CPU backend, where that is a plugin (GGML_BACKEND_DL): one file per kind of CPU, of which
// ggml loads the best when a program starts. So nothing can be linked with it, and its functions are looked up in the file
// that was loaded. The backend's own list of functions (ggml_backend_reg_get_proc_address) has four of these twelve.
#if defined(GGML_BACKEND_DL)

#    include "ggml-backend-impl.h"
#    include "ggml-cpu.h"
#    include "ggml-cpu/ggml-cpu-impl.h"
#    include "ggml-cpu/traits.h"
#    include "spac.h"

#    include <dlfcn.h>

static void * open_plugin() {
    if (!ggml_backend_reg_by_name("CPU")) {
        spac_backend_load_all();
    }
    const ggml_backend_reg_t reg  = ggml_backend_reg_by_name("CPU");
    Dl_info                  info = {};
    void *                   file = reg && dladdr((void *) reg->iface.get_name, &info) ? dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD) : nullptr;
    if (!file) {
        GGML_ABORT("no CPU backend for this machine beside libggml.so: install pyspac again");
    }
    return file;
}

// the function of the same name; the first argument is there for its type
template <typename F>
static F * find(F &, const char * name) {
    static void * const plugin = open_plugin();
    void * const        symbol = dlsym(plugin, name);
    if (!symbol) {
        GGML_ABORT("%s is not in the CPU backend, which is of another llama.cpp: install pyspac again", name);
    }
    return (F *) symbol;
}

#    define FORWARD(name, ...)                       \
        static const auto found = find(name, #name); \
        return found(__VA_ARGS__)

ggml_threadpool * ggml_threadpool_new(ggml_threadpool_params * params) {
    FORWARD(ggml_threadpool_new, params);
}

void ggml_threadpool_free(ggml_threadpool * pool) {
    FORWARD(ggml_threadpool_free, pool);
}

ggml_cplan ggml_graph_plan(const ggml_cgraph * graph, int n_threads, ggml_threadpool * pool) {
    FORWARD(ggml_graph_plan, graph, n_threads, pool);
}

ggml_status ggml_graph_compute(ggml_cgraph * graph, ggml_cplan * plan) {
    FORWARD(ggml_graph_compute, graph, plan);
}

ggml_backend_t ggml_backend_cpu_init() {
    FORWARD(ggml_backend_cpu_init, );
}

void ggml_backend_cpu_set_n_threads(ggml_backend_t backend, int n_threads) {
    FORWARD(ggml_backend_cpu_set_n_threads, backend, n_threads);
}

void ggml_backend_cpu_set_threadpool(ggml_backend_t backend, ggml_threadpool_t pool) {
    FORWARD(ggml_backend_cpu_set_threadpool, backend, pool);
}

const ggml_type_traits_cpu * ggml_get_type_traits_cpu(ggml_type type) {
    FORWARD(ggml_get_type_traits_cpu, type);
}

void ggml_barrier(ggml_threadpool * pool) {
    FORWARD(ggml_barrier, pool);
}

void ggml_threadpool_chunk_set(ggml_threadpool * pool, int value) {
    FORWARD(ggml_threadpool_chunk_set, pool, value);
}

int ggml_threadpool_chunk_add(ggml_threadpool * pool, int value) {
    FORWARD(ggml_threadpool_chunk_add, pool, value);
}

std::vector<ggml_backend_buffer_type_t> & ggml_backend_cpu_get_extra_buffer_types() {
    static const auto found = find(ggml_backend_cpu_get_extra_buffer_types, "_Z39ggml_backend_cpu_get_extra_buffer_typesv");
    return found();
}

// the two classes are called only through their tables, so that the engine may have its own copy of what is in traits.cpp
namespace ggml::cpu {
tensor_traits::~tensor_traits() {}

extra_buffer_type::~extra_buffer_type() {}
} // namespace ggml::cpu

#endif
