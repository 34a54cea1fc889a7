// The stores by which a rank fills its outboxes: ordinary ones, or such as go past the caches.
//
// The readers' caches have copies of an outbox's lines, since they read them a round or two ago, and
// an ordinary store takes a line away from them first. What that costs depends on which cores the
// ranks are on, and under a hypervisor it changes with time: on one 2-core virtual machine 64 KiB took 7 µs
// for some minutes and 28 for others, where stores past the caches took 2 (and reading 4, not 1.5). So each
// rank looks at how long its own stores take. Whichever it uses, peers read the same bytes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "transport/platform.h"
#include "transport/tunables.h"

namespace tilework {

/// Chooses for one thread at a time.
class OutboxStores {
 public:
  /// Ordinary stores are slow where a MiB of them takes longer than this.
  explicit OutboxStores(const uint64_t& slow_ns_per_mib) : slow_ns_per_mib_(slow_ns_per_mib) {}

  /// Call copy(streamed) to put so many bytes into an outbox.
  template <class Copy>
  void put(size_t bytes, Copy&& copy) {
    if (bytes < kLeastBytes) return copy(false);
    const int64_t begun = now_ns();
    if (streams(bytes, begun)) return copy(true);
    copy(false);
    choices_[size_class(bytes)].learn(is_slow(bytes, now_ns() - begun));
  }

  /// True if so many bytes are best put past the caches, for now.
  bool streams(size_t bytes) const { return bytes >= kLeastBytes && streams(bytes, now_ns()); }

  static constexpr uint64_t kAlways = 0;  // ordinary stores are slow

 private:
  static constexpr size_t kLeastBytes = 8 * 1024;  // below, the time that is measured means little
  static constexpr size_t kClasses = 64;
  static constexpr int64_t kFirstPause = 10'000'000, kLongestPause = 640'000'000;

  /// Ordinary stores of one class of sizes.
  struct Choice {
    int64_t streams_until = 0;
    int64_t pause = kFirstPause;
    bool was_slow = false;

    void learn(bool slow) {
      if (slow && was_slow) {  // once, it may be a time slice that was lost
        streams_until = now_ns() + pause;
        pause = std::min(2 * pause, kLongestPause);
      } else if (!slow) {
        pause = kFirstPause;
      }
      was_slow = slow;
    }
  };

  bool streams(size_t bytes, int64_t now) const {
    if (slow_ns_per_mib_ == kAlways) return true;
    return slow_ns_per_mib_ < kNeverBytes && now < choices_[size_class(bytes)].streams_until;
  }
  static size_t size_class(size_t bytes) { return kClasses - 1 - __builtin_clzll(bytes); }
  bool is_slow(size_t bytes, int64_t ns) const {
    constexpr double kMiB = 1024 * 1024;
    return static_cast<double>(ns) * kMiB >
           static_cast<double>(slow_ns_per_mib_) * static_cast<double>(bytes);
  }

  const uint64_t& slow_ns_per_mib_;
  Choice choices_[kClasses];
};

}  // namespace tilework
