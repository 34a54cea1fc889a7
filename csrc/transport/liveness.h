// Liveness of peers. Each rank holds a lock on its byte of the group's memory file (an open file
// description lock, fcntl(2)), through a descriptor that exec and forked children close. The kernel
// releases it with the process, however that ends, also when it becomes another program; and shows
// it to every peer, also in another pid or network namespace.
//
// Besides, the end of a process is detected through its pidfd (pidfd_open(2)), which is immune to
// reused pids once it is open; a peer's start time guards the moment of opening. Where pidfds are
// refused, /proc is read instead. Either sign counts.
#pragma once

#include <mutex>
#include <vector>

#include "transport/segment.h"

namespace tilework {

/// Write this process's identity into its rank's control block; throws if the rank is taken.
void register_process(RankControl& mine, int rank, bool held);

class Liveness {
 public:
  /// Takes this rank's lock, if the kernel grants it.
  Liveness(const Segment& segment, int rank);
  ~Liveness();

  /// True if the process of `rank` ended before it left the group. Costs one or two system calls.
  bool dead(int rank);
  /// True if this rank holds its lock.
  bool held() const { return lock_fd_ >= 0; }
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
  bool released(int rank) const;

  const Segment& segment_;
  const int rank_;
  int lock_fd_;
  std::mutex mutex_;
  std::vector<Peer> peers_;
  uint64_t namespace_;
};

}  // namespace tilework
