// Preloaded: something goes wrong at the n-th call that this process makes on files below a directory.
//
// watch(directory) names the directory; arm(n, fault, argument) starts to count. Faults:
//   > 0   the call fails with this errno; with argument 1 every later call that writes fails as well, with
//         argument 2 every later call: what the files then hold is what a kill leaves, without the kill
//   KILL  SIGKILL: the process is gone before the call
//   PART  the call reads or writes half of what it was asked for, which is allowed
//   SLOW  this call and every later one takes `argument` milliseconds longer
//   CLOCK the clock of the day moves by `argument` seconds
// calls() says how many calls there were since.
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { KILL = 0, PART = -1, SLOW = -2, CLOCK = -3 };
enum kind { READS, WRITES };

#define DESCRIPTORS 65536
static atomic_long count, limit, moved;
static int fault;
static long argument;
static char root[4096];
static atomic_char inside[DESCRIPTORS];

void watch(const char* directory) { snprintf(root, sizeof root, "%s", directory); }

void arm(long n, int what, long how) {
  count = 0;
  fault = what;
  argument = how;
  limit = n;
}

long calls(void) { return count; }

static int below(const char* path) { return root[0] && strncmp(path, root, strlen(root)) == 0; }
static int known(int fd) { return fd >= 0 && fd < DESCRIPTORS && inside[fd]; }
static int at(int fd, const char* path) { return path[0] == '/' ? below(path) : known(fd); }

static int opened(int fd, int is_inside) {
  if (fd >= 0 && fd < DESCRIPTORS) inside[fd] = is_inside;
  return fd;
}

// What is to happen at this call: 0 nothing, 1 it fails and errno is set, 2 it is to do half.
static int meet(int is_inside, enum kind kind) {
  if (!is_inside || limit == 0) return 0;
  const long now = ++count;
  if (now < limit) return 0;
  if (fault == SLOW) usleep(1000 * argument);
  if (fault > 0 && (now == limit || argument == 2 || (argument == 1 && kind == WRITES))) {
    errno = fault;
    return 1;
  }
  if (now > limit) return 0;
  if (fault == KILL) kill(getpid(), SIGKILL);
  if (fault == CLOCK) moved = argument;
  return fault == PART ? 2 : 0;
}

#define REAL(name)                  \
  static __typeof__(name)* real;    \
  if (!real) real = (__typeof__(name)*)dlsym(RTLD_NEXT, #name)

#define HALF(met, size) ((met) == 2 && (size) > 1 ? (size) / 2 : (size))

ssize_t write(int fd, const void* data, size_t size) {
  REAL(write);
  const int met = meet(known(fd), WRITES);
  if (met == 1) return -1;
  // What a kill finds half done: the first half of a large piece.
  const int dies = fault == KILL || (fault > 0 && argument == 2);
  if (known(fd) && limit && dies && count + 1 == limit && size > 4096) size /= 2;
  return real(fd, data, HALF(met, size));
}

ssize_t pwrite64(int fd, const void* data, size_t size, off64_t offset) {
  REAL(pwrite64);
  const int met = meet(known(fd), WRITES);
  return met == 1 ? -1 : real(fd, data, HALF(met, size), offset);
}

ssize_t read(int fd, void* data, size_t size) {
  REAL(read);
  const int met = meet(known(fd), READS);
  return met == 1 ? -1 : real(fd, data, HALF(met, size));
}

ssize_t pread64(int fd, void* data, size_t size, off64_t offset) {
  REAL(pread64);
  const int met = meet(known(fd), READS);
  return met == 1 ? -1 : real(fd, data, HALF(met, size), offset);
}

ssize_t preadv64v2(int fd, const struct iovec* parts, int number, off64_t offset, int flags) {
  REAL(preadv64v2);
  return meet(known(fd), READS) == 1 ? -1 : real(fd, parts, number, offset, flags);
}

int close(int fd) {
  REAL(close);
  const int is_inside = known(fd);
  opened(fd, 0);
  if (meet(is_inside, WRITES) != 1) return real(fd);
  const int error = errno;
  real(fd);  // as NFS does, which says only here that the disk is full
  errno = error;
  return -1;
}

#define PLAIN(type, name, declared, passed, is_inside, kind)     \
  type name declared {                                           \
    REAL(name);                                                  \
    return meet(is_inside, kind) == 1 ? (type)-1 : real passed;  \
  }

PLAIN(int, fsync, (int fd), (fd), known(fd), WRITES)
PLAIN(int, fdatasync, (int fd), (fd), known(fd), WRITES)
PLAIN(int, flock, (int fd, int how), (fd, how), known(fd), READS)
PLAIN(int, ftruncate64, (int fd, off64_t size), (fd, size), known(fd), WRITES)
PLAIN(int, rename, (const char* from, const char* to), (from, to), below(from), WRITES)
PLAIN(int, mkdir, (const char* path, mode_t mode), (path, mode), below(path), WRITES)
PLAIN(int, rmdir, (const char* path), (path), below(path), WRITES)
PLAIN(int, unlink, (const char* path), (path), below(path), WRITES)
PLAIN(int, unlinkat, (int fd, const char* path, int flags), (fd, path, flags), at(fd, path), WRITES)
PLAIN(int, stat64, (const char* path, struct stat64* found), (path, found), below(path), READS)
PLAIN(int, lstat64, (const char* path, struct stat64* found), (path, found), below(path), READS)
PLAIN(int, fstat64, (int fd, struct stat64* found), (fd, found), known(fd), READS)

DIR* opendir(const char* path) {
  REAL(opendir);
  return meet(below(path), READS) == 1 ? NULL : real(path);
}

#define OPEN(name)                                                      \
  int name(const char* path, int flags, ...) {                          \
    REAL(name);                                                         \
    va_list more;                                                       \
    va_start(more, flags);                                              \
    const mode_t mode = flags & O_CREAT ? va_arg(more, mode_t) : 0;     \
    va_end(more);                                                       \
    const enum kind kind = flags & O_CREAT ? WRITES : READS;            \
    if (meet(below(path), kind) == 1) return -1;                        \
    return opened(real(path, flags, mode), below(path));                \
  }

OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                    \
  int name(int fd, const char* path, int flags, ...) {                  \
    REAL(name);                                                         \
    va_list more;                                                       \
    va_start(more, flags);                                              \
    const mode_t mode = flags & O_CREAT ? va_arg(more, mode_t) : 0;     \
    va_end(more);                                                       \
    const int is_inside = at(fd, path);                                 \
    if (meet(is_inside, flags & O_CREAT ? WRITES : READS) == 1) return -1; \
    return opened(real(fd, path, flags, mode), is_inside);              \
  }

OPENAT(openat)
OPENAT(openat64)

int clock_gettime(clockid_t clock, struct timespec* found) {
  REAL(clock_gettime);
  const int result = real(clock, found);
  if (clock == CLOCK_REALTIME && result == 0) found->tv_sec += moved;
  return result;
}
