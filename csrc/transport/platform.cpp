#include "transport/platform.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <climits>
#include <mutex>
#include <set>

namespace tilework {
namespace {

std::atomic<unsigned> generation{0};

/// Descriptors that must not live on in a forked child. Never destroyed: a fork may come at exit.
struct OwnDescriptors {
  std::mutex mutex;
  std::set<int> all;
};
OwnDescriptors& own_descriptors() {
  static auto* own = new OwnDescriptors();
  return *own;
}

void before_fork() { own_descriptors().mutex.lock(); }
void after_fork() { own_descriptors().mutex.unlock(); }
void in_forked_child() {
  generation.fetch_add(1);
  OwnDescriptors& own = own_descriptors();
  for (const int fd : own.all) close(fd);
  own.all.clear();
  own.mutex.unlock();
}

long futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout) {
  static_assert(sizeof(std::atomic<uint32_t>) == 4, "a futex is a plain 32-bit word");
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, timeout, nullptr,
                 0);
}

}  // namespace

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * kSecond + t.tv_nsec;
}

int64_t wall_clock_ns() {
  timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  return t.tv_sec * kSecond + t.tv_nsec;
}

namespace {

#if defined(__x86_64__)
/// True if the counter runs at one rate in all states of the processor (CPUID: invariant TSC).
bool counter_is_even() {
  unsigned a, b, c, d;
  return __get_cpuid(0x80000007, &a, &b, &c, &d) && (d & 1u << 8) != 0;
}
#endif

}  // namespace

uint64_t ticks() {
#if defined(__x86_64__)
  static const bool even = counter_is_even();
  if (even) return __builtin_ia32_rdtsc();
#endif
  return static_cast<uint64_t>(now_ns());
}

TickScale::Now::Now(const TickScale& scale) {
  // Again if this thread lost its core between the clocks.
  for (int tries = 0; tries < 4; ++tries) {
    ns_ = now_ns();
    ticks_ = ticks();
    wall_ns_ = wall_clock_ns();
    if (now_ns() - ns_ < 5 * kMicrosecond) break;
  }
  const auto passed = static_cast<double>(ns_ - scale.ns_);
  ns_per_tick_ = ticks_ > scale.ticks_ ? passed / static_cast<double>(ticks_ - scale.ticks_) : 0;
}

int64_t TickScale::Now::wall_ns(uint64_t moment) const {
  if (moment >= ticks_) return wall_ns_;
  return wall_ns_ - static_cast<int64_t>(static_cast<double>(ticks_ - moment) * ns_per_tick_);
}

int64_t deadline_after(double seconds) {
  if (!(seconds >= 0) || seconds > 1e9) return kNever;
  return now_ns() + static_cast<int64_t>(seconds * 1e9);
}

Woken futex_wait(std::atomic<uint32_t>& word, uint32_t expected, int64_t ns) {
  if (ns <= 0) return Woken::kTimeout;
  timespec timeout{static_cast<time_t>(ns / kSecond), static_cast<long>(ns % kSecond)};
  if (futex(word, FUTEX_WAIT, expected, &timeout) == 0 || errno == EAGAIN) return Woken::kNotified;
  return errno == EINTR ? Woken::kSignal : Woken::kTimeout;
}

void futex_wake_all(std::atomic<uint32_t>& word) { futex(word, FUTEX_WAKE, INT_MAX, nullptr); }

void read_usable_cores(uint64_t (&words)[kCoreWords]) {
  static_assert(sizeof words == sizeof(cpu_set_t), "as many cores as Linux's own set");
  if (sched_getaffinity(0, sizeof words, reinterpret_cast<cpu_set_t*>(words)) == 0) return;
  const long online = sysconf(_SC_NPROCESSORS_ONLN);  // more cores than a cpu_set_t holds
  for (long core = 0; core < kCoreWords * 64; ++core)
    words[core / 64] =
        (words[core / 64] & ~(uint64_t{1} << core % 64)) | (uint64_t{core < online} << core % 64);
}

std::atomic<uint32_t>& core_limit() {
  static std::atomic<uint32_t> limit{0};
  return limit;
}

int current_core() { return sched_getcpu(); }

int64_t context_switches() {
  rusage usage{};
  getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_nivcsw;
}

bool leave_cores(const uint64_t (&cores)[kCoreWords]) {
  uint64_t usable[kCoreWords], others[kCoreWords], any = 0;
  const auto set = [](const uint64_t* words) { return reinterpret_cast<const cpu_set_t*>(words); };
  if (sched_getaffinity(0, sizeof usable, reinterpret_cast<cpu_set_t*>(usable)) != 0) return false;
  for (int i = 0; i < kCoreWords; ++i) any |= others[i] = usable[i] & ~cores[i];
  if (any == 0 || sched_setaffinity(0, sizeof others, set(others)) != 0) return false;
  sched_setaffinity(0, sizeof usable, set(usable));
  return true;
}

unsigned fork_generation() { return generation.load(std::memory_order_relaxed); }

void watch_forks() {
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(before_fork, after_fork, in_forked_child); });
}

void close_in_children(int fd) {
  std::lock_guard<std::mutex> lock(own_descriptors().mutex);
  own_descriptors().all.insert(fd);
}

void close_everywhere(int fd) {
  std::lock_guard<std::mutex> lock(own_descriptors().mutex);
  if (own_descriptors().all.erase(fd) > 0) close(fd);  // not if this is a child, which did
}

}  // namespace tilework
