// The wake-up of a thread for work that callers leave in the background and mostly end up doing
// themselves, when they wait for it. Waking a thread takes longer than a short operation, and the thread
// then takes the core of a rank. So for short work it is not woken while it looks by itself anyway: it
// goes on looking at intervals for as long as there is new work, and does what it has seen before. The
// intervals become longer where callers are quicker, and shorter where it finds work that nobody does:
// peers that block on this rank's part wait for as long.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "transport/platform.h"

namespace tilework {

/// All under the mutex that guards the work. Pieces of work are numbered from 1.
class WakeUp {
 public:
  /// There is work, of which `oldest` is the oldest, or who did it has left it. Nobody is expected to
  /// do the pieces up to `urgent`.
  void post(uint64_t oldest, uint64_t urgent = 0) {
    ++posts_;
    urgent_ = std::max(urgent_, urgent);
    if (oldest <= urgent_ || !looks_) condition_.notify_one();
  }

  /// Have the thread look whether it is to stop.
  void stop() { condition_.notify_one(); }

  /// To be called by the thread: returns once it is to do work, or `stopping()`. oldest_work() is the
  /// number of the oldest piece that nobody does; 0 if there is none. When others leave off doing work,
  /// what is left must be posted, too.
  template <class OldestWork, class Stopping>
  void wait(std::unique_lock<std::mutex>& lock, OldestWork&& oldest_work, Stopping&& stopping) {
    const auto called = [&] {
      const uint64_t work = oldest_work();
      return stopping() || (work != 0 && work <= urgent_);
    };
    uint64_t seen_work = 0;
    for (;;) {
      if (!looks_) {
        condition_.wait(lock, [&] { return called() || posts_ != seen_posts_; });
        looks_ = true;
        seen_work = oldest_work();
      }
      seen_posts_ = posts_;
      if (condition_.wait_for(lock, std::chrono::nanoseconds(interval_), called)) break;
      const uint64_t work = oldest_work();
      if (work != 0 && work == seen_work) {
        interval_ = std::max(kShortest, interval_ / 2);
        break;
      }
      if (seen_work != 0) interval_ = std::min(kLongest, 2 * interval_);  // somebody has done it
      seen_work = work;
      looks_ = work != 0 || posts_ != seen_posts_;
    }
  }

 private:
  static constexpr int64_t kShortest = 50 * kMicrosecond, kLongest = 500 * kMicrosecond;

  std::condition_variable condition_;
  uint64_t posts_ = 0, seen_posts_ = 0, urgent_ = 0;
  int64_t interval_ = kShortest;
  bool looks_ = false;
};

}  // namespace tilework
