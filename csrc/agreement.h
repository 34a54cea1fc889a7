// Whether all ranks called the same operation. Each publishes a header with its first round; all
// compare all headers, so that every rank sees a mismatch, and all see the same one.
//
// In the gathering and scattering kinds sizes may differ by rank. A rank whose pieces all have
// one size says so in its header ("uniform": the usual case costs nothing); any other rank
// publishes a table: what it sends to and expects from each rank. All ranks then compare all
// pairs, and learn the longest piece, which tells how many rounds there are.
#pragma once

#include <vector>

#include "operation.h"
#include "segment.h"

namespace tilework {

/// An OperationHeader by value.
struct Call {
  uint64_t sequence, what, bytes, label;
  double factor;
  uint64_t input, output;  // see OperationHeader

  unsigned kind() const { return what & 0xff; }
  unsigned dtype() const { return what >> 8 & 0xff; }
  unsigned reduce_op() const { return what >> 16 & 0xff; }
  bool ragged() const { return what >> 24 & 1; }
  int root() const { return static_cast<int>(what >> 32); }
};

Call read_call(const OperationHeader& header);

/// What each rank brings along that may differ.
struct PeerBuffers {
  explicit PeerBuffers(int size) : factors(size), inputs(size), outputs(size) {}
  std::vector<double> factors;
  std::vector<uint64_t> inputs, outputs;  // places in the ranks' arenas, as in OperationHeader
};

/// Write this rank's header, and its table where it needs one.
void publish_call(const Operation& operation, const Segment& segment, int rank, unsigned parity);

/// Read all ranks' headers of the same round and return the longest piece that one rank sends to
/// another, in bytes; throws Fault("mismatch") where they disagree. Fills in the terms.
uint64_t agree(const Segment& segment, int rank, unsigned parity, PeerBuffers& peers);

}  // namespace tilework
