#include "collectives/peer_memory.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "collectives/strided_copy.h"
#include "transport/fault.h"

namespace tilework {
namespace {

constexpr int kSpans = 256;                              // of one system call
constexpr size_t kMostBytes = size_t{64} * 1024 * 1024;  // likewise

Buffer buffer_of(const ShownBuffer& shown) {
  return {reinterpret_cast<char*>(shown.address), shown.bytes, shown.row_bytes, shown.stride_bytes};
}

ShownBuffer shown_of(const Buffer& buffer) {
  return {reinterpret_cast<uint64_t>(buffer.data), buffer.bytes, buffer.row_bytes,
          buffer.stride_bytes};
}

/// A buffer of another process may be described by garbage: true if it can be walked through.
bool sound(const ShownBuffer& shown) {
  if (shown.row_bytes == 0) return true;
  return shown.stride_bytes >= shown.row_bytes && shown.bytes % shown.row_bytes == 0 &&
         shown.stride_bytes <= kMostBytes * 1024;
}

bool turned_off() {
  const char* setting = getenv("TILEWORK_SINGLE_COPY");
  return setting && (strcmp(setting, "0") == 0 || strcmp(setting, "off") == 0);
}

constexpr int kTurnedOff = -1, kOtherNamespace = -2, kNoProof = -3;  // instead of an errno

}  // namespace

/// The ranks that are threads of this process, by the segment's number.
class PeerMemory::Registry {
 public:
  static Registry& of_this_process() {
    static std::atomic<Registry*> current{nullptr};
    Registry* known = current.load();
    if (known && known->generation_ == fork_generation()) return *known;
    auto* fresh = new Registry;  // a parent's lock may be held forever; neither is freed
    return current.compare_exchange_strong(known, fresh) ? *fresh : (delete fresh, *known);
  }

  void add(uint64_t segment, int rank, const std::shared_ptr<LocalShown>& shown) {
    std::lock_guard<std::mutex> lock(mutex_);
    ranks_[{segment, rank}] = shown;
  }
  void remove(uint64_t segment, int rank) {
    std::lock_guard<std::mutex> lock(mutex_);
    ranks_.erase({segment, rank});
  }
  std::shared_ptr<LocalShown> find(uint64_t segment, int rank) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto at = ranks_.find({segment, rank});
    return at == ranks_.end() ? nullptr : at->second;
  }

 private:
  const unsigned generation_ = fork_generation();
  std::mutex mutex_;
  std::map<std::pair<uint64_t, int>, std::shared_ptr<LocalShown>> ranks_;
};

PeerMemory::PeerMemory(const Segment& segment, int rank)
    : segment_(segment),
      rank_(rank),
      proof_(new uint64_t[2]{}),
      mine_(std::make_shared<LocalShown>()),
      peers_(segment.size()) {
  for (auto& buffers : mine_->buffers) buffers.resize(segment.size() + 1);
  if (turned_off() || getrandom(proof_.get(), 16, 0) != 16) {
    refuse(rank, kTurnedOff);
    return;
  }
  RankControl& control = segment.control(rank);
  control.proof_address.store(reinterpret_cast<uint64_t>(proof_.get()));
  for (int i = 0; i < 2; ++i) control.proof[i].store(proof_[i]);
  Registry::of_this_process().add(segment.number(), rank, mine_);
}

PeerMemory::~PeerMemory() {
  Registry::of_this_process().remove(segment_.number(), rank_);
  volatile uint64_t* proof = proof_.get();
  proof[0] = proof[1] = 0;  // a peer that still reads must not find it in freed memory
}

void PeerMemory::try_peers() {
  if (state_.load() != State::kUntried) return;
  std::lock_guard<std::mutex> lock(trying_);
  if (state_.load() != State::kUntried) return;
  for (int rank = 0; rank < segment_.size(); ++rank)
    if (segment_.control(rank).pid.load() == 0) return;
  all_local_ = true;
  for (int rank = 0; rank < segment_.size(); ++rank) {
    if (rank == rank_) continue;
    if (!try_peer(rank, peers_[rank])) return;
    all_local_ &= peers_[rank].local != nullptr;
  }
  state_ = State::kReadable;
}

bool PeerMemory::try_peer(int rank, Peer& peer) {
  const RankControl& mine = segment_.control(rank_);
  const RankControl& control = segment_.control(rank);
  peer.pid = control.pid.load();
  peer.proof_address = control.proof_address.load();
  for (int i = 0; i < 2; ++i) peer.proof[i] = control.proof[i].load();
  if (peer.proof_address == 0) return refuse(rank, kTurnedOff), false;
  if (control.pid_namespace.load() != mine.pid_namespace.load())
    return refuse(rank, kOtherNamespace), false;
  if (peer.pid == getpid() && segment_.tunables().threads_apart == 0)
    peer.local = Registry::of_this_process().find(segment_.number(), rank);
  if (peer.local) return true;
  if (read(peer, {}, 0, {})) return true;
  return refuse(rank, errno), false;
}

void PeerMemory::refuse(int peer, int error) {
  refused_by_ = peer;
  refusal_ = error;
  state_ = State::kRefused;
}

std::string PeerMemory::describe() const {
  switch (state_.load()) {
    case State::kUntried: return "untried: no operation has run yet";
    case State::kReadable:
      return all_local_ ? "possible: ranks are threads of one process"
                        : "possible: process_vm_readv reads every peer's memory";
    case State::kRefused: break;
  }
  const int error = refusal_.load();
  const std::string whose = format_ranks({refused_by_.load()}) + "'s memory";
  if (error == kTurnedOff) return "turned off, by TILEWORK_SINGLE_COPY=0";
  if (error == kOtherNamespace) return "impossible: " + whose + " is in another pid namespace";
  if (error == kNoProof) return "impossible: " + whose + " is not where it said";
  return "refused: process_vm_readv of " + whose + ": " + strerror(error);
}

void PeerMemory::show(unsigned parity, size_t index, const Buffer& buffer) {
  mine_->buffers[parity][index] = shown_of(buffer);
}

ShownBuffer PeerMemory::shown(int peer, unsigned parity, size_t index, const char* cell) const {
  if (peers_[peer].local) return peers_[peer].local->buffers[parity][index];
  ShownBuffer shown;  // a private copy: what is checked is what is used
  memcpy(&shown, cell, sizeof shown);
  return shown;
}

/// Bytes [offset, offset + to.bytes) of a peer's buffer, and the proof. Sets errno where it fails.
bool PeerMemory::read(const Peer& peer, const ShownBuffer& from, size_t offset, const Buffer& to) {
  RowCursor target(to, 0), source(buffer_of(from), offset);
  size_t left = to.bytes;
  do {
    iovec local[kSpans + 1], remote[kSpans + 1];
    int spans = 0;
    size_t bytes = 0;
    for (; left > 0 && spans < kSpans && bytes < kMostBytes; ++spans) {
      const size_t run = std::min({left, target.left(), source.left(), kMostBytes});
      local[spans] = {target.at(), run};
      remote[spans] = {source.at(), run};
      target.advance(run);
      source.advance(run);
      bytes += run;
      left -= run;
    }
    uint64_t proof[2] = {};
    local[spans] = {proof, sizeof proof};
    remote[spans] = {reinterpret_cast<void*>(peer.proof_address), sizeof proof};
    const ssize_t done = process_vm_readv(peer.pid, local, static_cast<unsigned>(spans + 1), remote,
                                          static_cast<unsigned>(spans + 1), 0);
    if (done < 0) return false;
    errno = kNoProof;
    if (static_cast<size_t>(done) != bytes + sizeof proof) return false;
    if (memcmp(proof, peer.proof, sizeof proof) != 0) return false;
  } while (left > 0);
  return true;
}

// ---- reading ---------------------------------------------------------------------------------

PeerMemory::Reading::Reading(PeerMemory& memory) : memory_(memory) {
  for (const Peer& peer : memory_.peers_) {
    if (!peer.local) continue;
    peer.local->readers.fetch_add(1);  // before the look: one of the two sees the other
    failed_ |= peer.local->given_up.load();
  }
}

PeerMemory::Reading::~Reading() { leave(); }

void PeerMemory::Reading::leave() {
  if (!inside_) return;
  inside_ = false;
  for (const Peer& peer : memory_.peers_)
    if (peer.local) peer.local->readers.fetch_sub(1);
}

bool PeerMemory::Reading::copy(int rank, const ShownBuffer& from, size_t offset, const Buffer& to,
                               bool streamed) {
  const Peer& peer = memory_.peers_[rank];
  failed_ |= !sound(from) || offset > from.bytes || to.bytes > from.bytes - offset;
  if (failed_) return false;
  if (peer.local)
    copy_rows(to, 0, buffer_of(from), offset, to.bytes, streamed);
  else if (!memory_.read(peer, from, offset, to))
    memory_.refuse(rank, errno), failed_ = true;
  if (!failed_) memory_.bytes_read_.fetch_add(to.bytes, std::memory_order_relaxed);
  return !failed_;
}

const char* PeerMemory::Reading::fetch(int rank, const ShownBuffer& from, size_t offset,
                                       size_t bytes, char* scratch) {
  if (!memory_.peers_[rank].local)
    return copy(rank, from, offset, {scratch, bytes}, false) ? scratch : nullptr;
  failed_ |= from.row_bytes != 0 || offset > from.bytes || bytes > from.bytes - offset;
  if (failed_) return nullptr;
  memory_.bytes_read_.fetch_add(bytes, std::memory_order_relaxed);
  return buffer_of(from).data + offset;
}

bool PeerMemory::Reading::finish() {
  leave();
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int peer = 0; peer < memory_.segment_.size(); ++peer)
    failed_ |= memory_.segment_.control(peer).given_up.load() != 0;
  return !failed_;
}

bool PeerMemory::read_from(int rank, const ShownBuffer& from, size_t offset, const Buffer& to) {
  if (!readable() || !sound(from) || offset > from.bytes || to.bytes > from.bytes - offset)
    return false;
  if (!read(peers_[rank], from, offset, to)) return refuse(rank, errno), false;
  bytes_read_.fetch_add(to.bytes, std::memory_order_relaxed);
  return true;
}

void PeerMemory::give_up() {
  segment_.control(rank_).given_up.store(1);
  mine_->given_up.store(true);
  while (mine_->readers.load() > 0) sched_yield();
}

char* PeerMemory::scratch(size_t bytes) {
  if (scratch_.size() < bytes + kLine) scratch_.resize(bytes + kLine);
  const auto misaligned = reinterpret_cast<uintptr_t>(scratch_.data()) % kLine;
  return scratch_.data() + (kLine - misaligned) % kLine;
}

}  // namespace tilework
