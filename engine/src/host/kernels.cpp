#include "kernels.h"

#include "base/status.h"

#include <cstdlib>
#include <cstring>
#include <string>

#if defined(__x86_64__)
#    include <cpuid.h>
#    include <sys/syscall.h>
#    include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#    include <asm/hwcap.h>
#    include <sys/auxv.h>
#endif

// ---- the processor

bool spac_prefetch_by_l2() {
#if defined(__x86_64__)
    static const bool is_intel = __builtin_cpu_is("intel");
    return is_intel;
#else
    return false;
#endif
}

// ---- registration

// whether the processor and the system have what each was compiled with (engine/CMakeLists.txt)

#if defined(__x86_64__)

static bool can_run_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("bmi2");
}

static bool can_run_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

// compilers before GCC 14 have no name for it: leaf 7.1, EAX bit 4
static bool can_run_avxvnni() {
    unsigned eax = 0, ebx, ecx, edx;
    return can_run_avx2() && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & (1 << 4));
}

// Linux keeps a process's tiles when it is asked to (arch_prctl(2)): ARCH_REQ_XCOMP_PERM, the component XFEATURE_XTILEDATA
static bool may_use_tiles() {
#    if defined(__linux__)
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#    else
    return false;
#    endif
}

// leaf 7.0, EDX: bit 22 tiles of bf16, bit 24 tiles; leaf 7.1, EAX: bit 5 vectors of bf16
static bool can_run_amx() {
    const unsigned wanted = 1u << 22 | 1u << 24;
    unsigned       eax, ebx, ecx, edx = 0, eax_1 = 0, unused;
    return can_run_avx512() && __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & wanted) == wanted &&
           __get_cpuid_count(7, 1, &eax_1, &unused, &unused, &unused) && (eax_1 & 1u << 5) && may_use_tiles();
}

#elif defined(__aarch64__) && defined(__linux__)

static bool can_run_neon() {
    return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
}

#endif

std::vector<const spac_kernels *> spac_kernels_here() {
    std::vector<const spac_kernels *> here;

    const auto add = [&](const spac_kernels * kernels, bool can_run) {
        if (kernels && can_run) {
            here.push_back(kernels);
        }
    };
#if defined(__x86_64__)
    add(spac_kernels_amx(), can_run_amx());
    add(spac_kernels_avx512(), can_run_avx512());
    add(spac_kernels_avxvnni(), can_run_avxvnni());
    add(spac_kernels_avx2(), can_run_avx2());
#elif defined(__aarch64__) && defined(__linux__)
    add(spac_kernels_neon(), can_run_neon());
#else
    (void) add;
#endif
    return here;
}

const spac_kernels * spac_kernels_best() {
    static const std::vector<const spac_kernels *> here = spac_kernels_here();

    const char * wanted = getenv("PYSPAC_KERNELS");
    std::string  names;
    for (const spac_kernels * kernels : here) {
        if (wanted && strcmp(kernels->name, wanted) == 0) {
            return kernels;
        }
        names += std::string(names.empty() ? "" : ", ") + kernels->name;
    }
    if (wanted && *wanted) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_format("PYSPAC_KERNELS \"%s\": this machine has %s; unset it for the first", wanted, names.empty() ? "none" : names.c_str()));
    }
    return here.empty() ? nullptr : here[0];
}
