// Preloaded: ends the process by SIGKILL at the n-th call that changes a file, or lets that call fail.
// arm(n, 0) kills, arm(n, e) makes the call fail with errno e; calls() says how many there were since.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

static atomic_long count, limit;
static int failure;

void arm(long n, int error) {
  count = 0;
  failure = error;
  limit = n;
}

long calls(void) { return count; }

// Whether this call is to fail.
static int cut(void) {
  if (limit == 0) return 0;
  if (++count != limit) return 0;
  if (failure == 0) kill(getpid(), SIGKILL);
  errno = failure;
  return 1;
}

#define REAL(name) ((__typeof__(name)*)dlsym(RTLD_NEXT, #name))

ssize_t write(int fd, const void* data, size_t size) {
  static __typeof__(write)* real;
  if (!real) real = REAL(write);
  if (fd > 2 && cut()) return -1;
  // What a kill finds half done: the first half of a large piece.
  if (fd > 2 && limit && count + 1 == limit && size > 4096) return real(fd, data, size / 2);
  return real(fd, data, size);
}

int fsync(int fd) { return cut() ? -1 : REAL(fsync)(fd); }
int rename(const char* from, const char* to) { return cut() ? -1 : REAL(rename)(from, to); }
int mkdir(const char* path, mode_t mode) { return cut() ? -1 : REAL(mkdir)(path, mode); }
int rmdir(const char* path) { return cut() ? -1 : REAL(rmdir)(path); }
int unlink(const char* path) { return cut() ? -1 : REAL(unlink)(path); }
int unlinkat(int directory, const char* path, int flags) {
  return cut() ? -1 : REAL(unlinkat)(directory, path, flags);
}

static mode_t mode_of(int flags, va_list more) { return flags & O_CREAT ? va_arg(more, mode_t) : 0; }

int open(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const mode_t mode = mode_of(flags, more);
  va_end(more);
  return flags & O_CREAT && cut() ? -1 : REAL(open)(path, flags, mode);
}

int open64(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const mode_t mode = mode_of(flags, more);
  va_end(more);
  return flags & O_CREAT && cut() ? -1 : REAL(open64)(path, flags, mode);
}
