// The wake-up of a thread for work that callers leave in the background and mostly end up doing
// themselves, when they wait for it. Waking a thread takes longer than a short operation, and the thread
// then takes the core of a rank. So for short work it is not woken while it looks by itself anyway: it
// goes on looking at intervals for as long as there is new work, and does what it has seen before. The
// intervals become longer while callers are quicker, and shorter where it finds work that nobody does.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "platform.h"

namespace tilework {

/// All under the mutex that guards the work.
class WakeUp {
 public:
  /// There is work, or who did it has left it. `at_once`: nobody is expected to do it.
  void post(bool at_once) {
    ++posts_;
    is_urgent_ |= at_once;
    if (is_urgent_ || !looks_) condition_.notify_one();
  }

  /// To be called by the thread: returns once it is to do work, or `stopping()`. oldest_work() tells
  /// the oldest piece that nobody does from others; it is 0 if there is none. When others leave off
  /// doing work, what is left must be posted, too.
  template <class OldestWork, class Stopping>
  void wait(std::unique_lock<std::mutex>& lock, OldestWork&& oldest_work, Stopping&& stopping) {
    const auto called = [&] { return stopping() || (is_urgent_ && oldest_work() != 0); };
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
      seen_work = work;
      interval_ = std::min(kLongest, 2 * interval_);
      looks_ = work != 0 || posts_ != seen_posts_;
    }
    is_urgent_ = false;
  }

 private:
  static constexpr int64_t kShortest = 100 * kMicrosecond, kLongest = 2 * kMillisecond;

  std::condition_variable condition_;
  uint64_t posts_ = 0, seen_posts_ = 0;
  int64_t interval_ = kShortest;
  bool is_urgent_ = false;
  bool looks_ = false;
};

}  // namespace tilework
