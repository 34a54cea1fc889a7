#include "transport/completion.h"

namespace tilework {

bool Completion::sleep_until_done(const WaitOptions& options) {
  if (spin(options, [this] { return done(); }, [](int) { return false; })) return true;
  const int64_t begun = now_ns();
  while (!done()) {
    const int64_t now = now_ns();
    if (now >= options.deadline()) return false;
    const int64_t left = options.deadline() - now;
    uint32_t pending = kPending;
    state_.compare_exchange_strong(pending, kAwaited);
    if (futex_wait(state_, kAwaited, left < kSlice ? left : kSlice) != Woken::kNotified)
      options.check_signals(begun);
  }
  return true;
}

std::optional<Fault> Completion::fault() const {
  if (!done()) return std::nullopt;
  return fault_;
}

void Completion::when_done(std::function<void()> callback) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!done()) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback();
}

void Completion::complete(std::optional<Fault> fault, int source) {
  std::vector<std::function<void()>> callbacks;
  bool awaited;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    fault_ = std::move(fault);
    source_ = source;
    finished_ = ticks();
    callbacks.swap(callbacks_);
    awaited = state_.exchange(kDone) == kAwaited;
  }
  if (awaited) futex_wake_all(state_);
  for (auto& callback : callbacks) callback();
}

}  // namespace tilework
