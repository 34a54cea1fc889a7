// The completion of a submitted operation, which another thread executes, or the waiting one.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <optional>
#include <vector>

#include "transport/fault.h"
#include "transport/platform.h"
#include "transport/waiting.h"

namespace tilework {

class Completion {
 public:
  /// `number`: of the collective, in its group; 0 for a message.
  explicit Completion(uint64_t number_ = 0) : number(number_) {}
  bool done() const { return state_.load() == kDone; }

  /// Wait until done; false once options.deadline has passed. Throws Interrupted.
  bool sleep_until_done(const WaitOptions& options);

  /// The failure of a done operation, none if it succeeded.
  std::optional<Fault> fault() const;
  /// The group rank that a receive matched, -1 before.
  int source() const { return done() ? source_ : -1; }

  /// Run `callback` once done: by the thread that completes, or at once by this one.
  void when_done(std::function<void()> callback);

  /// Complete; once only. Runs the callbacks, so hold no lock.
  void complete(std::optional<Fault> fault, int source = -1);

  /// Note that a thread waits from now on, unless it is done.
  void note_wait() {
    if (!done() && waited() == 0) waited_.store(ticks(), std::memory_order_relaxed);
  }
  /// When a thread first had to wait for it, and when it was done, in ticks; 0: not yet.
  uint64_t waited() const { return waited_.load(std::memory_order_relaxed); }
  uint64_t finished() const { return done() ? finished_ : 0; }

  const uint64_t number;

 private:
  enum : uint32_t { kPending, kAwaited, kDone };  // kAwaited: a thread may be asleep

  std::atomic<uint32_t> state_{kPending};  // a futex
  std::mutex mutex_;
  std::vector<std::function<void()>> callbacks_;
  std::optional<Fault> fault_;
  int source_ = -1;
  std::atomic<uint64_t> waited_{0};
  uint64_t finished_ = 0;
};

}  // namespace tilework
