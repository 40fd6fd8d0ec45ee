/* A wall clock that is off by the seconds in a file: preloaded into beats of the tests, and nowhere else.
 *
 * CLOCK_SHIFT_FILE names a file that begins with a signed 64-bit number of seconds. It is mapped, so a test can set the
 * clock of a running beat. Monotonic clocks stay honest, as they do on a host whose clock is set. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *shift;

__attribute__((constructor)) static void begin(void)
{
    const char *name = getenv("CLOCK_SHIFT_FILE");
    int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;

    if (file < 0)
        return;
    void *page = mmap(NULL, sizeof *shift, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (page != MAP_FAILED)
        shift = page;
}

int clock_gettime(clockid_t id, struct timespec *now)
{
    static int (*honest)(clockid_t, struct timespec *);
    if (!honest)
        honest = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int failed = honest(id, now);

    if (!failed && shift && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE))
        now->tv_sec += *shift;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec fine;
    int failed = clock_gettime(CLOCK_REALTIME, &fine);

    (void)zone;
    if (!failed) {
        now->tv_sec = fine.tv_sec;
        now->tv_usec = fine.tv_nsec / 1000;
    }
    return failed;
}

time_t time(time_t *out)
{
    struct timespec fine;

    if (clock_gettime(CLOCK_REALTIME, &fine))
        return (time_t)-1;
    if (out)
        *out = fine.tv_sec;
    return fine.tv_sec;
}
