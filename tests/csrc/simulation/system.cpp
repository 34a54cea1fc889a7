#include "system.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <map>
#include <unordered_map>

#include "memory.h"
#include "names.h"

#define CODE __builtin_return_address(0)

extern "C" {
void* __real_mmap(void*, size_t, int, int, int, off_t);
int __real_munmap(void*, size_t);
long __real_syscall(long, ...);
pid_t __real_getpid();
int __real_poll(pollfd*, nfds_t, int);
int __real_close(int);
int __real_fcntl(int, int, ...);
FILE* __real_fopen(const char*, const char*);
long __real_sysconf(int);
int __real_sched_getaffinity(pid_t, size_t, cpu_set_t*);
int __real_sched_setaffinity(pid_t, size_t, const cpu_set_t*);
int __real_sched_getcpu();
int __real_getrusage(int, rusage*);
pthread_t __real_pthread_self();
ssize_t __real_process_vm_readv(pid_t, const iovec*, unsigned long, const iovec*, unsigned long,
                                unsigned long);
}

namespace tilework::simulation {
namespace {

constexpr int kFirstProcess = 1'000'000;
constexpr int kFirstPidfd = 2'000'000;
constexpr int kOthersPidfd = 2'500'000;  // of a process that is no rank

int machine_cores = 2;
size_t machine_bytes = 4 << 20;

/// What is mapped now, to unmap it after the trial.
std::map<void*, size_t> mapped;

std::unordered_map<const void*, Fiber*> owners;  // of locks

/// A number for an object that fibers wait for: the same for all ranks that see it.
uint64_t number_of(const volatile void* object) {
  const void* address = const_cast<const void*>(object);
  const Place place = memory().place_of(address);
  return place ? place : reinterpret_cast<uint64_t>(address);
}

int rank_of(int process) { return process - kFirstProcess; }

Remains victims_remains = Remains::kNothing;
std::vector<std::pair<int, int>> locked;  // ranks, and descriptors through which they hold a lock

/// True if the process of a rank has ended; then all that it did lies in the past.
bool seen_dead(int rank, bool process = true) {
  Schedule& schedule = *Schedule::running();
  if (!schedule.dead(rank) || (process && victims_remains == Remains::kProgram)) return false;
  for (const auto& fiber : schedule.fibers())
    if (fiber->rank == rank) memory().join(*fiber);
  return true;
}

int64_t moment(const timespec& time) { return time.tv_sec * kSecond + time.tv_nsec; }

int fail_with(int reason) {
  errno = reason;
  return -1;
}

int futex(uint32_t* word, int operation, uint32_t value, const timespec* timeout,
          const void* code) {
  Schedule& schedule = *Schedule::running();
  schedule.point();
  const int command = operation & FUTEX_CMD_MASK;
  if (command == FUTEX_WAKE || command == FUTEX_WAKE_BITSET) {
    schedule.record("wake", memory().place_of(word), value, code);
    schedule.wake(number_of(word), value > 1);
    return 1;
  }
  if (command != FUTEX_WAIT && command != FUTEX_WAIT_BITSET) return fail_with(ENOSYS);
  schedule.record("sleep", memory().place_of(word), value, code);
  if (*word != value) return fail_with(EAGAIN);
  int64_t until = kNever;
  if (timeout) until = moment(*timeout) + (command == FUTEX_WAIT ? schedule.now() : 0);
  if (schedule.wait({number_of(word), until, false})) return 0;
  schedule.record("slept in vain", memory().place_of(word), value, code);
  return fail_with(ETIMEDOUT);
}

/// The number of bytes that a vector of ranges covers, up to `most`, each noted as an access.
void note_accesses(const iovec* ranges, unsigned long count, size_t most, bool is_write,
                   const void* code) {
  for (unsigned long i = 0; i < count && most > 0; ++i) {
    const size_t bytes = std::min(ranges[i].iov_len, most);
    memory().access(ranges[i].iov_base, bytes, is_write, code);
    most -= bytes;
  }
}

/// Ranks share an address space: so the system reads this process's own memory, and refuses what is
/// not mapped.
ssize_t read_memory(int process, const iovec* local, unsigned long locals, const iovec* remote,
                    unsigned long remotes, const void* code) {
  Schedule& schedule = *Schedule::running();
  schedule.point();
  if (seen_dead(rank_of(process))) return fail_with(ESRCH);
  const ssize_t done = __real_process_vm_readv(__real_getpid(), local, locals, remote, remotes, 0);
  const auto bytes = static_cast<uint64_t>(done);
  schedule.record("process_vm_readv", memory().place_of(remote[0].iov_base), bytes, code);
  if (done <= 0) return done;
  note_accesses(remote, remotes, bytes, false, code);
  note_accesses(local, locals, bytes, true, code);
  return done;
}

/// What a dead thread held, nobody else misses; but where ranks are threads of one process, they
/// share what each has of its own as a process.
bool held(const void* mutex) {
  const auto owner = owners.find(mutex);
  return owner != owners.end() && owner->second->state != Fiber::State::kDead;
}

void lock(const void* mutex, const void* code) {
  Schedule& schedule = *Schedule::running();
  schedule.point();
  while (held(mutex)) schedule.wait({number_of(mutex), kNever, true});
  owners[mutex] = &schedule.current();
  memory().acquire(mutex);
  schedule.record("lock", 0, 0, code);
}

void unlock(const void* mutex) {
  memory().release(mutex);
  owners.erase(mutex);
  Schedule::running()->wake(number_of(mutex), false);
}

/// A wait on a condition variable; `until` is of the virtual clock. Only who looks by itself now and
/// then has such a moment, so that it is no bound: see wake_up.h.
int wait_on(pthread_cond_t* condition, pthread_mutex_t* mutex, int64_t until, const void* code) {
  Schedule& schedule = *Schedule::running();
  schedule.record("wait", 0, 0, code);
  unlock(mutex);
  const bool woken = schedule.wait({number_of(condition), until, until != kNever});
  lock(mutex, code);
  return woken ? 0 : ETIMEDOUT;
}

void wake(pthread_cond_t* condition, bool all, const void* code) {
  Schedule& schedule = *Schedule::running();
  schedule.point();
  schedule.record("notify", 0, all, code);
  schedule.wake(number_of(condition), all);
}

void sleep_for(int64_t ns) {
  Schedule& schedule = *Schedule::running();
  schedule.wait({0, schedule.now() + ns, true});
}

}  // namespace

int process_id(int rank) { return kFirstProcess + rank; }

void write_given_up(char* memory_begin, char value, size_t bytes) {
  memory().access(memory_begin, bytes, false, CODE);
  __real_memset(memory_begin, value, bytes);
}

void set_machine(int cores, size_t memory_bytes, Remains remains) {
  victims_remains = remains;
  machine_cores = cores;
  machine_bytes = memory_bytes;
}

extern "C" {

// ---- memory ----------------------------------------------------------------------------------

void* __wrap_mmap(void* hint, size_t bytes, int protection, int flags, int fd, off_t offset) {
  void* address = __real_mmap(hint, bytes, protection, flags, fd, offset);
  struct stat status;
  if (address == MAP_FAILED || fd < 0 || fstat(fd, &status) != 0) return address;
  const Place place = flags & MAP_SHARED ? place_of_file(status.st_ino, address) + offset
                                         : new_place();  // a copy, which nobody else sees
  memory().watch(address, bytes, place);
  if (!(flags & MAP_FIXED)) mapped[address] = bytes;
  return address;
}

int __wrap_munmap(void* address, size_t bytes) {
  memory().unwatch(address, bytes);
  mapped.erase(address);
  return __real_munmap(address, bytes);
}

ssize_t __wrap_process_vm_readv(pid_t process, const iovec* local, unsigned long locals,
                                const iovec* remote, unsigned long remotes, unsigned long flags) {
  if (!Schedule::running())
    return __real_process_vm_readv(process, local, locals, remote, remotes, flags);
  return read_memory(process, local, locals, remote, remotes, CODE);
}

// ---- processes -------------------------------------------------------------------------------

pid_t __wrap_getpid() {
  Schedule* schedule = Schedule::running();
  return schedule ? process_id(schedule->current().rank) : __real_getpid();
}

/// The same numbers in each run of a seed.
ssize_t __wrap_getrandom(void* to, size_t bytes, unsigned) {
  Schedule* schedule = Schedule::running();
  for (size_t i = 0; i < bytes; ++i)
    static_cast<char*>(to)[i] = schedule ? static_cast<char>(schedule->random().below(256)) : '\0';
  return static_cast<ssize_t>(bytes);
}

int __wrap_poll(pollfd* files, nfds_t count, int timeout) {
  Schedule* schedule = Schedule::running();
  if (!schedule) return __real_poll(files, count, timeout);
  schedule->point();
  if (timeout != 0) schedule->fail("poll() with a timeout is not simulated");
  int ready = 0;
  for (nfds_t i = 0; i < count; ++i) {
    if (files[i].fd >= kFirstPidfd)
      files[i].revents = seen_dead(files[i].fd - kFirstPidfd) ? POLLIN : 0;
    else
      __real_poll(&files[i], 1, 0);
    ready += files[i].revents != 0;
  }
  return ready;
}

int __wrap_close(int fd) {
  locked.erase(std::remove_if(locked.begin(), locked.end(),
                              [=](const auto& lock) { return lock.second == fd; }),
               locked.end());
  return fd >= kFirstPidfd ? 0 : __real_close(fd);
}

/// Locks are the system's own. Those of a rank that has died go as the kernel would have them go.
int __wrap_fcntl(int fd, int command, ...) {
  va_list list;
  va_start(list, command);
  const long argument = va_arg(list, long);
  va_end(list);
  Schedule* schedule = Schedule::running();
  if (schedule && command == F_OFD_SETLK && victims_remains == Remains::kNumber)
    return fail_with(EINVAL);
  if (schedule && command == F_OFD_SETLK) locked.push_back({schedule->current().rank, fd});
  if (schedule && command == F_OFD_GETLK)
    for (auto& [rank, locked_fd] : locked)
      if (locked_fd >= 0 && seen_dead(rank, false)) {
        __real_close(locked_fd);
        locked_fd = -1;
      }
  return __real_fcntl(fd, command, argument);
}

/// Of /proc/PID/stat, what is read.
FILE* __wrap_fopen(const char* path, const char* mode) {
  int process = 0;
  Schedule* schedule = Schedule::running();
  if (!schedule || sscanf(path, "/proc/%d/stat", &process) != 1 || process < kFirstProcess)
    return __real_fopen(path, mode);
  static char text[128];
  const bool dead = seen_dead(rank_of(process));
  const bool others = dead && victims_remains == Remains::kNumber;  // it began later
  const int bytes =
      snprintf(text, sizeof text, "%d (rank) %c 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 %d", process,
               dead && !others ? 'Z' : 'S', process + others);
  return fmemopen(text, bytes, mode);
}

long __wrap_sysconf(int name) {
  if (name == _SC_PHYS_PAGES)
    return static_cast<long>(machine_bytes / __real_sysconf(_SC_PAGESIZE));
  return __real_sysconf(name);
}

int __wrap_sched_getaffinity(pid_t process, size_t bytes, cpu_set_t* set) {
  if (!Schedule::running()) return __real_sched_getaffinity(process, bytes, set);
  memset(set, 0, bytes);
  for (int core = 0; core < machine_cores; ++core) CPU_SET(core, set);
  return 0;
}

int __wrap_sched_setaffinity(pid_t process, size_t bytes, const cpu_set_t* set) {
  return Schedule::running() ? 0 : __real_sched_setaffinity(process, bytes, set);
}

/// Any core: ranks must get on with whatever they think of their places.
int __wrap_sched_getcpu() {
  Schedule* schedule = Schedule::running();
  if (!schedule) return __real_sched_getcpu();
  return static_cast<int>(schedule->random().below(static_cast<uint64_t>(machine_cores)));
}

int __wrap_getrusage(int who, rusage* usage) {
  Schedule* schedule = Schedule::running();
  if (!schedule) return __real_getrusage(who, usage);
  *usage = rusage{};
  usage->ru_nivcsw = static_cast<long>(schedule->random().below(2));
  return 0;
}

long __wrap_syscall(long number, ...) {
  va_list list;
  va_start(list, number);
  long argument[6];
  for (long& one : argument) one = va_arg(list, long);
  va_end(list);
  if (Schedule::running()) switch (number) {
      case SYS_futex:
        return futex(reinterpret_cast<uint32_t*>(argument[0]), static_cast<int>(argument[1]),
                     static_cast<uint32_t>(argument[2]),
                     reinterpret_cast<const timespec*>(argument[3]), CODE);
      case SYS_pidfd_open:
        if (seen_dead(rank_of(static_cast<int>(argument[0]))))  // or it is another's by now
          return victims_remains == Remains::kNumber ? kOthersPidfd : fail_with(ESRCH);
        return kFirstPidfd + rank_of(static_cast<int>(argument[0]));
      default: break;
    }
  return __real_syscall(number, argument[0], argument[1], argument[2], argument[3], argument[4],
                        argument[5]);
}

// ---- time ------------------------------------------------------------------------------------

// libstdc++ calls this too, so it takes the library's place altogether.
int clock_gettime(clockid_t clock, timespec* time) noexcept {
  Schedule* schedule = Schedule::running();
  if (!schedule) return static_cast<int>(__real_syscall(SYS_clock_gettime, clock, time));
  schedule->point();
  const int64_t now = schedule->look_at_clock();
  *time = {static_cast<time_t>(now / kSecond), static_cast<long>(now % kSecond)};
  return 0;
}

int __wrap_sched_yield() {
  if (Schedule* schedule = Schedule::running()) schedule->yield();
  return 0;
}

int __wrap_usleep(useconds_t microseconds) {
  sleep_for(int64_t{microseconds} * 1000);
  return 0;
}

int __wrap_nanosleep(const timespec* time, timespec*) {
  sleep_for(moment(*time));
  return 0;
}

// ---- threads ---------------------------------------------------------------------------------
// These take the library's place altogether: libstdc++ starts, joins and notifies threads by them.

int pthread_create(pthread_t* thread, const pthread_attr_t*, void* (*start)(void*),
                   void* argument) noexcept {
  Schedule& schedule = *Schedule::running();
  const int rank = schedule.current().rank;
  *thread = schedule.spawn(rank, [=] { start(argument); }).number + 1;
  return 0;
}

int pthread_join(pthread_t thread, void**) {
  Schedule& schedule = *Schedule::running();
  Fiber& fiber = *schedule.fibers()[thread - 1];
  schedule.point();
  while (fiber.state != Fiber::State::kDone) schedule.wait({number_of(&fiber), kNever, true});
  memory().join(fiber);
  return 0;
}

int pthread_detach(pthread_t) noexcept { return 0; }

pthread_t __wrap_pthread_self() {
  Schedule* schedule = Schedule::running();
  return schedule ? static_cast<pthread_t>(schedule->current().number + 1) : __real_pthread_self();
}

int pthread_mutex_lock(pthread_mutex_t* mutex) noexcept {
  if (Schedule::running()) lock(mutex, CODE);
  return 0;
}

int pthread_mutex_trylock(pthread_mutex_t* mutex) noexcept {
  if (!Schedule::running()) return 0;
  Schedule::running()->point();
  if (held(mutex)) return EBUSY;
  lock(mutex, CODE);
  return 0;
}

int pthread_mutex_unlock(pthread_mutex_t* mutex) noexcept {
  if (Schedule::running()) unlock(mutex);
  return 0;
}

int pthread_cond_wait(pthread_cond_t* condition, pthread_mutex_t* mutex) {
  return wait_on(condition, mutex, kNever, CODE);
}
int pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex,
                           const timespec* until) {
  return wait_on(condition, mutex, moment(*until), CODE);
}
int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t,
                           const timespec* until) {
  return wait_on(condition, mutex, moment(*until), CODE);
}
int pthread_cond_signal(pthread_cond_t* condition) noexcept {
  if (Schedule::running()) wake(condition, false, CODE);
  return 0;
}
int pthread_cond_broadcast(pthread_cond_t* condition) noexcept {
  if (Schedule::running()) wake(condition, true, CODE);
  return 0;
}

}  // extern "C"

void unmap_leftovers() {
  for (const auto& [address, bytes] : mapped) __real_munmap(address, bytes);
  mapped.clear();
  owners.clear();
  locked.clear();
}

}  // namespace tilework::simulation
