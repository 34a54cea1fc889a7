// The collectives of one rank, built on rounds (exchange.h).
#pragma once

#include "collectives/exchange.h"

namespace tilework {

/// Runs one rank's collectives, one at a time.
class Collectives {
 public:
  explicit Collectives(RankContext& context)
      : context_(context), state_(context.size, context.segment.tunables()) {}

  /// Run to the end, or throw Fault. After a fault the rounds of the ranks no longer agree, so
  /// every later call throws the same fault.
  void execute(const Operation& operation, const WaitOptions& options);

  /// Make the operation that another thread executes, and all later ones, fail soon.
  void cancel();

 private:
  void end_failed(const Operation& operation);

  RankContext& context_;
  RoundState state_;
  std::atomic<bool> cancelled_{false};
  std::optional<Fault> cause_;  // of the thread that executes
};

}  // namespace tilework
