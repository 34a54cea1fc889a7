// A rank's wait: it spins briefly, since a peer that runs at the same time answers within a
// microsecond; then yields its core a few times, since with more ranks than cores the peer needs
// it; then sleeps on its eventcount. It sleeps in slices, so that a wait also ends without a
// notification: at a deadline, a dead peer, an abort, a signal.
#pragma once

#include <sched.h>

#include <atomic>
#include <optional>

#include "fault.h"
#include "platform.h"
#include "segment.h"

namespace tilework {

constexpr int64_t kSlice = 50 * kMillisecond;  // a dead peer is noticed within this, and a little

/// Time to spin, and time to poll between yields, both from the start of a wait until sleep.
struct Pace {
  int64_t spin_ns;
  int64_t yield_ns;
};

/// The pace for `threads` waiting threads on `cores` cores. With a core for each, answers come
/// within a spin, and yields help where two of them share a core all the same; a yield that nobody
/// uses costs a fraction of a microsecond, a sleep and a wake-up some tens. With fewer cores, the
/// time that a thread spins is time that the awaited one lacks.
inline Pace pace_for(int threads, int cores) {
  if (threads <= cores) return {5 * kMicrosecond, 50 * kMicrosecond};
  return {200, 20 * kMicrosecond};
}

/// The pace of the core's own threads, beside which the callers compute. They do not yield: a
/// thread that computes would keep the core for milliseconds, while a sleeper is woken at once.
inline Pace background_pace_for(int threads, int cores) {
  if (2 * threads <= cores) return pace_for(2 * threads, cores);
  return {500, 0};
}

/// The bounds of a wait, and its check for signals.
struct WaitOptions {
  Pace pace;
  double seconds = -1;  // as the caller gave them, for messages
  int64_t deadline = kNever;
  bool (*interrupted)() = nullptr;  // runs Python's signal handlers; null off Python's threads

  void check_signals() const {
    if (interrupted && interrupted()) throw Interrupted();
  }
};

/// A registered wait on an eventcount: counts as a waiter while it lives.
class EventWaiter {
 public:
  EventWaiter(EventCount& event, std::atomic<uint64_t>& sleeps) : event_(event), sleeps_(sleeps) {
    event_.waiters.fetch_add(1);
    observed_ = event_.word.load();
  }
  ~EventWaiter() { event_.waiters.fetch_sub(1); }
  EventWaiter(const EventWaiter&) = delete;
  EventWaiter& operator=(const EventWaiter&) = delete;

  /// Sleep for a slice, or until notified (also if that came since this was made).
  Woken sleep(int64_t wake_at) {
    sleeps_.fetch_add(1, std::memory_order_relaxed);
    int64_t left = wake_at == kNever ? kSlice : wake_at - now_ns();
    return futex_wait(event_.word, observed_, left < kSlice ? left : kSlice);
  }

 private:
  EventCount& event_;
  std::atomic<uint64_t>& sleeps_;  // for statistics
  uint32_t observed_;
};

/// True if ready() came true before it is time to sleep.
template <class Ready>
bool spin(const Pace& pace, Ready&& ready) {
  constexpr int kPollsPerClock = 16;  // reading the clock costs as much as several polls
  if (ready()) return true;
  const int64_t start = now_ns();
  int64_t now;
  do {
    for (int i = 0; i < kPollsPerClock; ++i) {
      cpu_relax();
      if (ready()) return true;
    }
    now = now_ns();
  } while (now - start < pace.spin_ns);
  while (now - start < pace.yield_ns) {
    sched_yield();
    if (ready()) return true;
    now = now_ns();
  }
  return false;
}

/// A timer for liveness checks of peers: due once a slice, however often notifications and signals
/// wake the threads that wait meanwhile.
class LivenessTimer {
 public:
  bool due() {
    const int64_t now = now_ns();
    if (now - last_check_.load(std::memory_order_relaxed) < kSlice) return false;
    last_check_.store(now, std::memory_order_relaxed);
    return true;
  }

 private:
  std::atomic<int64_t> last_check_{now_ns()};
};

/// Return once ready() is true. Before each sleep, find_fault(check_processes) returns the fault that
/// makes waiting futile, if any; check_processes is true once a slice. A fault counts only if ready()
/// is still false after it was found: what a peer did before it failed comes first.
template <class Ready, class FindFault>
void wait_until(EventCount& event, std::atomic<uint64_t>& sleeps, const WaitOptions& options,
                Ready&& ready, FindFault&& find_fault) {
  if (spin(options.pace, ready)) return;
  LivenessTimer liveness_timer;
  for (;;) {
    EventWaiter waiter(event, sleeps);
    if (ready()) return;
    if (std::optional<Fault> fault = find_fault(liveness_timer.due())) {
      if (ready()) return;
      throw *fault;
    }
    const Woken woken = waiter.sleep(options.deadline);
    if (woken != Woken::kNotified) options.check_signals();
  }
}

}  // namespace tilework
