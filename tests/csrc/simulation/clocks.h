// Vector clocks: what a thread knows of the past of others.
#pragma once

#include <algorithm>
#include <cstdint>

namespace tilework::simulation {

constexpr int kMostFibers = 64;  // of one trial

/// A moment of one fiber.
struct Epoch {
  uint32_t fiber : 6, time : 26;
};
static_assert(kMostFibers == 1 << 6, "a fiber's number fits");

/// The latest moment of each fiber that has happened before something.
struct Clock {
  uint32_t times[kMostFibers] = {};

  bool covers(Epoch epoch) const { return epoch.time <= times[epoch.fiber]; }
  void join(const Clock& other) {
    for (int i = 0; i < kMostFibers; ++i) times[i] = std::max(times[i], other.times[i]);
  }
};

/// The clocks of one fiber.
struct ThreadClocks {
  Clock past;               // what happened before, by the language's memory model
  Clock visible;            // `past`, and what sequentially consistent fences have made visible
  Clock to_acquire;         // of relaxed loads, for a later acquire fence
  Clock for_release;        // as of the last release fence, for later relaxed stores
  uint64_t fence_turn = 0;  // of the last sequentially consistent fence
};

}  // namespace tilework::simulation
