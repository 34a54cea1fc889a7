// Liveness of peers. The end of a process, of any kind, is detected through its pidfd
// (pidfd_open(2)), which is immune to reused pids once it is open; a peer's start time guards
// the moment of opening. Where pidfds are refused, /proc is read instead. A peer in another pid
// namespace cannot be watched: then only timeouts and its own departure are noticed.
#pragma once

#include <mutex>
#include <vector>

#include "segment.h"

namespace tilework {

/// Write this process's identity into its rank's control block; throws if the rank is taken.
void register_process(RankControl& mine, int rank);

class Liveness {
 public:
  Liveness(const Segment& segment, int rank);
  ~Liveness();

  /// True if the process of `rank` has ended. Costs one or two system calls.
  bool dead(int rank);
  /// True if `rank` has closed its end of the group.
  bool departed(int rank) const { return segment_.control(rank).departed.load() != 0; }

 private:
  enum class State { kUnknown, kWatched, kPolled, kUnwatchable, kDead };
  struct Peer {
    State state = State::kUnknown;
    int pidfd = -1;
    int pid = 0;
  };

  void open(Peer& peer, const RankControl& control) const;

  const Segment& segment_;
  std::mutex mutex_;
  std::vector<Peer> peers_;
  uint64_t namespace_;
};

}  // namespace tilework
