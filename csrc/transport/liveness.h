// Liveness of peers. Each rank holds a lock on one byte of the group's memory file (an open file
// description lock, fcntl(2)), through a descriptor that exec and forked children close. The kernel
// releases the lock when the process ends in any way, or becomes another program. Every peer can see
// the lock, also in another pid or network namespace.
//
// A pidfd (pidfd_open(2)) also shows the end of a process. An open pidfd is immune to reused pids; the
// peer's start time guards the moment of opening. If the kernel refuses pidfds, /proc is read instead.
// Either sign counts.
#pragma once

#include <mutex>
#include <vector>

#include "transport/segment.h"

namespace tilework {

/// Write this process's identity into the rank's control block; throws if the rank is taken.
void register_process(const Segment& segment, int rank, bool held);

class Liveness {
 public:
  /// Takes this rank's lock, if the kernel grants it. Threads take none: all end with their process.
  Liveness(const Segment& segment, int rank);
  ~Liveness();

  /// True if the process of `rank` ended before the rank left the group. One or two system calls.
  bool dead(int rank);
  /// True if this rank holds the rank's lock.
  bool held() const { return lock_fd_ >= 0; }
  /// True if `rank` has left the group.
  bool departed(int rank) const { return segment_.control(rank).departed.load() != 0; }

 private:
  enum class State { kUnknown, kWatched, kPolled, kUnwatchable, kDead };
  struct Peer {
    State state = State::kUnknown;
    int pidfd = -1;
    int pid = 0;
  };

  void open(Peer& peer, const RankControl& control) const;
  bool released(int rank) const;

  const Segment& segment_;
  const int rank_;
  int lock_fd_;
  std::mutex mutex_;
  std::vector<Peer> peers_;
  uint64_t namespace_;
};

}  // namespace tilework
