// A rank's wait. The rank polls, because a peer that runs at the same time answers within a microsecond.
// It yields the core if the awaited peer was last seen on the same core. It sleeps on the rank's
// eventcount once the wait is long. It sleeps in slices, so that a wait also ends without a notification:
// at a deadline, a dead peer, an abort, a signal.
//
// The awaited peer wakes a sleeper, often on the peer's own core. So short waits must not end in sleep, or
// ranks come to share a core while another core is idle. Ranks that only yield stay runnable, and the
// kernel moves one of them to the idle core. But a core that is yielded to another program is lost for a
// time slice, so a rank looks where its peers are before it yields.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <optional>

#include "transport/fault.h"
#include "transport/platform.h"
#include "transport/segment.h"
#include "transport/wait_history.h"

namespace tilework {

constexpr int64_t kSlice = 50 * kMillisecond;  // a dead peer is noticed within this, and a little

/// Work of the caller that can wait until peers, which wait for published data, have it.
class Interlude {
 public:
  /// Called once, when this rank has published its part of an operation, or is about to queue it.
  virtual void published() = 0;
  /// Called before a wait that is longer than some polls.
  virtual void waits() = 0;

 protected:
  ~Interlude() = default;
};

/// The ranks on this rank's core. Each tells when it waits and when it goes on, so that a yield to a rank
/// with work to do is not taken for a yield to another program.
class CoreMates {
 public:
  /// This rank waits from `now` on, or goes on.
  virtual void tell_wait(int64_t now) = 0;
  virtual void tell_work(int64_t now) = 0;
  /// The part of [from, to) in which the others had work to do, as far as known: each rank's last piece.
  virtual int64_t worked_ns(int64_t from, int64_t to) const = 0;

 protected:
  ~CoreMates() = default;
};

/// The bounds of a wait, and the check for signals.
struct WaitOptions {
  Pace pace;
  WaitHistory* history = nullptr;          // learns how long the wait took; may be null
  double seconds = -1;                     // the caller's limit; negative: no limit
  bool (*interrupted)(int64_t) = nullptr;  // signal handlers, long waits; null off Python's threads
  Interlude* interlude = nullptr;
  CoreMates* mates = nullptr;  // set if ranks share cores

  /// The end of all waits with these options. Time runs from the first call, so that short waits need
  /// no clock.
  int64_t deadline() const {
    if (deadline_ == kUnset) deadline_ = deadline_after(seconds);
    return deadline_;
  }

  /// To be called between two sleeps of a wait that began at `begun`.
  void check_signals(int64_t begun) const {
    if (interrupted && interrupted(now_ns() - begun)) throw Interrupted();
  }

  static constexpr int64_t kUnset = -1;
  mutable int64_t deadline_ = kUnset;
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

  /// Sleep for a slice, or until notified (since the construction of this waiter).
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

/// The steps of a wait from its start until it is time to sleep.
class Polling {
 public:
  explicit Polling(const WaitOptions& options)
      : pace_(options.pace),
        history_(options.history),
        mates_(options.mates),
        start_(now_ns()),
        now_(start_),
        avoids_yields_(history_ && history_->avoids_yields(start_)) {
    options.deadline();
    if (mates_) mates_->tell_wait(start_);
  }

  /// Yield if an awaited peer shares this core, or a yield is due; else poll some times. True if
  /// ready() came true.
  template <class Ready, class SharesCore>
  bool step(Ready&& ready, SharesCore&& shares_core) {
    constexpr int kPollsPerClock = 16;  // reading the clock costs as much as several polls
    const bool shared = shares_core(current_core());
    if (shared && (avoids_yields_ || yields_in_vain())) {
      sleeps_ = true;
      return false;
    }
    const bool yields = shared || (!avoids_yields_ && yield_is_due());
    bool done = false;
    if (yields) {
      sched_yield();
      done = ready();
      if (done && shared && history_) history_->record_yields(now_, false);
    } else {
      for (int i = 0; i < kPollsPerClock && !done; ++i) done = (cpu_relax(), ready());
    }
    if (done && !yields) return true;  // the usual case; no look at the clock
    const int64_t before = now_;
    now_ = now_ns();
    if (yields && history_) history_->record_yield(now_, lost_to_others(before));
    if (!shared && now_ - before > kLostCore) lost_ns_ += now_ - before;
    return done;
  }

  /// The time of the last look at the clock.
  int64_t now() const { return now_; }
  bool over() const { return sleeps_ || now_ - start_ >= awake_ns(); }
  /// True if the wait took all the time that the pace allows before sleep.
  bool was_long() const { return !sleeps_; }
  /// The time since the start, without the time that other programs used this core.
  int64_t waited_ns() const { return std::max<int64_t>(0, now_ - start_ - lost_ns_); }

 private:
  static constexpr int64_t kLostCore = 100 * kMicrosecond;  // no burst of polls takes so long

  /// The time that a yield since `before` gave the core to other programs.
  int64_t lost_to_others(int64_t before) const {
    const int64_t ns = now_ - before;
    if (!mates_ || !WaitHistory::is_costly(ns)) return ns;
    return ns - std::min(ns, mates_->worked_ns(before, now_));
  }

  int64_t awake_ns() const {
    return avoids_yields_ && pace_.crowded ? pace_.short_ns : pace_.awake_ns;
  }

  /// Count a wait's yields to a peer on this core. After some, check whether yields switch at all.
  bool yields_in_vain() {
    constexpr int kTrusted = 8, kTried = 16;
    if (++shared_yields_ == kTrusted) switches_ = context_switches();
    if (shared_yields_ != kTried || context_switches() != switches_) return false;
    if (history_) history_->record_yields(now_, true);
    return true;
  }

  bool yield_is_due() {
    if (now_ - start_ < next_yield_) return false;
    next_yield_ = pace_.crowded ? 0 : 2 * (now_ - start_);
    return true;
  }

  const Pace& pace_;
  WaitHistory* const history_;
  CoreMates* const mates_;
  const int64_t start_;
  int64_t now_;
  const bool avoids_yields_;
  bool sleeps_ = false;
  int shared_yields_ = 0;
  int64_t switches_ = 0;
  int64_t next_yield_ = pace_.spin_ns;
  int64_t lost_ns_ = 0;
};

/// True if ready() came true before it is time to sleep. shares_core(core) is true if an awaited peer
/// was last seen on `core`.
template <class Ready, class SharesCore>
bool spin(const WaitOptions& options, Ready&& ready, SharesCore&& shares_core) {
  if (ready()) {
    if (options.history) options.history->record(0, options.pace);
    return true;
  }
  if (options.interlude) {
    const int polls = options.pace.crowded ? 4 : 24;  // at most about a microsecond
    for (int i = 0; i < polls; ++i) {
      cpu_relax();
      if (!ready()) continue;
      if (options.history) options.history->record(0, options.pace);
      return true;
    }
    options.interlude->waits();
  }
  Polling polling(options);
  bool done = false;
  do done = polling.step(ready, shares_core);
  while (!done && !polling.over());
  if (options.history && (done || polling.was_long()))
    options.history->record(polling.waited_ns(), options.pace);
  if (done && options.mates) options.mates->tell_work(polling.now());
  return done;
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
template <class Ready, class SharesCore, class FindFault>
void wait_until(EventCount& event, std::atomic<uint64_t>& sleeps, const WaitOptions& options,
                Ready&& ready, SharesCore&& shares_core, FindFault&& find_fault) {
  if (spin(options, ready, shares_core)) return;
  LivenessTimer liveness_timer;
  const int64_t begun = now_ns();
  for (;;) {
    EventWaiter waiter(event, sleeps);
    if (ready()) {
      if (options.mates) options.mates->tell_work(now_ns());
      return;
    }
    if (std::optional<Fault> fault = find_fault(liveness_timer.due())) {
      if (ready()) return;
      throw *fault;
    }
    const Woken woken = waiter.sleep(options.deadline());
    if (woken != Woken::kNotified) options.check_signals(begun);
  }
}

}  // namespace tilework
