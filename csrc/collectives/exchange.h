// Data exchange in rounds. In each round every rank writes into its outbox slot, publishes it, waits
// until all ranks have published, and reads data from the slots of the others.
//
// Each rank counts the rounds it has published, and has two slots and two headers; round s uses
// slot s % 2, and the `step` of header s % 2. One wait per round is enough. Claim: when a rank writes
// a slot for round s, no peer still reads that slot for round s - 2. Proof: the rank has finished
// waiting in round s - 1, so every peer has published s - 1; a peer publishes s - 1 only after it
// finished reading in round s - 2. The counter never restarts, so the claim also holds across
// operations of any kind, and no two operations share a slot in use. The same holds for headers and
// tables, which use the parity of the operation's first round.
//
// Data that is shorter than a slot moves to another place in the slot each time: see Cell.
//
// Cost of a round, besides the slots: one store, and N - 1 cache lines read. The shortest operations
// use no slots, since their data lies beside the step. The rank that arrives last wakes each sleeping
// rank.
#pragma once

#include <vector>

#include "collectives/operation_header.h"
#include "collectives/rank_context.h"
#include "transport/outbox_stores.h"
#include "transport/platform.h"

namespace tilework {

/// A part of a slot, for data of at most `bytes` bytes.
///
/// Shorter data follows the data of the last round in the same slot, and starts again at the slot's
/// begin after the end. So a rank writes where peers have read longest ago. Lines that peers have read
/// lately are in the peers' caches, and a store must first take them away: on two cores with a shared
/// third-level cache 64 KiB took 10 µs in one place and 4 spread over a MiB. Both sides know the place by
/// the step and the length.
struct Cell {
  size_t offset, bytes;

  size_t place(uint64_t step, size_t length) const {
    const size_t distance = round_up(length, kLine);
    if (length < kLeastMoved || distance > bytes) return offset;
    return offset + step / 2 % (bytes / distance) * distance;
  }

 private:
  static constexpr size_t kLeastMoved =
      8 * 1024;  // shorter data stays in one place, in the writer's first-level cache
};

/// The state that outlives an operation.
struct RoundState {
  RoundState(int size, const Tunables& tunables)
      : peers(size), sources(size), stores(tunables.slow_outbox_ns) {}
  uint64_t step = 0;
  alignas(16) char short_data[OperationHeader::kDataBytes] = {};  // until it is in the header
  PeerBuffers peers;                                              // of the current operation
  std::vector<const void*> sources;                               // scratch for reductions
  OutboxStores stores;
};

/// The rounds of one operation. The first round carries the header.
class Exchange {
 public:
  /// Writes the header. Once `cancelled` is true, waits end with a fault.
  Exchange(RankContext& context, RoundState& state, const Operation& operation,
           const WaitOptions& options, const std::atomic<bool>& cancelled);

  /// This rank's slot for the next round. Not to be called between publish() and await().
  char* slot() const {
    if (form_.in_header && state_.step + 1 == first_step_) return state_.short_data;
    return segment_.slot(rank, parity(1));
  }
  /// A rank's slot of the current round; valid until the next publish().
  const char* slot_of(int peer) const {
    if (state_.step == first_step_ && state_.peers.in_header[peer])
      return header(peer, parity(0)).data;
    return segment_.slot(peer, parity(0));
  }

  /// The place of `length` bytes of a cell: this rank's for the next round, a peer's in the current round.
  char* slot(const Cell& cell, size_t length) const {
    return slot() + cell.place(state_.step + 1, length);
  }
  const char* slot_of(int peer, const Cell& cell, size_t length) const {
    return slot_of(peer) + cell.place(state_.step, length);
  }

  void publish();
  void await();
  /// A whole round: publish and await.
  void round() {
    publish();
    await();
  }

  /// Throw if the group has stopped. Called at the end of an operation that reads peers' memory: a peer
  /// that raised may have changed memory before all ranks had read it.
  void check_stopped() const;
  /// Throw if the group has stopped or the deadline has passed, even if no wait is needed.
  void check_deadline() const;

  /// Bytes of the longest message that one rank sends to another; known after the first round.
  uint64_t longest_bytes() const { return longest_bytes_; }
  const std::vector<double>& factors() const { return state_.peers.factors; }
  std::vector<const void*>& sources() { return state_.sources; }

  /// True if all memory that ranks read from each other lies in arenas; known after the first round.
  bool readable_in_place() const;
  /// True if every rank's inputs and outputs lie in arenas.
  bool all_in_place() const;
  /// Bytes [offset, offset + bytes) of a peer's inputs or outputs in its arena.
  const char* input_of(int peer, size_t offset, size_t bytes) const {
    return in_arena(peer, state_.peers.inputs[peer], offset, bytes);
  }
  char* output_of(int peer, size_t offset, size_t bytes) const {
    return in_arena(peer, state_.peers.outputs[peer], offset, bytes);
  }

  /// True if ranks read messages of this length from the senders' memory. Equal on all ranks, without an
  /// exchange.
  bool shows(uint64_t bytes) const { return read_.contains(bytes); }
  /// True if some message is read so; known after the first round.
  bool shows_any() const { return state_.peers.shows_any; }
  /// Bytes of the longest message that is not read so; known after the first round.
  uint64_t longest_unread_bytes() const { return state_.peers.longest_unread_bytes; }
  /// True if all ranks can and will read shown buffers; known after the first round.
  bool agreed_to_read() const;
  /// Show a buffer to peers in the next round: as the `index`th, at an offset of the slot.
  void show(size_t cell_offset, size_t index, const Buffer& buffer) const;
  /// The buffer that a peer showed in the current round.
  ShownBuffer shown(int peer, size_t cell_offset, size_t index) const;
  /// A round in which each rank tells all ranks a number.
  std::vector<uint64_t> tell(uint64_t number);
  /// The length of outputs from which on they are written past the caches.
  uint64_t streamed_from() const {
    if (rooted(operation.kind)) return tunables().streamed_rooted;
    return operation.kind == OpKind::kAllToAll ? tunables().streamed_all_to_all
                                               : tunables().streamed_all_gather;
  }
  OutboxStores& stores() const { return state_.stores; }
  PeerMemory& memory() const { return context_.memory; }
  const Tunables& tunables() const { return segment_.tunables(); }

  const Operation& operation;
  const int rank;
  const int size;
  const size_t slot_bytes;

 private:
  void publish_header();
  void use_interlude();
  unsigned parity(unsigned ahead) const { return (state_.step + ahead) & 1; }
  SizeRange lengths_to_read(const ReadingFlags& reading) const;
  bool prefers_outboxes() const;
  OperationHeader& header(int of, unsigned which) const {
    return segment_.control(of).headers[which];
  }
  bool arrived(int peer) const { return header(peer, parity(0)).step.load() >= state_.step; }
  bool all_arrived(int& next) const;
  std::optional<Fault> fault_while_waiting(bool check_processes) const;
  char* in_arena(int peer, uint64_t position, size_t offset, size_t bytes) const;
  Fault timeout_fault(const std::vector<int>& missing) const;

  RankContext& context_;
  const Segment& segment_;
  RoundState& state_;
  const WaitOptions& options_;
  const std::atomic<bool>& cancelled_;
  const uint64_t first_step_;
  const SizeRange read_;
  const CallForm form_;
  uint64_t longest_bytes_ = 0;
};

}  // namespace tilework
