#include "cpus.h"

#include "status.h"

#ifdef __linux__

#    include <cerrno>
#    include <cstring>
#    include <pthread.h>
#    include <sched.h>

std::vector<int> spac_open_cpus() {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) != 0) {
        throw spac_error(SPAC_STATUS_INTERNAL, spac_format("cpu_range: the system does not say which cores are open to this process: %s; leave it out",
                                                           strerror(errno)));
    }
    std::vector<int> cpus;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (CPU_ISSET(cpu, &set)) {
            cpus.push_back(cpu);
        }
    }
    return cpus;
}

void spac_pin_thread(std::thread & thread, int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    if (const int error = pthread_setaffinity_np(thread.native_handle(), sizeof(set), &set)) {
        spac_log("a thread of the host cannot be pinned to core %d (%s): it runs anywhere", cpu, strerror(error));
    }
}

#else

std::vector<int> spac_open_cpus() {
    throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, "cpu_range: threads cannot be pinned on this system: leave it out");
}

void spac_pin_thread(std::thread &, int) {}

#endif
