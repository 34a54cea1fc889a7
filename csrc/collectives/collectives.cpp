// Algorithms, for N ranks and n bytes per rank. Each round moves at most slot_bytes per rank, a
// size that stays in the second-level cache, so that a byte goes through the memory bus when it is
// read from the input and when it is written to the output, not in between.
//
//   kinds                     rounds                 bytes written + read per rank
//   barrier                   1                      none
//   all_reduce, small         1                      n + N n
//   all_reduce, large         n / slot + 1           n + 2 n (see reduce_chunked)
//   scan, exscan              n / slot               n + the inputs of the ranks before
//   broadcast                 n / piece              own, or all that is received
//   all_gather, gather        longest / slot         own + all that is received
//   scatter, all_to_all,      longest (N-1) / slot   all that is sent + all that is received
//   reduce_scatter
//
// The large all_reduce is the reduce-scatter and all-gather of R. Rabenseifner, "Optimization of
// Collective Reduction Operations" (2004), with both halves pipelined over chunks.
#include "collectives/collectives.h"

#include <algorithm>

#include "collectives/routes.h"
#include "collectives/single_copy.h"
#include "collectives/strided_copy.h"

namespace tilework {
namespace {

// ---- operations that move data ---------------------------------------------------------------

void write_slot(const Exchange& x, const Routes& routes, size_t offset) {
  const int last = routes.split() ? x.size : 1;
  for (int i = 0; i < last; ++i) {
    const int peer = routes.split() ? i : (x.rank + 1) % x.size;
    if (peer == x.rank) continue;
    const Buffer from = routes.outgoing(peer);
    const Cell cell = routes.cell(x.rank, peer);
    const size_t bytes = bytes_of(from, offset, routes.cell_bytes());
    if (!routes.read_from_peer(from))
      x.stores().put(bytes, [&](bool streamed) {
        copy_rows({x.slot(cell, bytes), bytes}, 0, from, offset, bytes, streamed);
      });
    else if (offset == 0)
      x.show(cell.offset, routes.shown_index(peer), from);
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
    if (routes.read_from_peer(to)) continue;
    const size_t bytes = bytes_of(to, offset, routes.cell_bytes());
    const char* from = x.slot_of(peer, routes.cell(peer, x.rank), bytes);
    copy_rows(to, offset, {const_cast<char*>(from), bytes}, 0, bytes, routes.streamed());
  }
}

/// Read everything from `offset` on from the buffers of peers. If peers send different data to each
/// rank, the inputs are contiguous and of equal size.
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

/// Read all shown messages from the senders' memory; false if that failed for any reason.
bool read_shown(const Exchange& x, const Routes& routes) {
  PeerMemory::Reading reading(x.memory());
  for (int i = 1; i < x.size; ++i) {
    const int peer = (x.rank + i) % x.size;
    const Buffer to = routes.incoming(peer);
    if (!routes.read_from_peer(to)) continue;
    const ShownBuffer from =
        x.shown(peer, routes.cell(peer, x.rank).offset, routes.shown_index(x.rank));
    if (!reading.copy(peer, from, 0, to, routes.streamed())) break;
  }
  return reading.finish();
}

/// Finish an operation with shown messages, after the first round, by reading them. False if a rank
/// could not read: then all ranks begin again without shown messages.
bool finish_by_reading(Exchange& x, const Routes& routes) {
  const size_t cell = routes.cell_bytes();
  if (x.readable_in_place()) {
    read_in_place(x, routes, 0);
    copy_own(x, routes, cell, SIZE_MAX);
    x.round();
    x.check_stopped();
    return true;
  }
  if (!x.agreed_to_read()) return false;
  const uint64_t longest_unread = x.longest_unread_bytes();
  const bool done = read_shown(x, routes);  // now: later rounds overwrite the shown buffers
  read_slots(x, routes, 0);
  for (size_t offset = cell; offset < longest_unread; offset += cell) {
    write_slot(x, routes, offset);
    x.round();
    read_slots(x, routes, offset);
  }
  copy_own(x, routes, cell, SIZE_MAX);
  return all_read(x, done);
}

/// broadcast, all_gather, gather, scatter, all_to_all. Own parts are copied while peers arrive.
/// The first round always uses the outboxes: only after it ranks know that the rest need not.
void move_data(Exchange& x) {
  Routes routes(x);
  const size_t cell = routes.cell_bytes();
  size_t offset = 0;
  bool in_place;
  do {
    if (offset > 0 && routes.idle(offset)) x.check_deadline();
    write_slot(x, routes, offset);
    x.publish();
    copy_own(x, routes, offset, cell);
    x.await();
    if (offset == 0 && x.shows_any()) {
      if (finish_by_reading(x, routes)) return;
      routes.use_outboxes();
      write_slot(x, routes, 0);
      x.round();
    }
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

}  // namespace

void reduce_blocks(Exchange& x, char* to, size_t bytes, int begin, int end) {
  auto& sources = x.sources();
  if (end < 0) end = x.size;
  for (size_t done = 0; done < bytes; done += kBlock) {
    const size_t block = std::min(kBlock, bytes - done);
    x.operation.reduction(to + done, sources.data() + begin, x.factors().data() + begin,
                          end - begin, elements(x.operation, block));
    for (auto& source : sources) source = static_cast<const char*>(source) + block;
  }
}

namespace {

/// Reduce everything from `offset` on, straight from the inputs of peers.
void reduce_scatter_in_place(Exchange& x, size_t offset) {
  const Buffer output = x.operation.outputs[0], rest = slice(output, offset, SIZE_MAX);
  for (int peer = 0; peer < x.size; ++peer)
    x.sources()[peer] = peer == x.rank
                            ? x.operation.inputs[peer].data + offset
                            : x.input_of(peer, x.rank * output.bytes + offset, rest.bytes);
  reduce_blocks(x, rest.data, rest.bytes);
  x.round();
  x.check_stopped();
}

void reduce_scatter(Exchange& x) {
  Routes routes(x);
  const size_t cell = routes.cell_bytes();
  size_t offset = 0, done = 0;
  do {
    if (offset > 0 && routes.idle(offset)) x.check_deadline();
    write_slot(x, routes, offset);
    x.round();
    if (offset == 0 && x.shows_any()) {
      if (x.readable_in_place()) return reduce_scatter_in_place(x, 0);
      const bool shows_all = x.longest_unread_bytes() == 0;
      if (shows_all && x.agreed_to_read() && reduce_scatter_by_reading(x, routes, done)) return;
      routes.use_outboxes();
      write_slot(x, routes, 0);
      x.round();
    }
    const size_t skip = std::min(cell, done > offset ? done - offset : 0);
    const Buffer output = x.operation.outputs[0];
    const Buffer result = slice(output, offset + skip, cell - skip);
    const size_t shown = bytes_of(output, offset, cell);
    for (int peer = 0; peer < x.size; ++peer)
      x.sources()[peer] = peer == x.rank ? x.operation.inputs[peer].data + offset + skip
                                         : x.slot_of(peer, routes.cell(peer, x.rank), shown) + skip;
    reduce_blocks(x, result.data, result.bytes);
    offset += cell;
    if (offset < x.longest_bytes() && x.readable_in_place())
      return reduce_scatter_in_place(x, offset);
  } while (offset < x.longest_bytes());
}

/// Copy into this rank's outbox.
void put(const Exchange& x, char* to, const Buffer& from) {
  x.stores().put(from.bytes, [&](bool streamed) {
    (streamed ? copy_streaming : copy)(to, from.data, from.bytes);
  });
}

/// Reduce in one round: every rank publishes the input; ranks that want the result reduce all inputs.
void reduce_one_shot(Exchange& x, const Buffer& input, char* output) {
  const Cell cell = {0, x.slot_bytes};
  if (x.size > 1) put(x, x.slot(cell, input.bytes), input);  // alone, an input may exceed a slot
  x.round();
  if (!output) return;
  for (int peer = 0; peer < x.size; ++peer)
    x.sources()[peer] = peer == x.rank ? input.data : x.slot_of(peer, cell, input.bytes);
  reduce_blocks(x, output, input.bytes);
}

/// The split of a long reduction into chunks, one per round, and of a chunk into parts, one per
/// owner.
struct ReductionChunks {
  ReductionChunks(size_t bytes_, int size, size_t chunk_bytes)
      : bytes(bytes_), cell(align_down(chunk_bytes / size)) {
    chunks = ceil_div(bytes, cell * size);
    chunk = round_up(ceil_div(ceil_div(bytes, chunks), size), kLine) * size;  // equal chunks
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
  const size_t share = round_up(ceil_div(rest, x.size), kLine);
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
    reduce_blocks(x, result + done, block);
    for (char* copy_to : copies) copy(copy_to + done, result + done, block);
  }
}

}  // namespace

/// Each rank owns a part of each chunk. In round t it publishes its contributions to chunk t, for
/// their owners, and its finished part of chunk t - 1; then it reduces its part of chunk t, copies that
/// into its slot for the next round, and copies the others' parts of chunk t - 1 out.
/// If all buffers prove to lie in arenas, the first chunk is also the last, and each rank reduces
/// its share of the rest in place, into every rank's output.
/// `output` is null on ranks that do not want the result.
void reduce_chunked(Exchange& x, const Buffer& input, char* output) {
  ReductionChunks plan(input.bytes, x.size, x.tunables().reduce_chunk_bytes);
  const Cell whole = {0, x.slot_bytes};
  const auto slot = [&] { return x.slot(whole, plan.chunk); };
  const auto slot_of = [&](int peer) { return x.slot_of(peer, whole, plan.chunk); };
  bool in_place = false;
  for (size_t t = 0; t <= plan.chunks; ++t) {
    for (int owner = 0; t < plan.chunks && owner < x.size; ++owner) {
      const Buffer part = plan.of(input.data, t, owner);
      if (owner != x.rank) put(x, slot() + owner * plan.part, part);
    }
    x.round();
    if (t < plan.chunks) {
      const Buffer mine = plan.of(input.data, t, x.rank);
      for (int peer = 0; peer < x.size; ++peer)
        x.sources()[peer] = peer == x.rank ? mine.data : slot_of(peer) + x.rank * plan.part;
      char* const finished = slot() + x.rank * plan.part;
      char* const own = output ? plan.of(output, t, x.rank).data : nullptr;
      // Outboxes are filled by copies. Peers have read these lines: memcpy's stores take them away from the
      // peers' caches, and a reduction's also fetch what they overwrite: 105 µs instead of 55 for 1 MiB.
      reduce_blocks(x, own ? own : finished, mine.bytes);
      if (own) put(x, finished, {own, mine.bytes});
      if (plan.chunks > 1 && x.operation.kind == OpKind::kAllReduce && x.all_in_place()) {
        reduce_rest_in_place(x, plan.chunk);
        plan.chunks = 1;
        in_place = true;
      }
    }
    for (int i = 1; t > 0 && output && i < x.size; ++i) {
      const int owner = (x.rank + i) % x.size;
      const Buffer part = plan.of(output, t - 1, owner);
      copy(part.data, slot_of(owner) + owner * plan.part, part.bytes);
    }
  }
  if (in_place) x.check_stopped();
}

namespace {

/// all_reduce and reduce.
void reduce(Exchange& x) {
  const Buffer input = x.operation.inputs[0];
  char* output = x.operation.outputs.count > 0 ? x.operation.outputs[0].data : nullptr;
  const size_t one_shot = x.tunables().one_shot_bytes * 2 / x.size;  // each rank reduces all inputs
  if (x.operation.kind == OpKind::kAllReduce && x.shows(input.bytes)) {
    show_reduction(x, input, output);
    x.round();
    if (x.all_in_place()) {
      reduce_rest_in_place(x, 0);
      x.round();
      return x.check_stopped();
    }
    if (x.agreed_to_read()) return all_reduce_by_reading(x, input, output);
  }
  if (x.size == 1 || input.bytes <= std::min(one_shot, x.slot_bytes))
    reduce_one_shot(x, input, output);
  else
    reduce_chunked(x, input, output);
}

/// scan and exscan: each rank publishes the input, and reduces the inputs of the ranks from the root to
/// itself; an exscan leaves out the own input, and leaves the root's output as it is.
void scan(Exchange& x) {
  const Buffer input = x.operation.inputs[0], output = x.operation.outputs[0];
  const int own = x.operation.kind == OpKind::kScan ? 1 : 0;
  const bool upwards = x.operation.root == 0;
  const int begin = upwards ? 0 : x.rank + 1 - own, end = upwards ? x.rank + own : x.size;
  const Cell cell = {0, x.slot_bytes};
  size_t offset = 0;
  do {
    const Buffer mine = slice(input, offset, x.slot_bytes);
    if (x.size > 1) put(x, x.slot(cell, mine.bytes), mine);
    x.round();
    for (int peer = 0; peer < x.size; ++peer)
      x.sources()[peer] = peer == x.rank ? mine.data : x.slot_of(peer, cell, mine.bytes);
    if (begin < end) reduce_blocks(x, output.data + offset, mine.bytes, begin, end);
    offset += x.slot_bytes;
  } while (offset < input.bytes);
}

void run(Exchange& x) {
  switch (x.operation.kind) {
    case OpKind::kBarrier: return x.round();
    case OpKind::kAllReduce:
    case OpKind::kReduce: return reduce(x);
    case OpKind::kScan:
    case OpKind::kExscan: return scan(x);
    case OpKind::kReduceScatter: return reduce_scatter(x);
    default: return move_data(x);
  }
}

/// The bytes of a rank's inputs, or of the outputs without inputs.
size_t payload_bytes(const Operation& operation) {
  const Buffers& side = operation.inputs.count > 0 ? operation.inputs : operation.outputs;
  size_t bytes = 0;
  for (int i = 0; i < side.count; ++i) bytes += side[i].bytes;
  return bytes;
}

/// Add to a counter that only the executing thread changes.
void count(std::atomic<uint64_t>& total, uint64_t more) {
  total.store(total.load(std::memory_order_relaxed) + more, std::memory_order_relaxed);
}

}  // namespace

void Collectives::execute(const Operation& operation, const WaitOptions& options) {
  if (cause_) throw *cause_;
  if (auto fault = context_.stop_fault()) throw *fault;
  if (operation.sequence > 1 && context_.size > 1) context_.memory.try_peers();  // all have joined
  try {
    Exchange exchange(context_, state_, operation, options, cancelled_);
    run(exchange);
  } catch (const Fault& fault) {
    cause_ = fault;
    end_failed(operation);
    throw;
  } catch (const Interrupted&) {
    cause_ = Fault("aborted", {context_.rank}, "a signal interrupted an operation of this rank");
    end_failed(operation);
    throw;
  }
  count(context_.operations, 1);
  count(context_.bytes, payload_bytes(operation));
}

/// Return the buffers to the caller: late peers must no longer read them, or write to the outputs.
void Collectives::end_failed(const Operation& operation) {
  context_.memory.give_up();
  for (int i = 0; operation.kind == OpKind::kAllReduce && i < operation.outputs.count; ++i)
    context_.segment.detach(operation.outputs[i].data, operation.outputs[i].bytes);
}

void Collectives::cancel() {
  cancelled_.store(true);
  context_.segment.control(context_.rank).round_event.notify_always();
}

}  // namespace tilework
