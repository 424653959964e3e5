#include "openmp-team.h"

#ifdef _OPENMP
#    include <omp.h>
#endif

void spac_end_openmp_team() {
#ifdef _OPENMP
    omp_pause_resource(omp_pause_soft, omp_get_initial_device());
#endif
}
