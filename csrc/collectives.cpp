// Algorithms, for N ranks and n bytes per rank. Each round moves at most slot_bytes per rank, a
// size that stays in the second-level cache, so that a byte goes through the memory bus when it is
// read from the input and when it is written to the output, not in between.
//
//   kinds                     rounds                 bytes written + read per rank
//   barrier                   1                      none
//   all_reduce, small         1                      n + N n
//   all_reduce, large         n / slot + 1           n + 2 n (see reduce_chunked)
//   broadcast, all_gather,    longest / slot         own + all that is received
//   gather
//   scatter, all_to_all,      longest (N-1) / slot   all that is sent + all that is received
//   reduce_scatter
//
// The large all_reduce is the reduce-scatter and all-gather of R. Rabenseifner, "Optimization of
// Collective Reduction Operations" (2004), with both halves pipelined over chunks.
#include "collectives.h"

#include <algorithm>

#include "strided_copy.h"

namespace tilework {
namespace {

constexpr size_t kBlock = 16 * 1024;  // fits the first-level cache twice

size_t align_down(size_t n) { return n / kLine * kLine; }
size_t align_up(size_t n) { return (n + kLine - 1) / kLine * kLine; }
size_t ceil_div(size_t n, size_t by) { return (n + by - 1) / by; }

/// The number of bytes of [offset, offset + length) that a buffer has.
size_t bytes_of(const Buffer& buffer, size_t offset, size_t length) {
  return offset >= buffer.bytes ? 0 : std::min(length, buffer.bytes - offset);
}

/// Bytes [offset, offset + length) of a dense buffer, as far as it has them.
Buffer slice(const Buffer& buffer, size_t offset, size_t length) {
  if (offset >= buffer.bytes) return {buffer.data, 0};
  return {buffer.data + offset, std::min(length, buffer.bytes - offset)};
}

size_t elements(const Operation& operation, size_t bytes) {
  return bytes / kItemBytes[static_cast<size_t>(operation.dtype)];
}

// ---- operations that move data ---------------------------------------------------------------

/// The buffers that this rank sends to and receives from each peer.
class Routes {
 public:
  explicit Routes(const Exchange& x) : x_(x), operation_(x.operation) {
    size_t bytes = 0;
    for (int i = 0; i < operation_.outputs.count; ++i) {
      bytes += operation_.outputs[i].bytes;
      longest_own_ = std::max(longest_own_, operation_.outputs[i].bytes);
    }
    for (int i = 0; i < operation_.inputs.count; ++i)
      longest_own_ = std::max(longest_own_, operation_.inputs[i].bytes);
    streamed_ = bytes >= kStreamedBytes;
  }

  /// True if from here on only other ranks have data to exchange. How much, only their byte-count
  /// tables tell, which may be garbage: a rank takes part in such rounds until its deadline.
  bool idle(size_t offset) const { return offset >= longest_own_; }

  /// True if outputs are too long to stay in a cache.
  bool streamed() const { return streamed_; }

  /// True if peers get different data, so that the slot is divided among them.
  bool split() const {
    return operation_.kind == OpKind::kScatter || operation_.kind == OpKind::kAllToAll ||
           operation_.kind == OpKind::kReduceScatter;
  }
  size_t cell_bytes() const {
    return split() ? align_down(x_.slot_bytes / std::max(1, x_.size - 1)) : x_.slot_bytes;
  }
  /// The offset in the slot of `from` of the data for `to`.
  size_t cell(int from, int to) const { return split() ? (to - (to > from)) * cell_bytes() : 0; }

  Buffer outgoing(int peer) const {
    switch (operation_.kind) {
      case OpKind::kBroadcast: return root() ? operation_.outputs[0] : Buffer{};
      case OpKind::kAllGather: return operation_.inputs[0];
      case OpKind::kGather: return root() == (peer == x_.rank) ? operation_.inputs[0] : Buffer{};
      case OpKind::kScatter: return root() ? operation_.inputs[peer] : Buffer{};
      default: return operation_.inputs[peer];
    }
  }
  Buffer incoming(int peer) const {
    switch (operation_.kind) {
      case OpKind::kBroadcast: return peer == operation_.root ? operation_.outputs[0] : Buffer{};
      case OpKind::kGather: return root() ? operation_.outputs[peer] : Buffer{};
      case OpKind::kScatter: return peer == operation_.root ? operation_.outputs[0] : Buffer{};
      default: return operation_.outputs[peer];
    }
  }

 private:
  bool root() const { return x_.rank == operation_.root; }

  const Exchange& x_;
  const Operation& operation_;
  size_t longest_own_ = 0;  // the longest message that this rank sends or receives
  bool streamed_;
};

void write_slot(const Exchange& x, const Routes& routes, size_t offset) {
  const int last = routes.split() ? x.size : 1;
  for (int i = 0; i < last; ++i) {
    const int peer = routes.split() ? i : (x.rank + 1) % x.size;
    if (peer == x.rank) continue;
    const Buffer from = routes.outgoing(peer);
    const size_t bytes = bytes_of(from, offset, routes.cell_bytes());
    copy_rows({x.slot() + routes.cell(x.rank, peer), bytes}, 0, from, offset, bytes, false);
  }
}

void copy_own(const Exchange& x, const Routes& routes, size_t offset, size_t length) {
  const Buffer from = routes.outgoing(x.rank), to = routes.incoming(x.rank);
  if (from.data == to.data && from.stride_bytes == to.stride_bytes) return;  // in place
  copy_rows(to, offset, from, offset, bytes_of(from, offset, length), routes.streamed());
}

void read_slots(const Exchange& x, const Routes& routes, size_t offset) {
  for (int i = 1; i < x.size; ++i) {
    const int peer = (x.rank + i) % x.size;  // each rank starts elsewhere
    const Buffer to = routes.incoming(peer);
    const size_t bytes = bytes_of(to, offset, routes.cell_bytes());
    char* from = const_cast<char*>(x.slot_of(peer)) + routes.cell(peer, x.rank);
    copy_rows(to, offset, {from, bytes}, 0, bytes, routes.streamed());
  }
}

/// Read everything from `offset` on from the buffers of peers. Where they send different data to
/// each rank, their inputs are contiguous and of equal size.
void read_in_place(const Exchange& x, const Routes& routes, size_t offset) {
  for (int i = 1; i < x.size; ++i) {
    const int peer = (x.rank + i) % x.size;
    const Buffer to = routes.incoming(peer);
    const size_t bytes = bytes_of(to, offset, SIZE_MAX);
    if (bytes == 0) continue;
    const size_t at = offset + (routes.split() ? x.rank * to.bytes : 0);
    const bool broadcast = x.operation.kind == OpKind::kBroadcast;
    const char* from = broadcast ? x.output_of(peer, at, bytes) : x.input_of(peer, at, bytes);
    copy_rows(to, offset, {const_cast<char*>(from), bytes}, 0, bytes, routes.streamed());
  }
}

/// broadcast, all_gather, gather, scatter, all_to_all. Own parts are copied while peers arrive.
/// The first round goes through the outboxes even where the rest need not: only then is it known.
void move_data(Exchange& x) {
  const Routes routes(x);
  const size_t cell = routes.cell_bytes();
  size_t offset = 0;
  bool in_place;
  do {
    if (offset > 0 && routes.idle(offset)) x.check_deadline();
    write_slot(x, routes, offset);
    x.publish();
    copy_own(x, routes, offset, cell);
    x.await();
    read_slots(x, routes, offset);
    offset += cell;
    in_place = offset < x.longest_bytes() && x.readable_in_place();
  } while (offset < x.longest_bytes() && !in_place);
  if (in_place) read_in_place(x, routes, offset);
  copy_own(x, routes, offset, SIZE_MAX);
  if (!in_place) return;
  x.round();  // peers have now read what this rank may change next
  x.check_stopped();
}

// ---- operations that reduce ------------------------------------------------------------------

/// Reduce `bytes` bytes at sources() into `to`, and also into `copy_to` unless that is null,
/// block by block so that the copy reads from the first-level cache.
void reduce_blocks(Exchange& x, char* to, char* copy_to, size_t bytes) {
  auto& sources = x.sources();
  for (size_t done = 0; done < bytes; done += kBlock) {
    const size_t block = std::min(kBlock, bytes - done);
    x.operation.reduction(to + done, sources.data(), x.factors().data(), x.size,
                          elements(x.operation, block));
    if (copy_to) copy(copy_to + done, to + done, block);
    for (auto& source : sources) source = static_cast<const char*>(source) + block;
  }
}

/// Reduce everything from `offset` on, straight from the inputs of peers.
void reduce_scatter_in_place(Exchange& x, size_t offset) {
  const Buffer output = x.operation.outputs[0], rest = slice(output, offset, SIZE_MAX);
  for (int peer = 0; peer < x.size; ++peer)
    x.sources()[peer] = peer == x.rank
                            ? x.operation.inputs[peer].data + offset
                            : x.input_of(peer, x.rank * output.bytes + offset, rest.bytes);
  reduce_blocks(x, rest.data, nullptr, rest.bytes);
  x.round();
  x.check_stopped();
}

void reduce_scatter(Exchange& x) {
  const Routes routes(x);
  const size_t cell = routes.cell_bytes();
  size_t offset = 0;
  do {
    if (offset > 0 && routes.idle(offset)) x.check_deadline();
    write_slot(x, routes, offset);
    x.round();
    const Buffer result = slice(x.operation.outputs[0], offset, cell);
    for (int peer = 0; peer < x.size; ++peer)
      x.sources()[peer] = peer == x.rank ? x.operation.inputs[peer].data + offset
                                         : x.slot_of(peer) + routes.cell(peer, x.rank);
    reduce_blocks(x, result.data, nullptr, result.bytes);
    offset += cell;
    if (offset < x.longest_bytes() && x.readable_in_place())
      return reduce_scatter_in_place(x, offset);
  } while (offset < x.longest_bytes());
}

/// In a single round: every rank publishes its input, and each rank that wants the result reduces all.
void reduce_one_shot(Exchange& x, const Buffer& input, char* output) {
  if (x.size > 1) copy(x.slot(), input.data, input.bytes);  // alone, it may be larger than a slot
  x.round();
  if (!output) return;
  for (int peer = 0; peer < x.size; ++peer)
    x.sources()[peer] = peer == x.rank ? input.data : x.slot_of(peer);
  reduce_blocks(x, output, nullptr, input.bytes);
}

/// The split of a long reduction into chunks, one per round, and of a chunk into parts, one per
/// owner.
struct ReductionChunks {
  ReductionChunks(size_t bytes_, int size, size_t slot_bytes)
      : bytes(bytes_), cell(align_down(slot_bytes / size)) {
    chunks = ceil_div(bytes, cell * size);
    chunk = align_up(ceil_div(ceil_div(bytes, chunks), size)) * size;  // equal chunks
    part = chunk / size;
  }
  Buffer of(char* data, size_t index, int owner) const {
    const size_t begin = std::min(bytes, index * chunk + owner * part);
    const size_t end = std::min(bytes, begin + part);
    return {data + begin, end - begin};
  }

  size_t bytes, cell, chunks, chunk, part;
};

/// Reduce this rank's share of the bytes from `offset` on into every rank's output.
void reduce_rest_in_place(Exchange& x, size_t offset) {
  const size_t rest = x.operation.inputs[0].bytes - offset;
  const size_t share = align_up(ceil_div(rest, x.size));
  const size_t begin = offset + std::min(rest, x.rank * share);
  const size_t length = std::min(offset + rest, begin + share) - begin;
  char* result = x.operation.outputs[0].data + begin;
  std::vector<char*> copies;
  for (int peer = 0; peer < x.size; ++peer) {
    const bool own = peer == x.rank;
    x.sources()[peer] = own ? x.operation.inputs[0].data + begin : x.input_of(peer, begin, length);
    if (!own) copies.push_back(x.output_of(peer, begin, length));
  }
  for (size_t done = 0; done < length; done += kBlock) {
    const size_t block = std::min(kBlock, length - done);
    reduce_blocks(x, result + done, nullptr, block);
    for (char* copy_to : copies) copy(copy_to + done, result + done, block);
  }
}

/// Each rank owns a part of each chunk. In round t it publishes its contributions to chunk t, for
/// their owners, and its finished part of chunk t - 1; then it reduces its part of chunk t, straight
/// into its slot for the next round, and copies the others' parts of chunk t - 1 out.
/// If all buffers prove to lie in arenas, the first chunk is also the last, and each rank reduces
/// its share of the rest in place, into every rank's output.
/// `output` is null on ranks that do not want the result.
void reduce_chunked(Exchange& x, const Buffer& input, char* output) {
  ReductionChunks plan(input.bytes, x.size, x.slot_bytes);
  bool in_place = false;
  for (size_t t = 0; t <= plan.chunks; ++t) {
    for (int owner = 0; t < plan.chunks && owner < x.size; ++owner) {
      const Buffer part = plan.of(input.data, t, owner);
      if (owner != x.rank) copy(x.slot() + owner * plan.cell, part.data, part.bytes);
    }
    x.round();
    if (t < plan.chunks) {
      const Buffer mine = plan.of(input.data, t, x.rank);
      for (int peer = 0; peer < x.size; ++peer)
        x.sources()[peer] = peer == x.rank ? mine.data : x.slot_of(peer) + x.rank * plan.cell;
      reduce_blocks(x, x.slot() + x.rank * plan.cell,
                    output ? plan.of(output, t, x.rank).data : nullptr, mine.bytes);
      if (plan.chunks > 1 && x.operation.kind == OpKind::kAllReduce && x.all_in_place()) {
        reduce_rest_in_place(x, plan.chunk);
        plan.chunks = 1;
        in_place = true;
      }
    }
    for (int i = 1; t > 0 && output && i < x.size; ++i) {
      const int owner = (x.rank + i) % x.size;
      const Buffer part = plan.of(output, t - 1, owner);
      copy(part.data, x.slot_of(owner) + owner * plan.cell, part.bytes);
    }
  }
  if (in_place) x.check_stopped();
}

/// all_reduce and reduce.
void reduce(Exchange& x) {
  const Buffer input = x.operation.inputs[0];
  char* output = x.operation.outputs.count > 0 ? x.operation.outputs[0].data : nullptr;
  if (x.size == 1 || input.bytes <= std::min(one_shot_limit_bytes(x.size), x.slot_bytes))
    reduce_one_shot(x, input, output);
  else
    reduce_chunked(x, input, output);
}

void run(Exchange& x) {
  switch (x.operation.kind) {
    case OpKind::kBarrier: return x.round();
    case OpKind::kAllReduce:
    case OpKind::kReduce: return reduce(x);
    case OpKind::kReduceScatter: return reduce_scatter(x);
    default: return move_data(x);
  }
}

/// Bytes of a rank's inputs, or if it has none, of its outputs.
size_t payload_bytes(const Operation& operation) {
  const Buffers& side = operation.inputs.count > 0 ? operation.inputs : operation.outputs;
  size_t bytes = 0;
  for (int i = 0; i < side.count; ++i) bytes += side[i].bytes;
  return bytes;
}

}  // namespace

/// A single round saves one; chunks move fewer bytes from three ranks on. Measured.
size_t one_shot_limit_bytes(int size) { return size_t{128} * 1024 / (size <= 2 ? 1 : size); }

void Collectives::execute(const Operation& operation, const WaitOptions& options) {
  if (cause_) throw *cause_;
  if (auto fault = context_.stop_fault()) throw *fault;
  try {
    Exchange exchange(context_, state_, operation, options, cancelled_);
    run(exchange);
  } catch (const Fault& fault) {
    cause_ = fault;
    detach_outputs(operation);
    throw;
  } catch (const Interrupted&) {
    cause_ = Fault("aborted", {context_.rank}, "a signal interrupted an operation of this rank");
    detach_outputs(operation);
    throw;
  }
  context_.operations.fetch_add(1, std::memory_order_relaxed);
  context_.bytes.fetch_add(payload_bytes(operation), std::memory_order_relaxed);
}

/// A peer that is late may yet write to the outputs, which are the caller's again.
void Collectives::detach_outputs(const Operation& operation) {
  for (int i = 0; operation.kind == OpKind::kAllReduce && i < operation.outputs.count; ++i)
    context_.segment.detach(operation.outputs[i].data, operation.outputs[i].bytes);
}

void Collectives::cancel() {
  cancelled_.store(true);
  context_.segment.control(context_.rank).round_event.notify_always();
}

}  // namespace tilework
