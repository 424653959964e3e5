// Faults of the system, for a program that is started with this library in LD_PRELOAD: reads that fail, come short, are
// slow, or lie; threads that cannot be had. What is to happen stands in the file that PYSPAC_FAULTS names, which both sides
// map: words as in tools/system_faults/__init__.py. Every n-th call has its fault; 0 is never.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { THREAD,
       READ,
       SHORT,
       SLOW,
       LIE,
       SLOW_US,
       N_THREADS,
       N_READS,
       N_NO_THREADS,
       N_BAD_READS,
       N_WORDS };

static _Atomic unsigned * words;

__attribute__((constructor)) static void open_words(void) {
    const char * path = getenv("PYSPAC_FAULTS");
    const int    fd   = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd >= 0) {
        void * mapped = mmap(NULL, N_WORDS * sizeof(unsigned), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        words         = mapped == MAP_FAILED ? NULL : mapped;
        close(fd);
    }
}

static int is_due(unsigned i_call, int fault) {
    const unsigned every = words[fault];
    return every > 0 && i_call % every == 0;
}

static ssize_t faulty_read(int fd, void * data, size_t n, off_t offset) {
    if (!words) {
        return syscall(SYS_pread64, fd, data, n, offset);
    }
    const unsigned i_call = ++words[N_READS];
    if (is_due(i_call, SLOW)) {
        usleep(words[SLOW_US]);
    }
    if (is_due(i_call, READ)) {
        words[N_BAD_READS]++;
        errno = EIO;
        return -1;
    }
    if (is_due(i_call, LIE)) { // as if it had been read
        words[N_BAD_READS]++;
        return (ssize_t) n;
    }
    const ssize_t n_read = syscall(SYS_pread64, fd, data, n, offset);
    if (n_read > 1 && is_due(i_call, SHORT)) {
        words[N_BAD_READS]++;
        return n_read / 2 | 1;
    }
    return n_read;
}

ssize_t pread(int fd, void * data, size_t n, off_t offset) {
    return faulty_read(fd, data, n, offset);
}

ssize_t pread64(int fd, void * data, size_t n, off_t offset) {
    return faulty_read(fd, data, n, offset);
}

typedef int (*create_fn)(pthread_t *, const pthread_attr_t *, void * (*) (void *), void *);

int pthread_create(pthread_t * thread, const pthread_attr_t * attributes, void * (*run)(void *), void * argument) {
    if (words && is_due(++words[N_THREADS], THREAD)) {
        words[N_NO_THREADS]++;
        return EAGAIN;
    }
    return ((create_fn) dlsym(RTLD_NEXT, "pthread_create"))(thread, attributes, run, argument);
}
