// Loads ggml's backends, where they are plugins.
#include "status.h"

#include "ggml-backend.h"

#include <dlfcn.h>
#include <string>

// while backends are loaded: which file each comes from is not news
struct quiet_log {
    ggml_log_callback callback = nullptr;
    void *            data     = nullptr;

    quiet_log() {
        ggml_log_get(&callback, &data);
        ggml_log_set(pass, this);
    }

    ~quiet_log() { ggml_log_set(callback, data); }

    static void pass(ggml_log_level level, const char * text, void * self) {
        const auto * before = (const quiet_log *) self;
        if (level >= GGML_LOG_LEVEL_WARN) {
            before->callback(level, text, before->data);
        }
    }
};

// those beside libggml.so: ggml itself would look beside the program, which may be Python, and in the current folder
static bool load_backends() {
    const quiet_log quiet;
    Dl_info         info = {};
    dladdr((void *) ggml_backend_load_all_from_path, &info);
    const std::string path = info.dli_fname ? info.dli_fname : "";
    ggml_backend_load_all_from_path(path.substr(0, path.rfind('/') + 1).c_str());
    return true;
}

spac_status spac_backend_load_all(void) {
    return spac_guard([] { static const bool is_loaded = load_backends(); (void) is_loaded; });
}
