// The memory that the ranks of one group share: a sealed memfd, mapped by each rank.
//
//   GroupHeader                          magic, ABI, size, nonce, the abort record
//   RankControl   x N                    step counter, event counts, pid, operation headers, failure report
//   int64         x N x 2 x 2N           bytes each rank sends to and expects from each other rank
//   Cursor        x N x N                heads and tails of the point-to-point channels
//   outbox slots  x N x 2 x slot_bytes   data that a rank publishes in a round
//   channels      x N x N x ring_bytes   point-to-point rings
//   arenas        x N x arena_bytes      buffers that peers use in place; mapped when needed
//
// The file is sparse: a page costs memory once it is touched, so idle channels cost nothing.
//
// Every rank may write every byte. So a rank reads an index or a size once, checks it, and uses the
// private copy.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transport/arena.h"
#include "transport/platform.h"
#include "transport/tunables.h"

namespace tilework {

constexpr uint32_t kAbi = 14;
constexpr int kMaxRanks = 1024;
constexpr size_t kMaxNonce = 64;
constexpr size_t kMaxReportBytes = 2000;
constexpr size_t kLeastRingBytes = 128 * 1024;
constexpr size_t kLine = 64;
constexpr size_t kDefaultSlotBytes = 512 * 1024;

/// An eventcount: a futex word, with the number of threads asleep on it.
///
/// No wake-up is lost: a waiter counts itself, then reads its condition; a notifier makes the
/// condition true, then reads the count. All four are sequentially consistent, so one of them
/// sees the other (Dekker's argument). The word catches a notification between the check and the
/// sleep.
struct EventCount {
  std::atomic<uint32_t> word;
  std::atomic<uint32_t> waiters;

  void notify() {
    if (waiters.load() > 0) notify_always();
  }
  void notify_always() {
    word.fetch_add(1);
    futex_wake_all(word);
  }
};

/// A round of a rank. In the first round of a collective also the rank's call, which all ranks compare. A
/// rank has two headers, used in turn. The first cache line has all that a short operation needs.
struct alignas(2 * kLine) OperationHeader {
  static constexpr size_t kDataBytes = 16;

  std::atomic<uint64_t> step;  // the last round that the rank has published with this header
  std::atomic<uint64_t> sequence;
  std::atomic<uint64_t> signature;  // kind, dtype, reduce op, flags, root: pack_signature()
  std::atomic<uint64_t> bytes;
  std::atomic<uint64_t> label;
  std::atomic<uint64_t> provenance;     // of the tensors; see Operation
  alignas(16) char data[kDataBytes];    // instead of the outbox, for short data
  std::atomic<uint64_t> factor;         // bits of a double
  std::atomic<uint64_t> input, output;  // position in the rank's arena, plus 1; 0: elsewhere
};
static_assert(offsetof(OperationHeader, factor) == kLine, "the rest on a line of its own");

struct FailureReport {
  std::atomic<uint32_t> state;  // 0 none, 1 being written, 2 there
  uint32_t bytes;
  char text[kMaxReportBytes];
};

/// 128-byte alignment: x86 prefetches cache lines in pairs.
struct alignas(4096) RankControl {
  alignas(128) std::atomic<uint32_t> core;        // where the rank last waited, plus 1; 0: unknown
  EventCount round_event;                         // a round is complete
  std::atomic<int64_t> waits_since, works_since;  // where ranks share cores; see CoreMates
  alignas(128) EventCount message_event;          // a channel moved
  alignas(128) std::atomic<int32_t> pid;          // 0 until the rank has joined
  std::atomic<uint32_t> departed;
  std::atomic<uint32_t> held;  // 1 once the rank holds the rank's lock; see Liveness
  std::atomic<uint64_t> pid_namespace;
  std::atomic<uint64_t> start_time;         // of the process, to see through a reused pid
  std::atomic<uint64_t> cores[kCoreWords];  // that the process may run on
  std::atomic<uint32_t> core_limit;         // see platform.h
  std::atomic<uint64_t> entered;            // the step whose parity says which header is current
  std::atomic<uint64_t> blocked;        // the last operation that the rank's own thread waited in
  std::atomic<uint64_t> proof_address;  // in the process's memory, of the proof that peers read
  std::atomic<uint64_t> proof[2];
  std::atomic<uint32_t> given_up;  // an operation of this rank failed: the buffers may be reused
  alignas(128) OperationHeader headers[2];
  alignas(128) FailureReport report;
};
static_assert(sizeof(RankControl) == 4096, "one page a rank");

struct AbortRecord {
  std::atomic<uint32_t> state;  // as FailureReport
  int32_t rank;
  char kind[32];
  uint32_t bytes;
  char text[kMaxReportBytes];
};

struct Identity {
  uint64_t magic;
  uint32_t abi;
  uint32_t size;
  uint64_t slot_bytes, arena_bytes;
  Tunables tunables;
  uint32_t nonce_bytes;
  char nonce[kMaxNonce];
};

struct alignas(4096) GroupHeader {
  Identity identity;
  alignas(128) AbortRecord abort;
};

/// A copy of a short message of a channel's ring, beside the head: a receiver that awaits this message
/// needs no other cache line. The writer does not wait for readers, so they read `end` before and after.
struct ShortMessage {
  static constexpr size_t kBytes = 16, kWords = 5;

  std::atomic<uint64_t> end;            // the head after the message; 0: being written
  std::atomic<uint64_t> words[kWords];  // tag, label, dtype and bytes, data
};

/// Positions of a channel's sender (head) and receiver (tail), in bytes since the start.
/// Messages that the receiver reads from the sender's memory are counted in both directions.
struct Cursor {
  alignas(kLine) std::atomic<uint64_t> head;
  std::atomic<uint64_t> withdrawn;  // the last such message that the sender gave up
  ShortMessage last;
  alignas(kLine) std::atomic<uint64_t> tail;
  std::atomic<uint64_t> answer;  // to the last such message: twice the number; 1 more if refused
};

static_assert(sizeof(Cursor) == 2 * kLine, "a line for each side");

/// Offsets of the segment's regions, a function of the sizes alone.
struct SegmentLayout {
  SegmentLayout(int size, size_t slot_bytes, size_t arena_bytes);  // throws std::invalid_argument

  int size;
  size_t slot_bytes, arena_bytes, ring_bytes;  // the latter a power of two
  size_t tables, cursors, outboxes, channels, arenas, total;
};

/// A sealed memfd for `size` ranks; throws std::system_error where the kernel refuses.
int create_segment(int size, size_t slot_bytes, const std::string& nonce,
                   const Tunables& tunables = {});

/// A file descriptor; closed at the end unless it was released.
struct File {
  explicit File(int fd_) : fd(fd_) {}
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int release() {
    const int result = fd;
    fd = -1;
    return result;
  }
  int fd;
};

/// A mapping of a group's segment.
class Segment {
 public:
  /// Check seals, size and header (std::invalid_argument), then map the segment. `of_threads`: all ranks
  /// will be threads of this process, which share the mapping.
  Segment(int fd, int size, const std::string& nonce, bool of_threads = false);
  /// The same mapping, for another rank.
  explicit Segment(const Segment* mate);
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  int size() const { return layout_.size; }
  size_t slot_bytes() const { return layout_.slot_bytes; }
  size_t bytes() const { return layout_.arenas; }
  size_t arena_bytes() const { return layout_.arena_bytes; }
  size_t ring_bytes() const { return layout_.ring_bytes; }
  const Tunables& tunables() const { return tunables_; }
  void set_tunables(const Tunables& tunables) { tunables_ = tunables; }
  bool of_threads() const { return of_threads_; }
  /// A number that tells segments apart while they exist.
  uint64_t number() const { return number_; }

  GroupHeader& header() const { return *reinterpret_cast<GroupHeader*>(base_); }
  RankControl& control(int rank) const {
    return *reinterpret_cast<RankControl*>(base_ + sizeof(GroupHeader) +
                                           rank * sizeof(RankControl));
  }
  /// 2N numbers: bytes that `rank` sends to each rank, then bytes that it expects from each.
  std::atomic<int64_t>* table(int rank, unsigned parity) const {
    auto* tables = reinterpret_cast<std::atomic<int64_t>*>(base_ + layout_.tables);
    return tables + (static_cast<size_t>(rank) * 2 + parity) * 2 * layout_.size;
  }
  char* slot(int rank, unsigned parity) const {
    return base_ + layout_.outboxes + (static_cast<size_t>(rank) * 2 + parity) * layout_.slot_bytes;
  }
  /// Cursors of one receiver lie together, so that it can scan them.
  Cursor& cursor(int source, int destination) const {
    return reinterpret_cast<Cursor*>(base_ + layout_.cursors)[channel(source, destination)];
  }
  char* ring(int source, int destination) const {
    return base_ + layout_.channels + channel(source, destination) * layout_.ring_bytes;
  }
  /// The memory file; it stays open.
  int fd() const { return file_->fd; }
  /// Replace [data, data + bytes), if it lies in this rank's arena, by private memory: same contents and
  /// address, but out of peers' reach.
  void detach(const char* data, size_t bytes) const;
  /// This rank's arena; made at the first call.
  std::shared_ptr<Arena> own_arena(int rank) const;
  /// The position of a buffer in this rank's arena, plus 1; 0 if elsewhere. Cheap without an arena.
  uint64_t own_arena_position(const char* data, size_t bytes) const;
  /// [offset, offset + bytes) of any rank's arena; throws std::out_of_range, std::system_error.
  char* in_arena(int rank, uint64_t offset, size_t bytes) const;
  /// Wake all threads of all ranks that sleep in this group.
  void notify_all_ranks() const;

 private:
  size_t arena(int rank) const { return layout_.arenas + rank * layout_.arena_bytes; }
  size_t channel(int source, int destination) const {
    return static_cast<size_t>(destination) * layout_.size + source;
  }

  SegmentLayout layout_;
  Tunables tunables_;
  std::shared_ptr<File> file_;
  uint64_t number_;
  bool of_threads_;
  std::shared_ptr<Mapping> mapping_;
  char* base_;
  mutable std::mutex mutex_;  // guards the members below
  mutable std::shared_ptr<Arena> own_arena_;
  mutable std::atomic<bool> has_arena_{false};
  mutable std::vector<std::unique_ptr<Mapping>> arenas_;
};

}  // namespace tilework
