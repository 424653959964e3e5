#include "lost-server.h"

#include "base/status.h"

#include "ggml.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <unistd.h>
#include <vector>

static std::mutex               mutex; // guards the endpoints
static std::vector<std::string> endpoints;
static ggml_abort_callback_t    before = nullptr; // somebody else's

static std::string names() {
    std::string text;
    for (const std::string & endpoint : endpoints) {
        text += (text.empty() ? "" : ", ") + endpoint;
    }
    return text;
}

// on the thread that aborts
static void end(const char * message) {
    if (strstr(message, "RPC server crashed")) {
        std::unique_lock<std::mutex> lock(mutex, std::try_to_lock);
        spac_log("%s %s is gone, and what it held of the model with it: start it again, or leave it out of --rpc",
                 endpoints.size() == 1 ? "the RPC server" : "one of the RPC servers", names().c_str());
        _exit(1); // no destructor: they would ask it again
    }
    if (before) {
        before(message);
    } else {
        fprintf(stderr, "%s\n", message);
    }
}

void spac_name_lost_server(const std::string & endpoint) {
    std::lock_guard<std::mutex> lock(mutex);
    if (endpoints.empty()) {
        before = ggml_set_abort_callback(end);
    }
    if (std::find(endpoints.begin(), endpoints.end(), endpoint) == endpoints.end()) {
        endpoints.push_back(endpoint);
    }
}
