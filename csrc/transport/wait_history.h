// The history of a rank's waits, which decides how long the rank stays awake. Pure: no clock, no calls.
//
// A wait is short if it ends before a sleep and a wake-up would have paid. If nearly all recent waits
// were short, a longer wait most likely means that a peer lost its core to another program. Such a wait
// ends with the time slice, so the rank keeps polling. If long waits are usual, peers compute, and the
// rank sleeps as soon as a wait is no longer short. So polling in vain is bounded: each wait that stays
// awake to the end counts as long, and after a few of them no wait stays awake.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "transport/platform.h"

namespace tilework {

/// The course of a wait, in nanoseconds since its start.
struct Pace {
  int64_t spin_ns;   // the first yield without a peer on this core; later yields are rare
  int64_t short_ns;  // a wait that ends before is short
  int64_t awake_ns;  // sleep
  bool crowded;      // more threads wait than there are cores: from spin_ns on yield at each turn
};

#ifndef TILEWORK_PATIENCE_NS
#define TILEWORK_PATIENCE_NS 10'000'000
#endif
constexpr int64_t kPatience = TILEWORK_PATIENCE_NS;  // longer than a usual kernel's time slice

/// The pace for `threads` waiting threads on `cores` cores, before their first waits. With a core for each
/// thread, answers come within a spin. With fewer cores, a spinning thread takes time from the awaited
/// thread; a turn of all threads takes that many switches.
inline Pace pace_for(int threads, int cores) {
  if (threads <= cores) return {100 * kMicrosecond, 50 * kMicrosecond, 50 * kMicrosecond, false};
  const int64_t on_a_core = (threads + cores - 1) / std::max(1, cores);
  const int64_t turn = on_a_core * 20 * kMicrosecond;
  return {200, turn, turn, true};
}

/// The pace of the core's own threads, which run while callers compute. These threads do not yield, because
/// a computing thread would keep the core for milliseconds, while a sleeper is woken at once.
inline Pace background_pace_for(int threads, int cores) {
  if (2 * threads <= cores) return pace_for(2 * threads, cores);
  return {500, 500, 500, false};
}

/// The part of [from, to) in which a rank had work to do. The rank last went on at `works_since`, and last
/// began to wait at `waits_since` (earlier, if it still works).
constexpr int64_t worked_within(int64_t from, int64_t to, int64_t works_since,
                                int64_t waits_since) {
  const int64_t begin = std::max(from, works_since);
  const int64_t end = waits_since < works_since ? to : std::min(to, waits_since);
  return end > begin ? end - begin : 0;
}

/// The share of long waits among recent waits. Several threads may use it; a lost count does no harm.
class WaitHistory {
 public:
  /// The pace of the next wait; `usual` is the pace of a group whose waits are long.
  Pace pace(Pace usual) const {
    if (share_.load(std::memory_order_relaxed) < kRare)
      usual.awake_ns = std::max(usual.awake_ns, kPatience);
    return usual;
  }

  /// True if at `now` a yield would probably be in vain.
  bool avoids_yields(int64_t now) const {
    return now < sleep_until_.load(std::memory_order_relaxed);
  }

  /// True if a yield took as long as another program keeps a core.
  static constexpr bool is_costly(int64_t ns) { return ns >= 500 * kMicrosecond; }

  /// Learn from a yield that ended at `now` and took `ns`, without the work of ranks on this core. A peer
  /// that answers does so in microseconds. A computing program keeps the core for a time slice, because
  /// the kernel ranks a thread that yields behind it. If that happens again soon, sleep is better for a
  /// while. Then yields are tried again, the later the more often they were in vain.
  void record_yield(int64_t now, int64_t ns) {
    if (is_costly(ns)) {
      const int64_t retry = retry_ns_.load(std::memory_order_relaxed);
      const int64_t soon = retry > kRetry ? 2 * retry : kRareYields * ns;
      const int64_t last = costly_at_.exchange(now, std::memory_order_relaxed);
      if (now - ns - last < soon) avoid_yields(now);
    } else if (now - sleep_until_.load(std::memory_order_relaxed) > kLongestRetry) {
      retry_ns_.store(kRetry, std::memory_order_relaxed);
    }
  }

  /// Learn whether the yields of a wait, which ended at `now`, let a peer on this core run. They do not if
  /// the kernel shares the core between sessions or control groups, and each rank is in another one.
  void record_yields(int64_t now, bool in_vain) {
    const int count = in_vain ? vain_waits_.load(std::memory_order_relaxed) + 1 : 0;
    vain_waits_.store(count % kVainWaits, std::memory_order_relaxed);
    if (count == kVainWaits) avoid_yields(now);
  }

  /// True once in many calls: then a rank that always shares a core checks whether ranks are spread
  /// evenly.
  bool should_look() {
    const int looks = looks_.load(std::memory_order_relaxed) + 1;
    looks_.store(looks % kLooks, std::memory_order_relaxed);
    return looks == kLooks;
  }

  /// Learn that at `now` this rank shares a core with more ranks than it would on another core. True if
  /// that lasted so long that the rank should move. The more often it has come back, the longer it waits.
  bool should_move(int64_t now) {
    const int64_t last = shared_at_.exchange(now, std::memory_order_relaxed);
    if (now - last > kApart) shared_since_.store(now, std::memory_order_relaxed);
    if (now - last > kForgotten) move_ns_.store(kMove, std::memory_order_relaxed);
    const int64_t wait = move_ns_.load(std::memory_order_relaxed);
    if (now - shared_since_.load(std::memory_order_relaxed) < wait) return false;
    shared_since_.store(now, std::memory_order_relaxed);
    move_ns_.store(std::min(2 * wait, kLongestMove), std::memory_order_relaxed);
    return true;
  }

  /// Learn from a wait of `waited_ns`, without the time that other programs used this rank's core.
  void record(int64_t waited_ns, const Pace& pace) {
    const uint32_t share = share_.load(std::memory_order_relaxed);
    const uint32_t target = waited_ns > pace.short_ns ? kOne : 0;
    share_.store(share - share / kMemory + target / kMemory, std::memory_order_relaxed);
  }

 private:
  static constexpr uint32_t kOne = 1u << 24;
  static constexpr uint32_t kMemory = 64;  // waits
  static constexpr uint32_t kRare = kOne / 16;
  static constexpr int64_t kRareYields = 8;  // a program that uses less time is tolerated
  static constexpr int kVainWaits = 4;
  static constexpr int kLooks = 32;
  static constexpr int64_t kApart = 5 * kMillisecond, kForgotten = 2 * kSecond;
  static constexpr int64_t kMove = kMillisecond, kLongestMove = 256 * kMillisecond;
  static constexpr int64_t kRetry = 25 * kMillisecond, kLongestRetry = 400 * kMillisecond;

  void avoid_yields(int64_t now) {
    const int64_t retry = retry_ns_.load(std::memory_order_relaxed);
    sleep_until_.store(now + retry, std::memory_order_relaxed);
    retry_ns_.store(std::min(2 * retry, kLongestRetry), std::memory_order_relaxed);
  }

  std::atomic<uint32_t> share_{0};
  std::atomic<int> vain_waits_{0}, looks_{0};
  std::atomic<int64_t> costly_at_{-kSecond}, sleep_until_{0}, retry_ns_{kRetry};
  std::atomic<int64_t> shared_at_{-kSecond}, shared_since_{0}, move_ns_{kMove};
};

}  // namespace tilework
