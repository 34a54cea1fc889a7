// The core's interface to Linux: clocks, pages, futexes, usable cores, fork detection.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace tilework {

constexpr int64_t kMicrosecond = 1'000;
constexpr int64_t kMillisecond = 1'000'000;
constexpr int64_t kSecond = 1'000'000'000;
constexpr int64_t kNever = INT64_MAX;

/// Bytes of a page, in which files are mapped.
constexpr size_t kPage = 4096, kHugePage = 2 * 1024 * 1024;
/// The smallest multiple of `unit` that is at least `n`.
constexpr size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

/// Nanoseconds of the monotonic clock.
int64_t now_ns();
/// Nanoseconds since 1970, for records.
int64_t wall_clock_ns();

/// A reading of a clock that runs evenly, and costs less than now_ns() where the processor has one.
uint64_t ticks();

/// Moments that were read as ticks, told as nanoseconds since 1970. Made before the first of them is read.
class TickScale {
 public:
  TickScale() : ticks_(ticks()), ns_(now_ns()) {}
  /// The wall clock's time of moments since this was made, by what it says now.
  class Now {
   public:
    explicit Now(const TickScale& scale);
    int64_t wall_ns(uint64_t moment) const;
    /// The wall clock's nanoseconds less those of now_ns().
    int64_t wall_ahead_ns() const { return wall_ns_ - ns_; }

   private:
    uint64_t ticks_;
    int64_t wall_ns_, ns_;
    double ns_per_tick_;
  };

 private:
  uint64_t ticks_;
  int64_t ns_;
};

/// The moment `seconds` from now; negative or infinite means kNever.
int64_t deadline_after(double seconds);

/// Pause for a moment in a spin loop.
inline void cpu_relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");  // unlike `yield`, it really waits a little
#endif
}

/// Take a cache line that this thread will write away from others' caches.
inline void own_line_soon([[maybe_unused]] const void* line) {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" ::"m"(*static_cast<const char*>(line)));
#endif
}

enum class Woken { kNotified, kTimeout, kSignal };

/// Sleep while *word == expected, at most `ns`. Works across processes that share the word.
Woken futex_wait(std::atomic<uint32_t>& word, uint32_t expected, int64_t ns);
void futex_wake_all(std::atomic<uint32_t>& word);

/// The cores that this process may run on (sched_getaffinity), one bit each.
constexpr int kCoreWords = 16;
void read_usable_cores(uint64_t (&words)[kCoreWords]);

/// The number of cores' worth of time that this process's control group grants, rounded up; 0: no limit.
/// Python's cores.py reads it.
std::atomic<uint32_t>& core_limit();

/// The core that this thread runs on, at this moment; -1 where the system does not tell.
int current_core();
/// How often this thread has lost its core, or given it away, without sleeping.
int64_t context_switches();
/// Move this thread to a core that it may use and that is not in the set; false if there is none. Then
/// it may use the same cores as before.
bool leave_cores(const uint64_t (&cores)[kCoreWords]);

/// A number that changes in a forked child: objects made under another value belong to the parent.
unsigned fork_generation();
void watch_forks();

/// Have a descriptor closed in forked children, from now on until it is closed here.
void close_in_children(int fd);
void close_everywhere(int fd);

}  // namespace tilework
