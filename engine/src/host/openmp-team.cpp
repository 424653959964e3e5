#include "openmp-team.h"

#ifdef __linux__
#    include <sys/syscall.h>
#    include <unistd.h>
#endif

#ifdef _OPENMP
#    include <omp.h>
#endif

void spac_end_openmp_team() {
#ifdef _OPENMP
    omp_pause_resource(omp_pause_soft, omp_get_initial_device());
#endif
}

int spac_thread_id() {
#ifdef __linux__
    return (int) syscall(SYS_gettid);
#else
    return 0;
#endif
}

std::vector<int> spac_openmp_threads(int n) {
#ifdef _OPENMP
    std::vector<int>     ids(n, 0);
    int                  n_found = 0;
#    pragma omp parallel num_threads(n)
    {
        ids[omp_get_thread_num()] = spac_thread_id();
#    pragma omp single
        n_found = omp_get_num_threads();
    }
    ids.resize(n_found);
    return ids;
#else
    return n > 0 ? std::vector<int>{ spac_thread_id() } : std::vector<int>();
#endif
}
