#include "home-process.h"

#include <pthread.h>

static int n_forks_of_process = 0; // written in a child before anything else runs there

static int count_forks() {
    static const int error = pthread_atfork(nullptr, nullptr, [] { n_forks_of_process++; });
    (void) error; // no memory for it: forks are not seen
    return n_forks_of_process;
}

spac_home_process::spac_home_process() :
    n_forks(count_forks()) {}

bool spac_home_process::is_this() const {
    return n_forks == n_forks_of_process;
}
