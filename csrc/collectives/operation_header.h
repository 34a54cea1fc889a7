// The header of an operation. With the first round, each rank publishes a header of the operation that
// it called. Every rank compares all headers, so that all ranks find a mismatch, and the same mismatch.
//
// In the gathering and scattering kinds sizes may differ by rank. A rank whose messages all have
// one size marks its header as uniform (the usual case costs nothing); any other rank publishes a
// byte-count table: the bytes it sends to and expects from each rank. All ranks then compare all
// pairs, and learn the longest message, which determines the number of rounds.
#pragma once

#include <algorithm>
#include <vector>

#include "collectives/operation.h"
#include "transport/segment.h"

namespace tilework {

/// An OperationHeader by value.
struct Call {
  uint64_t sequence, signature, bytes, label, provenance;
  double factor;
  uint64_t input, output;  // see OperationHeader

  unsigned kind() const { return signature & 0xff; }
  unsigned dtype() const { return signature >> 8 & 0xff; }
  unsigned reduce_op() const { return signature >> 16 & 0xff; }
  bool ragged() const { return signature >> 24 & 1; }
  bool reads_peers() const { return signature >> 25 & 1; }
  bool shares_process() const { return signature >> 26 & 1; }
  bool prefers_outboxes() const { return signature >> 27 & 1; }
  bool in_header() const { return signature >> 28 & 1; }
  bool has_details() const { return signature >> 29 & 1; }
  int root() const { return static_cast<int>(signature >> 32); }
};

Call read_call(const OperationHeader& header);

/// A rank's flags about reading peers' memory; see peer_memory.h.
struct ReadingFlags {
  bool reads_peers = false;       // the rank can read the memory of every peer
  bool shares_process = false;    // with all peers
  bool prefers_outboxes = false;  // for this operation
};

/// For each rank: the premul_sum factor, and the places of buffers in the rank's arena. For all ranks
/// together: the memory that they can read.
struct PeerBuffers {
  explicit PeerBuffers(int size) : factors(size, 1), inputs(size), outputs(size), in_header(size) {}
  std::vector<double> factors;
  std::vector<uint64_t> inputs, outputs;  // arena positions, as in OperationHeader
  bool has_details = false;               // false: factors are 1, and no buffer lies in an arena
  std::vector<char> in_header;        // 1: the rank's data lies in the header, not in the outbox
  ReadingFlags reading;               // what all ranks can; what any rank prefers
  bool shows_any = false;             // some message is of a length to be read
  uint64_t longest_unread_bytes = 0;  // of messages that are not read so

  void note(uint64_t message_bytes, const SizeRange& read) {
    if (read.contains(message_bytes))
      shows_any = true;
    else
      longest_unread_bytes = std::max(longest_unread_bytes, message_bytes);
  }
};

/// The form of a rank's call, by sizes.
struct CallForm {
  bool uneven;     // sizes differ: see above
  bool in_header;  // all data that this rank sends fits the header
};
/// Messages of lengths in `read` are only shown.
CallForm form_of(const Operation& operation, int size, const SizeRange& read);

/// Write this rank's header of the round `step`, with `data`, and the byte-count table if sizes differ.
void publish_call(const Operation& operation, const Segment& segment, int rank, uint64_t step,
                  const CallForm& form, const ReadingFlags& reading, const char* data);

/// The longest message that one rank sends to another, in bytes, from all ranks' headers of this
/// round; throws Fault("mismatch") where they disagree. Fills in `peers`; messages of
/// lengths in `read` are to be read from their senders' memory.
uint64_t compare_headers(const Segment& segment, int rank, unsigned parity, const SizeRange& read,
                         PeerBuffers& peers);

}  // namespace tilework
