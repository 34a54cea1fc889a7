#include "collectives/single_copy.h"

#include <algorithm>

#include "transport/copy.h"

namespace tilework {
namespace {

/// A number that memory holds by intent only.
constexpr uint64_t kAllRead = 0x64616572206c6c61;

/// The split of a reduction's bytes among the ranks.
struct Shares {
  Shares(size_t bytes_, int size) : bytes(bytes_), each(round_up(ceil_div(bytes_, size), kLine)) {}
  size_t begin(int rank) const { return std::min(bytes, rank * each); }
  size_t length(int rank) const { return std::min(bytes, begin(rank) + each) - begin(rank); }
  size_t bytes, each;
};

/// Reduces what peers show, by their rank, of which this rank's own part is at `own`.
class ReadReduction {
 public:
  ReadReduction(Exchange& x, std::vector<ShownBuffer> shown, size_t begin, const char* own)
      : x_(x),
        shown_(std::move(shown)),
        begin_(begin),
        own_(own),
        block_(std::max(kBlock, align_down(x.tunables().reduce_chunk_bytes / x.size))),
        scratch_(x.memory().all_local() ? nullptr : x.memory().scratch(block_ * x.size)) {}

  /// Reduce `length` bytes into `to`. The bytes that are right; less than all if a peer's memory
  /// could not be read, or was given up meanwhile.
  size_t run(char* to, size_t length) {
    PeerMemory::Reading reading(x_.memory());
    size_t done = 0;
    while (done < length) {
      const size_t bytes = std::min(block_, length - done);
      if (!fetch(reading, done, bytes)) break;
      reduce_blocks(x_, to + done, bytes);
      done += bytes;
    }
    // After a peer gave up the result is worth nothing, nor is what outboxes would make of it.
    return reading.finish() ? done : std::min(done, length > 0 ? length - 1 : 0);
  }

 private:
  bool fetch(PeerMemory::Reading& reading, size_t done, size_t bytes) {
    for (int peer = 0; peer < x_.size; ++peer) {
      char* scratch = scratch_ ? scratch_ + peer * block_ : nullptr;
      const char* from = peer == x_.rank
                             ? own_ + done
                             : reading.fetch(peer, shown_[peer], begin_ + done, bytes, scratch);
      if (!from) return false;
      x_.sources()[peer] = from;
    }
    return true;
  }

  Exchange& x_;
  const std::vector<ShownBuffer> shown_;
  const size_t begin_;
  const char* own_;
  const size_t block_;
  char* scratch_;
};

/// Copy bytes that one rank has to all others, through the outboxes.
void show_to_all(Exchange& x, int owner, char* data, size_t bytes) {
  const size_t chunk = x.tunables().chunk_bytes;
  for (size_t offset = 0; offset < bytes; offset += chunk) {
    const size_t piece = std::min(chunk, bytes - offset);
    if (x.rank == owner) copy(x.slot(), data + offset, piece);
    x.round();
    if (x.rank != owner) copy(data + offset, x.slot_of(owner), piece);
  }
}

/// The parts of an all_reduce that reading has not brought everywhere: of each rank's share, `done`
/// bytes are reduced, in its own output.
void finish_through_outboxes(Exchange& x, const Buffer& input, char* output,
                             const std::vector<uint64_t>& done) {
  const Shares shares(input.bytes, x.size);
  const size_t item = kItemBytes[static_cast<size_t>(x.operation.dtype)];
  for (int owner = 0; owner < x.size; ++owner) {
    const size_t begin = shares.begin(owner), length = shares.length(owner);
    const size_t ready = std::min<uint64_t>(done[owner], length) / item * item;
    show_to_all(x, owner, output + begin, ready);
    const Buffer rest = slice({input.data, begin + length}, begin + ready, length - ready);
    if (rest.bytes > 0) reduce_chunked(x, rest, output + begin + ready);
  }
}

/// Read the peers' finished shares; false if that failed.
bool read_shares(Exchange& x, const std::vector<ShownBuffer>& outputs, const Shares& shares,
                 char* output) {
  const bool streamed = shares.bytes >= x.streamed_from();
  PeerMemory::Reading reading(x.memory());
  for (int i = 1; i < x.size; ++i) {
    const int owner = (x.rank + i) % x.size;
    const Buffer to = {output + shares.begin(owner), shares.length(owner)};
    if (!reading.copy(owner, outputs[owner], shares.begin(owner), to, streamed)) break;
  }
  return reading.finish();
}

std::vector<ShownBuffer> all_shown(const Exchange& x, size_t index) {
  std::vector<ShownBuffer> shown;
  for (int peer = 0; peer < x.size; ++peer)
    shown.push_back(x.shown(peer, index * sizeof(ShownBuffer), index));
  return shown;
}

}  // namespace

bool all_read(Exchange& x, bool done) {
  for (const uint64_t answer : x.tell(done ? kAllRead : 0))
    if (answer != kAllRead) return false;
  return true;
}

void show_reduction(const Exchange& x, const Buffer& input, char* output) {
  x.show(0, 0, input);
  x.show(sizeof(ShownBuffer), 1, {output, input.bytes});
}

void all_reduce_by_reading(Exchange& x, const Buffer& input, char* output) {
  const Shares shares(input.bytes, x.size);
  const auto outputs = all_shown(x, 1);  // now: later rounds overwrite what peers showed
  const size_t begin = shares.begin(x.rank), length = shares.length(x.rank);
  ReadReduction reduction(x, all_shown(x, 0), begin, input.data + begin);
  const std::vector<uint64_t> done = x.tell(reduction.run(output + begin, length));
  bool all_done = true;
  for (int rank = 0; rank < x.size; ++rank) all_done &= done[rank] == shares.length(rank);
  if (all_done && all_read(x, read_shares(x, outputs, shares, output))) return;
  finish_through_outboxes(x, input, output, done);
}

bool reduce_scatter_by_reading(Exchange& x, const Routes& routes, size_t& done) {
  const Buffer output = x.operation.outputs[0];
  std::vector<ShownBuffer> shown(x.size);
  for (int peer = 0; peer < x.size; ++peer)
    if (peer != x.rank) shown[peer] = x.shown(peer, routes.cell(peer, x.rank).offset, x.rank);
  ReadReduction reduction(x, std::move(shown), 0, x.operation.inputs[x.rank].data);
  done = reduction.run(output.data, output.bytes);
  return all_read(x, done == output.bytes);
}

}  // namespace tilework
