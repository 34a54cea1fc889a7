#include "transport/liveness.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <stdexcept>
#include <string>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434  // the same on every architecture; older headers lack it
#endif

namespace tilework {
namespace {

uint64_t pid_namespace() {
  struct stat status;
  return stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
}

struct ProcessStat {
  bool exists = true;  // false only if certain
  char state = '?';
  uint64_t start_time = 0;  // in clock ticks since boot; 0 where unknown
};

/// Fields 3 and 22 of /proc/PID/stat; the name in field 2 may hold anything, so start after it.
ProcessStat read_stat(int pid) {
  ProcessStat result;
  char path[64], text[1024];
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  FILE* file = fopen(path, "re");
  if (!file) {
    result.exists = errno != ENOENT || access("/proc/self/stat", F_OK) != 0;  // no /proc at all
    return result;
  }
  const size_t length = fread(text, 1, sizeof text - 1, file);
  fclose(file);
  text[length] = 0;
  const char* at = strrchr(text, ')');
  if (!at || at[1] != ' ') return result;
  result.state = at[2];
  at += 2;
  for (int field = 3; at && field < 22; ++field) at = strchr(at + 1, ' ');
  if (at) result.start_time = strtoull(at, nullptr, 10);
  return result;
}

bool gone(int pid, uint64_t start_time) {
  const ProcessStat now = read_stat(pid);
  const bool another = start_time && now.start_time && now.start_time != start_time;
  return !now.exists || now.state == 'Z' || now.state == 'X' || another;
}

struct flock byte_lock(int rank) {
  struct flock lock{};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return lock;
}

/// A descriptor of the memory file's that is this rank's alone, with its byte locked; -1 where the
/// kernel refuses.
int take_lock(int file, int rank) {
  char path[64];
  snprintf(path, sizeof path, "/proc/self/fd/%d", file);
  const int fd = ::open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return -1;
  struct flock lock = byte_lock(rank);
  if (fcntl(fd, F_OFD_SETLK, &lock) == 0) {
    close_in_children(fd);
    return fd;
  }
  close(fd);
  return -1;
}

}  // namespace

void register_process(const Segment& segment, int rank, bool held) {
  RankControl& mine = segment.control(rank);
  if (!segment.of_threads()) {  // threads do not watch each other's processes
    mine.pid_namespace.store(pid_namespace());
    mine.start_time.store(read_stat(getpid()).start_time);
  }
  uint64_t cores[kCoreWords];
  read_usable_cores(cores);
  for (int i = 0; i < kCoreWords; ++i) mine.cores[i].store(cores[i]);
  mine.core_limit.store(core_limit().load());
  mine.held.store(held);
  int32_t nobody = 0;
  if (!mine.pid.compare_exchange_strong(nobody, getpid()))
    throw std::invalid_argument("rank " + std::to_string(rank) + " is already taken, by process " +
                                std::to_string(nobody));
}

Liveness::Liveness(const Segment& segment, int rank)
    : segment_(segment),
      rank_(rank),
      lock_fd_(segment.of_threads() ? -1 : take_lock(segment.fd(), rank)),
      peers_(segment.size()),
      namespace_(segment.of_threads() ? 0 : pid_namespace()) {
  peers_[rank].state = State::kUnwatchable;
}

Liveness::~Liveness() {
  if (lock_fd_ >= 0) close_everywhere(lock_fd_);
  for (Peer& peer : peers_)
    if (peer.pidfd >= 0) close(peer.pidfd);
}

void Liveness::open(Peer& peer, const RankControl& control) const {
  peer.pid = control.pid.load();
  if (peer.pid == 0) return;  // has not joined yet
  if (peer.pid == getpid() || control.pid_namespace.load() != namespace_) {
    peer.state = State::kUnwatchable;
    return;
  }
  peer.pidfd = static_cast<int>(syscall(SYS_pidfd_open, peer.pid, 0));
  int reason = errno;
  if (gone(peer.pid, control.start_time.load()) || (peer.pidfd < 0 && reason == ESRCH))
    peer.state = State::kDead;
  else
    peer.state = peer.pidfd >= 0 ? State::kWatched : State::kPolled;
}

/// True if `rank` held its lock, and does not any more.
bool Liveness::released(int rank) const {
  if (rank == rank_ || segment_.control(rank).held.load() == 0) return false;
  struct flock lock = byte_lock(rank);
  return fcntl(segment_.fd(), F_OFD_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

bool Liveness::dead(int rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  Peer& peer = peers_[rank];
  const RankControl& control = segment_.control(rank);
  if (peer.state != State::kDead && released(rank)) peer.state = State::kDead;
  if (peer.state == State::kUnknown) open(peer, control);
  if (peer.state == State::kWatched) {
    pollfd watched{peer.pidfd, POLLIN, 0};
    if (poll(&watched, 1, 0) == 1) peer.state = State::kDead;
  } else if (peer.state == State::kPolled && gone(peer.pid, control.start_time.load())) {
    peer.state = State::kDead;
  }
  return peer.state == State::kDead && !departed(rank);  // who leaves lets go of its lock, too
}

}  // namespace tilework
