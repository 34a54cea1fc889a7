// The state that all operations of one rank share: its segment, its peers' liveness, counters.
#pragma once

#include <atomic>
#include <optional>
#include <string>
#include <thread>

#include "fault.h"
#include "liveness.h"
#include "peer_memory.h"
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

  /// Note that the calling thread waits in an operation, if it is the rank's own: then nothing else
  /// that the rank has to do is done meanwhile. Cheap, but not for the fast path.
  void note_blocked(uint64_t sequence) {
    if (std::this_thread::get_id() == owner) segment.control(rank).blocked.store(sequence);
  }

  /// The number of cores that the ranks may run on together: each may be bound to its own.
  int cores();

  Segment segment;
  const int rank;
  const int size;
  const std::thread::id owner = std::this_thread::get_id();
  Liveness liveness;
  PeerMemory memory;
  std::atomic<bool> closing{false};
  std::atomic<int> known_cores{0};
  std::atomic<uint64_t> operations{0}, bytes{0}, sleeps{0};
};

}  // namespace tilework
