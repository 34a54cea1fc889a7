// The collectives of one rank, built on rounds (exchange.h).
#pragma once

#include "exchange.h"

namespace tilework {

/// Up to this many bytes an all_reduce takes one round, in which every rank reduces everything.
size_t small_bytes(int size);

/// Runs one rank's collectives, one at a time.
class Collectives {
 public:
  explicit Collectives(Station& station) : station_(station), state_(station.size) {}

  /// Run to the end, or throw Fault. After a fault the rounds of the ranks no longer agree, so
  /// every later call throws the same fault.
  void execute(const Operation& operation, const Patience& patience);

  /// Make the operation that another thread executes, and all later ones, fail soon.
  void cancel();

 private:

  Station& station_;
  RoundState state_;
  std::atomic<bool> cancelled_{false};
  std::optional<Fault> cause_;  // of the thread that executes
};

}  // namespace tilework
