// Reading peers' memory, so that data moves once, from its source to its destination: through the
// kernel (process_vm_readv(2)) where ranks are processes, directly where they are threads of one.
//
// No privilege is asked for. Once all ranks have joined, each tries to read a proof, some random bytes
// at an address that the peer's control block names, from every peer. Each read of data ends with the
// proof again, in the same system call, which sees one address space from its first byte to its last:
// so what was read came from the peer, not from a program that has since taken its place or its pid.
//
// What a peer gives up (a fault, a signal, a time limit) it may reuse at once, so readers look
// afterwards whether it has, and take what they read for worth nothing. Threads could even crash in
// memory that was freed: a rank that gives up waits until no thread reads it.
//
// Nothing here raises. A read that did not succeed, for whatever reason, is repeated through the
// outboxes by all ranks together; if the peer is lost, that ends with the error that says so.
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

  /// Find out whose memory can be read, once; nothing happens before all peers have joined.
  void try_peers();
  /// True if the memory of every peer can be read, as far as is known.
  bool readable() const { return state_.load(std::memory_order_acquire) == State::kReadable; }
  /// True if, besides, all ranks are threads of this process.
  bool all_local() const { return readable() && all_local_; }
  /// Bytes read so far.
  uint64_t bytes_read() const { return bytes_read_.load(std::memory_order_relaxed); }
  /// Why it cannot, or how it can, for people.
  std::string describe() const;

  /// Note a buffer for the threads of this process, as the `index`th of a round.
  void show(unsigned parity, size_t index, const Buffer& buffer);
  /// The buffer that a peer showed: in `cell` of its outbox, or if it is a thread, privately.
  ShownBuffer shown(int peer, unsigned parity, size_t index, const char* cell) const;

  /// A time in which this rank reads peers' memory. It must not wait for them meanwhile.
  class Reading {
   public:
    explicit Reading(PeerMemory& memory);
    ~Reading();
    Reading(const Reading&) = delete;
    Reading& operator=(const Reading&) = delete;

    /// Copy bytes [offset, offset + to.bytes) of what `peer` showed; false if that failed.
    bool copy(int peer, const ShownBuffer& from, size_t offset, const Buffer& to, bool streamed);
    /// The bytes of a peer: its own, or copied into `scratch`; null if that failed.
    const char* fetch(int peer, const ShownBuffer& from, size_t offset, size_t bytes,
                      char* scratch);
    /// True if everything was read before its owner gave it up. Ends the reading.
    bool finish();

   private:
    void leave();

    PeerMemory& memory_;
    bool failed_ = false, inside_ = true;
  };

  /// Copy bytes [offset, offset + to.bytes) of a peer's buffer through the kernel, even if the peer is a
  /// thread of this process; false if that failed.
  bool read_from(int peer, const ShownBuffer& from, size_t offset, const Buffer& to);

  /// Declare that this rank's buffers are no longer to be read; returns once no thread does.
  void give_up();

  /// Memory of at least `bytes` that keeps its contents until the next call.
  char* scratch(size_t bytes);

 private:
  enum class State { kUntried, kReadable, kRefused };

  /// What a rank shows to threads of its process. Outlives the rank while one of them reads.
  struct LocalShown {
    std::atomic<int> readers{0};
    std::atomic<bool> given_up{false};
    std::vector<ShownBuffer> buffers[2];
  };
  struct Peer {
    int pid = 0;
    uint64_t proof_address = 0, proof[2] = {};
    std::shared_ptr<LocalShown> local;  // null: a process of its own
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
