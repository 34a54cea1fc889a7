// The state that all operations of one rank share: its segment, its peers' liveness, counters.
#pragma once

#include <atomic>
#include <optional>
#include <string>

#include "fault.h"
#include "liveness.h"
#include "segment.h"
#include "waiting.h"

namespace tilework {

/// The first abort of the group: by which rank, and why.
struct Abort {
  int rank;
  std::string kind;
  std::string text;
};

/// "rank 2 died; rank 3 left the group": of the ranks in `gone`, those in `died` died.
Fault peer_lost_fault(const std::vector<int>& died, const std::vector<int>& gone);

struct RankContext {
  RankContext(int fd, int rank, int size, const std::string& nonce);

  /// The abort of the group, none if there was none.
  std::optional<Abort> aborted() const;
  /// The first abort wins.
  void abort(const std::string& kind, const std::string& text);
  /// The fault of every operation of this rank once it was closed, or the group was aborted.
  std::optional<Fault> stop_fault() const;
  /// A fault naming those of `peers` that left or, with `check_processes` (system calls), died.
  std::optional<Fault> lost_peers_fault(const std::vector<int>& peers, bool check_processes);

  /// The number of cores that the ranks may run on together: each may be bound to its own.
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
