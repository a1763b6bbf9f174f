/* Stands before the C library's calls on files (LD_PRELOAD) and lets the next ones of a thread end as a test planned.
 *
 * It moves no byte itself. A plan is a list of outcomes, one for each call from now on; after the last every call is the
 * C library's own. So a test sees what a real file holds after a call that the system cut short.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define MAX_OUTCOMES 64
#define MAX_PARTS 16

enum { MOVE, OPEN, CLOSE, CHMOD, LINK, TIME, NUM_KINDS };

/* For MOVE the most bytes of a call, for others 0, for each the negative number of an error. */
typedef struct {
    int outcomes[MAX_OUTCOMES];
    int num_left;
    int at;
} Plan;

static _Thread_local Plan plans[NUM_KINDS];

/* Returns 0, or -1 when there are too many outcomes. */
int plan_calls(int kind, const int *outcomes, int num_outcomes)
{
    if (num_outcomes > MAX_OUTCOMES)
        return -1;
    if (num_outcomes > 0)
        memcpy(plans[kind].outcomes, outcomes, (size_t)num_outcomes * sizeof *outcomes);
    plans[kind].num_left = num_outcomes;
    plans[kind].at = 0;
    return 0;
}

int num_planned(int kind)
{
    return plans[kind].num_left;
}

static int take(int kind, int *outcome)
{
    Plan *plan = &plans[kind];
    if (plan->num_left == 0)
        return 0;
    plan->num_left--;
    *outcome = plan->outcomes[plan->at++];
    return 1;
}

static int has_failed(int kind)
{
    int outcome;
    if (!take(kind, &outcome) || outcome >= 0)
        return 0;
    errno = -outcome;
    return 1;
}

/* Returns how many parts hold the first bytes, copied and cut; all of them when nothing is planned; -1 on an error. */
static int cut(const struct iovec *parts, int num_parts, struct iovec *first)
{
    int outcome;
    if (num_parts > MAX_PARTS) {
        errno = EINVAL;
        return -1;
    }
    memcpy(first, parts, (size_t)num_parts * sizeof *parts);
    if (!take(MOVE, &outcome))
        return num_parts;
    if (outcome < 0) {
        errno = -outcome;
        return -1;
    }
    size_t left = (size_t)outcome;
    for (int i = 0; i < num_parts; i++) {
        if (first[i].iov_len > left)
            first[i].iov_len = left;
        left -= first[i].iov_len;
    }
    return num_parts;
}

#define MOVING(name)                                                                                                      \
    ssize_t name(int fd, const struct iovec *parts, int num_parts, off_t offset)                                          \
    {                                                                                                                     \
        struct iovec first[MAX_PARTS];                                                                                    \
        ssize_t (*real)(int, const struct iovec *, int, off_t) = dlsym(RTLD_NEXT, #name);                                 \
        int num_first = cut(parts, num_parts, first);                                                                     \
        return num_first < 0 ? -1 : real(fd, first, num_first, offset);                                                   \
    }

#define MOVING_WITH_FLAGS(name)                                                                                           \
    ssize_t name(int fd, const struct iovec *parts, int num_parts, off_t offset, int flags)                               \
    {                                                                                                                     \
        struct iovec first[MAX_PARTS];                                                                                    \
        ssize_t (*real)(int, const struct iovec *, int, off_t, int) = dlsym(RTLD_NEXT, #name);                            \
        int num_first = cut(parts, num_parts, first);                                                                     \
        return num_first < 0 ? -1 : real(fd, first, num_first, offset, flags);                                            \
    }

#define OPENING(name)                                                                                                     \
    int name(const char *path, int flags, ...)                                                                            \
    {                                                                                                                     \
        int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, #name);                                                    \
        va_list more;                                                                                                     \
        va_start(more, flags);                                                                                            \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0;                                           \
        va_end(more);                                                                                                     \
        return has_failed(OPEN) ? -1 : real(path, flags, mode);                                                           \
    }

MOVING(preadv)
MOVING(preadv64)
MOVING(pwritev)
MOVING(pwritev64)
MOVING_WITH_FLAGS(preadv2)
MOVING_WITH_FLAGS(preadv64v2)
MOVING_WITH_FLAGS(pwritev2)
MOVING_WITH_FLAGS(pwritev64v2)
OPENING(open)
OPENING(open64)

/* As Linux does it, the file is closed whatever is said of it. */
int close(int fd)
{
    int (*real)(int) = dlsym(RTLD_NEXT, "close");
    int answer = real(fd);
    return has_failed(CLOSE) ? -1 : answer;
}

int fchmod(int fd, mode_t mode)
{
    int (*real)(int, mode_t) = dlsym(RTLD_NEXT, "fchmod");
    return has_failed(CHMOD) ? -1 : real(fd, mode);
}

int linkat(int from_fd, const char *from, int to_fd, const char *to, int flags)
{
    int (*real)(int, const char *, int, const char *, int) = dlsym(RTLD_NEXT, "linkat");
    return has_failed(LINK) ? -1 : real(from_fd, from, to_fd, to, flags);
}

int link(const char *from, const char *to)
{
    int (*real)(const char *, const char *) = dlsym(RTLD_NEXT, "link");
    return has_failed(LINK) ? -1 : real(from, to);
}

int futimens(int fd, const struct timespec times[2])
{
    int (*real)(int, const struct timespec *) = dlsym(RTLD_NEXT, "futimens");
    return has_failed(TIME) ? -1 : real(fd, times);
}
