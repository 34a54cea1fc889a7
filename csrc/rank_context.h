// What every operation of one rank needs to know about its place in the group.
#pragma once

#include <atomic>
#include <optional>
#include <string>

#include "fault.h"
#include "liveness.h"
#include "segment.h"
#include "waiting.h"

namespace tilework {

/// Who aborted the group, and why.
struct Abort {
  int rank;
  std::string kind;
  std::string text;
};

/// "rank 2 died; rank 3 left the group", for those of `gone` that are, or are not, in `died`.
Fault peer_lost_fault(const std::vector<int>& died, const std::vector<int>& gone);

struct RankContext {
  RankContext(int fd, int rank, int size, const std::string& nonce);

  /// The abort of the group, none if there was none.
  std::optional<Abort> aborted() const;
  /// The first abort wins.
  void abort(const std::string& kind, const std::string& text);
  /// Why no operation of this rank can go on: it was closed, or the group was aborted.
  std::optional<Fault> stopped() const;
  /// A fault naming those of `peers` that left or, with `thorough` (system calls), died.
  std::optional<Fault> lost(const std::vector<int>& peers, bool check_processes);

  /// How many cores the ranks may run on together: each may be bound to its own.
  int cores();

  Segment segment;
  const int rank;
  const int size;
  Liveness liveness;
  std::atomic<bool> closing{false};
  std::atomic<int> known_cores{0};
  std::atomic<uint64_t> operations{0}, bytes{0}, sleeps{0};
};

}  // namespace tilework
