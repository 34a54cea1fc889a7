// Reading peers' memory, so that data moves once, from its source to its destination: through the
// kernel (process_vm_readv(2)) where ranks are processes, directly where they are threads of one.
//
// This needs no privilege. Once all ranks have joined, each rank tries to read a proof from every peer:
// random bytes at an address in the peer's control block. Each read of data ends with a read of the proof
// in the same system call, which sees one address space from the first byte to the last. So the data came
// from the peer, not from another program that has since taken the peer's process or pid.
//
// After a peer gives up a buffer (a fault, a signal, a time limit) it may reuse the memory at once. So
// readers check after a read whether the peer has given up, and then discard the data. Threads could even
// crash in freed memory, so a rank that gives up waits until no thread reads the rank's memory.
//
// Nothing here raises. After a failed read, for any reason, all ranks repeat the move through the
// outboxes; if the peer is lost, the repetition raises the error that says so.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "collectives/operation.h"
#include "transport/segment.h"

namespace tilework {

/// A buffer in the address space of the rank that shows it.
struct ShownBuffer {
  uint64_t address, bytes, row_bytes, stride_bytes;
};
static_assert(sizeof(ShownBuffer) <= kLine, "fits the smallest cell of an outbox");

/// Rows shorter than this cost more to read one by one than to copy twice.
constexpr size_t kLeastRowBytes = 4096;

class PeerMemory {
 public:
  PeerMemory(const Segment& segment, int rank);
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  /// Find out, once, which peers' memory can be read; does nothing before all peers have joined.
  void try_peers();
  /// True if the memory of every peer is known to be readable.
  bool readable() const { return state_.load(std::memory_order_acquire) == State::kReadable; }
  /// True if readable() and all ranks are threads of this process.
  bool all_local() const { return readable() && all_local_; }
  /// Bytes read so far.
  uint64_t bytes_read() const { return bytes_read_.load(std::memory_order_relaxed); }
  /// How the memory is read, or why it cannot be, for people.
  std::string describe() const;

  /// Note a buffer for the threads of this process, as the `index`th of a round.
  void show(unsigned parity, size_t index, const Buffer& buffer);
  /// The buffer that a peer showed: in `cell` of the peer's outbox, or privately between threads.
  ShownBuffer shown(int peer, unsigned parity, size_t index, const char* cell) const;

  /// A scope in which this rank reads peers' memory. The rank must not wait for peers inside.
  class Reading {
   public:
    explicit Reading(PeerMemory& memory);
    ~Reading();
    Reading(const Reading&) = delete;
    Reading& operator=(const Reading&) = delete;

    /// Copy bytes [offset, offset + to.bytes) of the shown buffer of `peer`; false on failure.
    bool copy(int peer, const ShownBuffer& from, size_t offset, const Buffer& to, bool streamed);
    /// The bytes of a peer: in place, or copied into `scratch`; null on failure.
    const char* fetch(int peer, const ShownBuffer& from, size_t offset, size_t bytes,
                      char* scratch);
    /// End the reading; true if all data was read before the owner gave the buffer up.
    bool finish();

   private:
    void leave();

    PeerMemory& memory_;
    bool failed_ = false, inside_ = true;
  };

  /// Copy bytes [offset, offset + to.bytes) of a peer's buffer through the kernel, even if the peer is a
  /// thread of this process; false if that failed.
  bool read_from(int peer, const ShownBuffer& from, size_t offset, const Buffer& to);

  /// Forbid reads of this rank's buffers; returns once no thread reads them.
  void give_up();

  /// Memory of at least `bytes` that keeps its contents until the next call.
  char* scratch(size_t bytes);

 private:
  enum class State { kUntried, kReadable, kRefused };

  /// The buffers that a rank shows to threads of the same process. Outlives the rank during reads.
  struct LocalShown {
    std::atomic<int> readers{0};
    std::atomic<bool> given_up{false};
    std::vector<ShownBuffer> buffers[2];
  };
  struct Peer {
    int pid = 0;
    uint64_t proof_address = 0, proof[2] = {};
    std::shared_ptr<LocalShown> local;  // null: the rank is a separate process
  };
  class Registry;

  bool try_peer(int rank, Peer& peer);
  bool read(const Peer& peer, const ShownBuffer& from, size_t offset, const Buffer& to);
  void refuse(int peer, int error);

  const Segment& segment_;
  const int rank_;
  std::mutex trying_;
  std::atomic<State> state_{State::kUntried};
  bool all_local_ = false;
  std::atomic<int> refused_by_{-1}, refusal_{0};
  std::atomic<uint64_t> bytes_read_{0};
  std::unique_ptr<uint64_t[]> proof_;
  std::shared_ptr<LocalShown> mine_;
  std::vector<Peer> peers_;
  std::vector<char> scratch_;
};

}  // namespace tilework
