// The state that all operations of one rank share: the segment, peers' liveness, counters.
#pragma once

#include <atomic>
#include <optional>
#include <string>
#include <thread>

#include "collectives/peer_memory.h"
#include "transport/fault.h"
#include "transport/liveness.h"
#include "transport/segment.h"
#include "transport/waiting.h"

namespace tilework {

/// The first abort of the group: the rank and the reason.
struct Abort {
  int rank;
  std::string kind;
  std::string text;
};

/// "rank 2 died; rank 3 left the group": of the ranks in `gone`, those in `died` died.
Fault peer_lost_fault(const std::vector<int>& died, const std::vector<int>& gone);

struct RankContext final : CoreMates {
  /// `place`: what the segment is made of.
  template <class... Place>
  explicit RankContext(int rank_, const Place&... place)
      : segment(place...),
        rank(rank_),
        size(segment.size()),
        liveness(segment, rank_),
        memory(segment, rank_) {
    register_process(segment, rank, liveness.held());
  }

  /// The abort of the group, none if there was none.
  std::optional<Abort> aborted() const;
  /// The first abort wins.
  void abort(const std::string& kind, const std::string& text);
  /// The fault of every operation after this rank was closed, or the group was aborted.
  std::optional<Fault> stop_fault() const;
  /// A fault naming those of `peers` that left or, with `check_processes` (system calls), died.
  std::optional<Fault> lost_peers_fault(const std::vector<int>& peers, bool check_processes);

  /// Note that the calling thread waits in an operation, if it is the rank's own thread: then the rank
  /// does nothing else. Cheap, but not for the fast path.
  void note_blocked(uint64_t sequence) {
    if (std::this_thread::get_id() == owner) segment.control(rank).blocked.store(sequence);
  }

  /// The number of cores that the ranks may run on together, since ranks may be bound to cores. Ranks of
  /// one pid namespace count as sharing one limit: a container's.
  int cores();

  /// Tell the peers on which core this thread runs.
  void tell_core(int core) {
    const uint32_t here = static_cast<uint32_t>(core + 1);
    std::atomic<uint32_t>& told = segment.control(rank).core;
    if (told.load(std::memory_order_relaxed) != here) told.store(here, std::memory_order_relaxed);
  }

  void tell_wait(int64_t now) override {
    segment.control(rank).waits_since.store(now, std::memory_order_relaxed);
  }
  void tell_work(int64_t now) override {
    segment.control(rank).works_since.store(now, std::memory_order_relaxed);
  }
  int64_t worked_ns(int64_t from, int64_t to) const override;

  /// True if a rank of [first, last) that `awaited` accepts was last seen on `core`, on which this
  /// thread runs. Tells the other ranks about this core. If a core stays fuller than another core, the
  /// last rank leaves it.
  template <class Awaited>
  bool shares_core(int core, int first, int last, Awaited&& awaited) {
    const uint32_t here = static_cast<uint32_t>(core + 1);
    tell_core(core);
    for (int peer = first; here != 0 && peer < last; ++peer)
      if (peer != rank && segment.control(peer).core.load(std::memory_order_relaxed) == here &&
          awaited(peer))
        return peer > rank || !leave_core(here);
    return false;
  }

  Segment segment;
  const int rank;
  const int size;
  const std::thread::id owner = std::this_thread::get_id();
  Liveness liveness;
  PeerMemory memory;
  std::atomic<bool> closing{false};
  std::atomic<int> known_cores{0};
  WaitHistory history;  // of waits on the caller's threads
  std::atomic<uint64_t> operations{0}, bytes{0}, sleeps{0};

 private:
  bool leave_core(uint32_t here);
};

}  // namespace tilework
