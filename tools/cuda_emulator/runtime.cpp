// The CUDA runtime on the CPU, as far as ggml-cuda calls it: memory, streams, events and graphs.
// A stream is a thread that takes jobs from a queue, so what is not ordered by events or synchronised may overtake.
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

using job = std::function<void()>;

static constexpr int    POISON     = 0x5a;    // device memory that was not written
static constexpr size_t MAX_POISON = 1 << 30; // of an allocation: beyond, untouched pages cost nothing

[[noreturn]] static void fail(const char * what) {
    fprintf(stderr, "cuda-emulator: %s\n", what);
    abort();
}

static size_t from_environment(const char * name, size_t otherwise) {
    const char * text = getenv(name);
    return text ? strtoull(text, nullptr, 10) : otherwise;
}

static void delay() {
    static const size_t at_most_us = from_environment("CUDA_EMULATOR_DELAY_US", 0);
    if (at_most_us) {
        std::this_thread::sleep_for(std::chrono::microseconds(rand() % at_most_us));
    }
}

// --- who calls what ---

static thread_local bool in_host_function = false;

// a line per call: number of the calling thread, name, and "blocks" where the caller waits for the device, or may
struct call_trace {
    FILE *     file = nullptr;
    std::mutex mutex;

    call_trace() {
        const char * path = getenv("CUDA_EMULATOR_TRACE");
        file              = path ? fopen(path, "a") : nullptr;
    }

    void add(const char * name, bool blocks) {
        static std::atomic<int>       n_threads{ 0 };
        static thread_local const int thread = n_threads++;
        if (file) {
            std::lock_guard<std::mutex> lock(mutex);
            fprintf(file, "%d %s%s\n", thread, name, blocks ? " blocks" : "");
            fflush(file);
        }
    }
};

// CUDA C++ Programming Guide: a function that a stream calls must not call CUDA, or it may wait for itself
void emu_called(const char * name, bool blocks) {
    if (in_host_function) {
        fail((std::string("a host function calls ") + name).c_str());
    }
    static call_trace * trace = new call_trace; // for good: threads of streams end late
    trace->add(name, blocks);
}

// --- streams, events, graphs ---

struct CUgraph_st {
    std::deque<job> jobs;
};

struct CUgraphExec_st {
    std::deque<job> jobs;
};

struct CUevent_st {
    std::mutex              mutex;
    std::condition_variable changed;
    uint64_t                n_recorded = 0, n_done = 0;

    uint64_t recorded() {
        std::lock_guard<std::mutex> lock(mutex);
        return n_recorded;
    }

    void finish(uint64_t n) {
        std::lock_guard<std::mutex> lock(mutex);
        n_done = std::max(n_done, n);
        changed.notify_all();
    }

    void wait(uint64_t n) {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [&] { return n_done >= n; });
    }
};

struct CUstream_st {
    CUstream_st() :
        thread([this] { work(); }) {}

    ~CUstream_st() {
        push(nullptr);
        thread.join();
    }

    void push(job j) {
        std::lock_guard<std::mutex> lock(mutex);
        (capture ? capture->jobs : queue).push_back(std::move(j));
        changed.notify_all();
    }

    void synchronize() {
        std::unique_lock<std::mutex> lock(mutex);
        if (capture) {
            fail("a stream is synchronised while it is captured");
        }
        changed.wait(lock, [&] { return queue.empty(); });
    }

    void begin_capture() { capture = std::make_unique<CUgraph_st>(); }

    CUgraph_st * end_capture() { return capture.release(); }

    bool is_capturing() const { return capture != nullptr; }

  private:
    void work() {
        for (;;) {
            std::unique_lock<std::mutex> lock(mutex);
            changed.wait(lock, [&] { return !queue.empty(); });
            const job & j = queue.front(); // stays there until it is done
            lock.unlock();
            if (!j) {
                return;
            }
            delay();
            j();
            lock.lock();
            queue.pop_front();
            changed.notify_all();
        }
    }

    std::mutex                  mutex;
    std::condition_variable     changed;
    std::deque<job>             queue; // addresses of its elements stay as others are added
    std::unique_ptr<CUgraph_st> capture;
    std::thread                 thread;
};

static std::mutex                 registry; // of streams and memory
static std::vector<CUstream_st *> streams;

static CUstream_st * new_stream() {
    auto *                      stream = new CUstream_st;
    std::lock_guard<std::mutex> lock(registry);
    streams.push_back(stream);
    return stream;
}

static CUstream_st & get(cudaStream_t stream) {
    static thread_local CUstream_st * per_thread = nullptr;
    if (stream == nullptr || stream == cudaStreamLegacy) {
        fail("the legacy default stream is not emulated");
    }
    if (stream != cudaStreamPerThread) {
        return *stream;
    }
    per_thread = per_thread ? per_thread : new_stream();
    return *per_thread;
}

void emu_enqueue(cudaStream_t stream, job j) {
    get(stream).push(std::move(j));
}

static void synchronize_all() {
    std::vector<CUstream_st *> all;
    {
        std::lock_guard<std::mutex> lock(registry);
        all = streams;
    }
    for (CUstream_st * stream : all) {
        stream->synchronize();
    }
}

// --- memory ---

// bytes by address; what is pinned is host memory that is copied without waiting
static std::map<char *, size_t> device_memory, pinned_memory;

static size_t total_memory() {
    static const size_t total = from_environment("CUDA_EMULATOR_VRAM_MIB", 8192) * 1024 * 1024;
    return total;
}

static size_t used_memory() {
    size_t used = 0;
    for (const auto & [address, size] : device_memory) {
        used += size;
    }
    return used;
}

static bool is_in(const std::map<char *, size_t> & memory, const void * at) {
    std::lock_guard<std::mutex> lock(registry);
    auto                        next = memory.upper_bound((char *) at);
    return next != memory.begin() && (char *) at < std::prev(next)->first + std::prev(next)->second;
}

extern "C" {

cudaError_t cudaMalloc(void ** out, size_t size) {
    emu_called("cudaMalloc", true);
    std::lock_guard<std::mutex> lock(registry);
    if (used_memory() + size > total_memory()) {
        return cudaErrorMemoryAllocation;
    }
    *out = aligned_alloc(4096, (size + 4095) / 4096 * 4096);
    memset(*out, POISON, std::min(size, MAX_POISON));
    device_memory[(char *) *out] = size;
    return cudaSuccess;
}

cudaError_t cudaFree(void * at) {
    emu_called("cudaFree", true);
    synchronize_all();
    std::lock_guard<std::mutex> lock(registry);
    if (at && device_memory.erase((char *) at) == 0) {
        fail("cudaFree of what is not allocated");
    }
    free(at);
    return cudaSuccess;
}

cudaError_t cudaMallocHost(void ** out, size_t size) {
    emu_called("cudaMallocHost", true);
    *out = aligned_alloc(4096, (size + 4095) / 4096 * 4096);
    return cudaHostRegister(*out, size, 0);
}

cudaError_t cudaFreeHost(void * at) {
    emu_called("cudaFreeHost", true);
    synchronize_all();
    cudaHostUnregister(at);
    free(at);
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void * at, size_t size, unsigned) {
    emu_called("cudaHostRegister", true);
    std::lock_guard<std::mutex> lock(registry);
    pinned_memory[(char *) at] = size;
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void * at) {
    emu_called("cudaHostUnregister", true);
    std::lock_guard<std::mutex> lock(registry);
    pinned_memory.erase((char *) at);
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t * n_free, size_t * total) {
    emu_called("cudaMemGetInfo", false);
    std::lock_guard<std::mutex> lock(registry);
    *total  = total_memory();
    *n_free = *total - used_memory();
    return cudaSuccess;
}

// CUDA Runtime API, "API synchronization behavior": of pageable host memory the source is copied before the call returns,
// and the destination is written before it returns
cudaError_t cudaMemcpyAsync(void * to, const void * from, size_t size, cudaMemcpyKind kind, cudaStream_t stream) {
    const bool from_device = is_in(device_memory, from), to_device = is_in(device_memory, to);
    if ((kind == cudaMemcpyHostToDevice && (from_device || !to_device)) ||
        (kind == cudaMemcpyDeviceToHost && (!from_device || to_device)) ||
        (kind == cudaMemcpyDeviceToDevice && !(from_device && to_device))) {
        fail("cudaMemcpyAsync with addresses that do not fit its direction");
    }
    const bool to_pageable = !to_device && !is_in(pinned_memory, to);
    emu_called("cudaMemcpyAsync", to_pageable);
    if (!from_device && !is_in(pinned_memory, from)) {
        auto copy = std::make_shared<std::vector<char>>((const char *) from, (const char *) from + size);
        emu_enqueue(stream, [=] { memcpy(to, copy->data(), size); });
        return cudaSuccess;
    }
    emu_enqueue(stream, [=] { memcpy(to, from, size); });
    if (to_pageable) {
        get(stream).synchronize();
    }
    return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void * to, size_t to_pitch, const void * from, size_t from_pitch, size_t width, size_t height,
                              cudaMemcpyKind kind, cudaStream_t stream) {
    for (size_t i = 0; i < height; i++) {
        cudaMemcpyAsync((char *) to + i * to_pitch, (const char *) from + i * from_pitch, width, kind, stream);
    }
    return cudaSuccess;
}

cudaError_t cudaMemcpyPeerAsync(void * to, int, const void * from, int, size_t size, cudaStream_t stream) {
    return cudaMemcpyAsync(to, from, size, cudaMemcpyDeviceToDevice, stream);
}

cudaError_t cudaMemsetAsync(void * at, int value, size_t size, cudaStream_t stream) {
    emu_called("cudaMemsetAsync", false);
    if (!is_in(device_memory, at)) {
        fail("cudaMemsetAsync of what is not on the device");
    }
    emu_enqueue(stream, [=] { memset(at, value, size); });
    return cudaSuccess;
}

cudaError_t cudaMemset(void * at, int value, size_t size) {
    emu_called("cudaMemset", true);
    synchronize_all();
    memset(at, value, size);
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t * out, unsigned) {
    emu_called("cudaStreamCreateWithFlags", false);
    *out = new_stream();
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    emu_called("cudaStreamDestroy", true);
    {
        std::lock_guard<std::mutex> lock(registry);
        streams.erase(std::find(streams.begin(), streams.end(), stream));
    }
    delete stream;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    emu_called("cudaStreamSynchronize", true);
    get(stream).synchronize();
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
    emu_called("cudaDeviceSynchronize", true);
    synchronize_all();
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t * out, unsigned) {
    emu_called("cudaEventCreateWithFlags", false);
    *out = new CUevent_st;
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    emu_called("cudaEventDestroy", true);
    synchronize_all();
    delete event;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    emu_called("cudaEventRecord", false);
    event->mutex.lock();
    const uint64_t n = ++event->n_recorded;
    event->mutex.unlock();
    emu_enqueue(stream, [=] { event->finish(n); });
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    emu_called("cudaEventSynchronize", true);
    event->wait(event->recorded());
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    emu_called("cudaStreamWaitEvent", false);
    emu_enqueue(stream, [=, n = event->recorded()] { event->wait(n); });
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void * data) {
    emu_called("cudaLaunchHostFunc", false);
    emu_enqueue(stream, [=] {
        delay(); // in a graph as well
        in_host_function = true;
        function(data);
        in_host_function = false;
    });
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    emu_called("cudaStreamBeginCapture", false);
    get(stream).begin_capture();
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t * out) {
    emu_called("cudaStreamEndCapture", false);
    *out = get(stream).end_capture();
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus * out) {
    emu_called("cudaStreamIsCapturing", false);
    *out = get(stream).is_capturing() ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t * out, cudaGraph_t graph, unsigned long long) {
    emu_called("cudaGraphInstantiate", false);
    *out = new CUgraphExec_st{ graph->jobs };
    return cudaSuccess;
}

cudaError_t cudaGraphExecUpdate(cudaGraphExec_t exec, cudaGraph_t graph, cudaGraphExecUpdateResultInfo * info) {
    emu_called("cudaGraphExecUpdate", false);
    exec->jobs   = graph->jobs;
    info->result = cudaGraphExecUpdateSuccess;
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
    emu_called("cudaGraphLaunch", false);
    emu_enqueue(stream, [jobs = exec->jobs] {
        for (const job & j : jobs) {
            j();
        }
    });
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    emu_called("cudaGraphDestroy", false);
    delete graph;
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    emu_called("cudaGraphExecDestroy", false);
    delete exec;
    return cudaSuccess;
}

// --- devices: they share the memory ---

static int n_devices() {
    const char * text = getenv("CUDA_EMULATOR_DEVICES");
    return text ? atoi(text) : 1;
}

static thread_local int current_device = 0;

cudaError_t cudaGetDeviceCount(int * out) {
    emu_called("cudaGetDeviceCount", false);
    *out = n_devices();
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int * out) {
    emu_called("cudaGetDevice", false);
    *out = current_device;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    emu_called("cudaSetDevice", false);
    if (device < 0 || device >= n_devices()) {
        fail("cudaSetDevice of a device that is not there");
    }
    current_device = device;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp * p, int) {
    emu_called("cudaGetDeviceProperties", false);
    *p = {};
    snprintf(p->name, sizeof(p->name), "emulated on the CPU");
    p->major                       = EMULATED_ARCH / 100;
    p->minor                       = EMULATED_ARCH / 10 % 10;
    p->totalGlobalMem              = total_memory();
    p->multiProcessorCount         = 4;
    p->warpSize                    = 32;
    p->sharedMemPerBlock           = 48 * 1024;
    p->sharedMemPerBlockOptin      = 227 * 1024;
    p->maxThreadsPerBlock          = 1024;
    p->maxThreadsPerMultiProcessor = 2048;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int * out, cudaDeviceAttr, int) {
    emu_called("cudaDeviceGetAttribute", false);
    *out = 0; // what is asked for is optional
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char * out, int size, int device) {
    emu_called("cudaDeviceGetPCIBusId", false);
    snprintf(out, size, "0000:00:%02x.0", device);
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int * out, int, int) {
    emu_called("cudaDeviceCanAccessPeer", false);
    *out = 0;
    return cudaSuccess;
}

cudaError_t cudaGetLastError() {
    return cudaSuccess;
}

const char * cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "out of memory" : "not emulated";
}
}
