#include "collectives/operation_header.h"

#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <map>
#include <string>
#include <tuple>

#include "transport/fault.h"

namespace tilework {
namespace {

constexpr uint64_t kRagged = uint64_t{1} << 24;
constexpr uint64_t kReadsPeers = uint64_t{1} << 25, kSharesProcess = uint64_t{1} << 26,
                   kPrefersOutboxes = uint64_t{1} << 27, kInHeader = uint64_t{1} << 28,
                   kHasDetails = uint64_t{1} << 29;
/// Bits of a signature that ranks need not have alike.
constexpr uint64_t kOwnBits =
    kReadsPeers | kSharesProcess | kPrefersOutboxes | kInHeader | kHasDetails;
constexpr uint64_t kDetailBits = kInHeader | kHasDetails;  // of these, a mix changes nothing else
constexpr int64_t kMostSent = int64_t{1} << 40;      // no host sends more: the table is garbage
constexpr auto relaxed = std::memory_order_relaxed;  // the step counter publishes the headers

uint64_t pack_signature(const Operation& operation, const CallForm& form, bool has_details,
                        const ReadingFlags& reading) {
  return static_cast<uint64_t>(operation.kind) | static_cast<uint64_t>(operation.dtype) << 8 |
         static_cast<uint64_t>(operation.reduce_op) << 16 | (form.uneven ? kRagged : 0) |
         (form.in_header ? kInHeader : 0) | (has_details ? kHasDetails : 0) |
         (reading.reads_peers ? kReadsPeers : 0) | (reading.shares_process ? kSharesProcess : 0) |
         (reading.prefers_outboxes ? kPrefersOutboxes : 0) |
         static_cast<uint64_t>(operation.root) << 32;
}

/// True if this kind of operation sends data from rank `from` to rank `to`.
bool routed(OpKind kind, int root, int from, int to) {
  if (kind == OpKind::kGather) return to == root;
  if (kind == OpKind::kScatter) return from == root;
  return true;
}

/// Bytes that a rank sends to, and expects from, each rank.
struct ByteCounts {
  const Operation& operation;
  int rank;

  int64_t sends(int to) const {
    if (!routed(operation.kind, operation.root, rank, to)) return 0;
    const bool single = operation.kind == OpKind::kAllGather || operation.kind == OpKind::kGather;
    return static_cast<int64_t>(operation.inputs[single ? 0 : to].bytes);
  }
  int64_t expects(int from) const {
    if (!routed(operation.kind, operation.root, from, rank)) return 0;
    const bool single =
        operation.kind == OpKind::kScatter || operation.kind == OpKind::kReduceScatter;
    return static_cast<int64_t>(operation.outputs[single ? 0 : from].bytes);
  }
};

bool all_equal(const Buffers& buffers, size_t bytes) {
  for (int i = 0; i < buffers.count; ++i)
    if (buffers[i].bytes != bytes) return false;
  return true;
}

size_t first_bytes(const Operation& operation) {
  if (operation.inputs.count > 0) return operation.inputs[0].bytes;
  return operation.outputs.count > 0 ? operation.outputs[0].bytes : 0;
}

/// The arena position of one side's buffers if they are contiguous and of equal size, else 0; see
/// OperationHeader.
uint64_t arena_position(const Segment& segment, const Buffers& side) {
  if (side.count == 0) return 0;
  const size_t bytes = side[0].bytes;
  if (!side[0].dense()) return 0;
  for (int i = 1; i < side.count; ++i)
    if (!side[i].dense() || side[i].bytes != bytes || side[i].data != side[i - 1].data + bytes)
      return 0;
  return segment.own_arena_position(side[0].data, bytes * side.count);
}

std::string describe(const Call& call) {
  std::string text = kind_name(call.kind());
  text += "(" + std::string(dtype_name(call.dtype()));
  if (call.reduce_op() != 0) text += std::string(", ") + reduce_op_name(call.reduce_op());
  text += ", root " + std::to_string(call.root());
  text += call.ragged() ? ", uneven sizes" : ", " + std::to_string(call.bytes) + " bytes";
  return text + ") as operation #" + std::to_string(call.sequence);
}

/// The first of these in which calls differ.
enum class Difference { kNone, kCalls, kLabels, kProvenance };

std::string provenance_text(uint64_t provenance) {
  if (provenance == 0) return "none";
  char text[17];
  snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(provenance));
  return text;
}

/// The fault that names each call and the ranks that made it; a majority is taken to be right.
Fault mismatch_fault(const std::vector<Call>& calls, Difference difference) {
  std::map<std::string, std::vector<int>> groups;
  for (size_t rank = 0; rank < calls.size(); ++rank) {
    std::string text = describe(calls[rank]);
    if (difference == Difference::kLabels)
      text += " with shapes of label " + std::to_string(calls[rank].label);
    if (difference == Difference::kProvenance)
      text += " of tensors of provenance " + provenance_text(calls[rank].provenance);
    groups[text].push_back(static_cast<int>(rank));
  }
  std::vector<const std::pair<const std::string, std::vector<int>>*> order;
  for (auto& group : groups) order.push_back(&group);
  std::sort(order.begin(), order.end(), [](auto* a, auto* b) {
    return std::make_pair(b->second.size(), a->second[0]) <
           std::make_pair(a->second.size(), b->second[0]);
  });
  std::string text;
  std::vector<int> blamed;
  const bool majority = order[0]->second.size() * 2 > calls.size();
  for (auto* group : order) {
    text += (text.empty() ? "" : "; ") + format_ranks(group->second) + " called " + group->first;
    if (majority && group == order[0]) continue;
    blamed.insert(blamed.end(), group->second.begin(), group->second.end());
  }
  std::sort(blamed.begin(), blamed.end());
  return Fault("mismatch", blamed, text);
}

/// The byte-count tables of all ranks, published or implied by a uniform header.
class ByteTables {
 public:
  ByteTables(const Segment& segment, unsigned parity, const std::vector<Call>& calls)
      : segment_(segment), parity_(parity), calls_(calls) {}

  int64_t sends(int from, int to) const { return entry(from, to, 0); }
  int64_t expects(int at, int from) const { return entry(at, from, calls_.size()); }

 private:
  int64_t entry(int rank, int peer, size_t base) const {
    if (!calls_[rank].ragged()) return static_cast<int64_t>(calls_[rank].bytes);
    return segment_.table(rank, parity_)[base + peer].load(relaxed);
  }

  const Segment& segment_;
  unsigned parity_;
  const std::vector<Call>& calls_;
};

uint64_t compare_byte_tables(const Segment& segment, unsigned parity,
                             const std::vector<Call>& calls, const SizeRange& read,
                             PeerBuffers& peers) {
  ByteTables tables(segment, parity, calls);
  const int size = static_cast<int>(calls.size());
  const auto kind = static_cast<OpKind>(calls[0].kind());
  int64_t longest = 0;
  for (int from = 0; from < size; ++from)
    for (int to = 0; to < size; ++to) {
      if (from == to || !routed(kind, calls[0].root(), from, to)) continue;
      const int64_t sent = tables.sends(from, to), expected = tables.expects(to, from);
      if (sent != expected || sent < 0 || sent > kMostSent)
        throw Fault("mismatch", {std::min(from, to), std::max(from, to)},
                    "rank " + std::to_string(from) + " sends " + std::to_string(sent) +
                        " bytes to rank " + std::to_string(to) + ", which expects " +
                        std::to_string(expected) + ", in " + describe(calls[from]));
      longest = std::max(longest, sent);
      peers.note(static_cast<uint64_t>(sent), read);
    }
  return static_cast<uint64_t>(longest);
}

/// The slow path of compare_headers(): something differs, which some kinds allow.
uint64_t compare_all_calls(const Segment& segment, unsigned parity, const SizeRange& read,
                           PeerBuffers& peers) {
  std::vector<Call> calls;
  for (int rank = 0; rank < segment.size(); ++rank)
    calls.push_back(read_call(segment.control(rank).headers[parity]));
  const bool may_differ = calls[0].kind() < kKinds && ragged(static_cast<OpKind>(calls[0].kind()));
  const uint64_t mask = ~kOwnBits & (may_differ ? ~kRagged : ~uint64_t{0});
  // A label of 0 goes with any. Shapes are equal where sizes are, unless a rank has parts of its own.
  uint64_t label = 0, compared = ~uint64_t{0};
  for (const Call& call : calls)
    if (may_differ && (call.ragged() || call.bytes != calls[0].bytes ||
                       (call.label != 0 && (call.label & ~kDimsLabel) == 0)))
      compared = kDimsLabel;
  bool calls_differ = false, labels_differ = false, provenance_differs = false;
  for (const Call& call : calls) {
    calls_differ |= call.sequence != calls[0].sequence ||
                    ((call.signature ^ calls[0].signature) & mask) != 0 ||
                    (!may_differ && call.bytes != calls[0].bytes);
    if (label == 0) label = call.label;
    labels_differ |= ((call.label ^ label) & compared) != 0 && call.label != 0;
    provenance_differs |= call.provenance != calls[0].provenance;
  }
  const Difference difference = calls_differ         ? Difference::kCalls
                                : labels_differ      ? Difference::kLabels
                                : provenance_differs ? Difference::kProvenance
                                                     : Difference::kNone;
  if (difference != Difference::kNone) throw mismatch_fault(calls, difference);
  if (may_differ) return compare_byte_tables(segment, parity, calls, read, peers);
  peers.note(calls[0].bytes, read);
  return calls[0].bytes;
}

}  // namespace

Call read_call(const OperationHeader& header) {
  Call call{header.sequence.load(relaxed),
            header.signature.load(relaxed),
            header.bytes.load(relaxed),
            header.label.load(relaxed),
            header.provenance.load(relaxed),
            1,
            0,
            0};
  if (!call.has_details()) return call;
  const uint64_t bits = header.factor.load(relaxed);
  memcpy(&call.factor, &bits, sizeof bits);
  call.input = header.input.load(relaxed);
  call.output = header.output.load(relaxed);
  return call;
}

CallForm form_of(const Operation& operation, int size, const SizeRange& read) {
  const size_t bytes = first_bytes(operation);
  const bool uneven = ragged(operation.kind) &&
                      !(all_equal(operation.inputs, bytes) && all_equal(operation.outputs, bytes));
  const bool split = operation.kind == OpKind::kScatter || operation.kind == OpKind::kAllToAll ||
                     operation.kind == OpKind::kReduceScatter;
  const bool one_part = !split || size == 2;
  return {uneven,
          !uneven && one_part && bytes <= OperationHeader::kDataBytes && !read.contains(bytes)};
}

void publish_call(const Operation& operation, const Segment& segment, int rank, uint64_t step,
                  const CallForm& form, const ReadingFlags& reading, const char* data) {
  OperationHeader& header = segment.control(rank).headers[step & 1];
  const bool readable = !overwrites_inputs(operation, rank);
  const uint64_t input = readable ? arena_position(segment, operation.inputs) : 0;
  const uint64_t output = arena_position(segment, operation.outputs);
  const bool has_details = operation.factor != 1 || input != 0 || output != 0;
  const uint64_t signature = pack_signature(operation, form, has_details, reading);
  const uint64_t bytes = first_bytes(operation);
  if (has_details) {
    uint64_t factor;
    memcpy(&factor, &operation.factor, sizeof factor);
    header.factor.store(factor, relaxed);
    header.input.store(input, relaxed);
    header.output.store(output, relaxed);
  }
  if (form.uneven) {
    std::atomic<int64_t>* tables = segment.table(rank, step & 1);
    const int size = segment.size();
    const ByteCounts counts{operation, rank};
    for (int peer = 0; peer < size; ++peer) {
      tables[peer].store(counts.sends(peer), relaxed);
      tables[size + peer].store(counts.expects(peer), relaxed);
    }
  }
  // All of the line in one go: a peer that polls it in between takes it away, and it has to come back.
  header.sequence.store(operation.sequence, relaxed);
  header.signature.store(signature, relaxed);
  header.bytes.store(bytes, relaxed);
  header.label.store(operation.label, relaxed);
  header.provenance.store(operation.provenance, relaxed);
  memcpy(header.data, data, sizeof header.data);
  header.step.store(step, std::memory_order_release);
}

uint64_t compare_headers(const Segment& segment, int rank, unsigned parity, const SizeRange& read,
                         PeerBuffers& peers) {
  const OperationHeader& mine = segment.control(rank).headers[parity];
  const uint64_t own = mine.signature.load(relaxed), own_bytes = mine.bytes.load(relaxed);
  uint64_t all = own, any = own, differences = own & kRagged;
  for (int peer = 0; peer < segment.size(); ++peer) {
    const OperationHeader& header = segment.control(peer).headers[parity];
    const uint64_t signature = header.signature.load(relaxed), bytes = header.bytes.load(relaxed);
    all &= signature;
    any |= signature;
    differences |= ((signature ^ own) & ~kDetailBits) | (bytes ^ own_bytes) |
                   (header.sequence.load(relaxed) ^ mine.sequence.load(relaxed)) |
                   (header.label.load(relaxed) ^ mine.label.load(relaxed)) |
                   (header.provenance.load(relaxed) ^ mine.provenance.load(relaxed));
    peers.in_header[peer] =
        (signature & (kInHeader | kRagged)) == kInHeader && bytes <= OperationHeader::kDataBytes;
  }
  peers.reading = {(all & kReadsPeers) != 0, (all & kSharesProcess) != 0,
                   (any & kPrefersOutboxes) != 0};
  peers.shows_any = false;
  peers.longest_unread_bytes = 0;
  const bool had_details = peers.has_details;
  peers.has_details = (any & kHasDetails) != 0;
  for (int peer = 0; (had_details || peers.has_details) && peer < segment.size(); ++peer) {
    const Call call = read_call(segment.control(peer).headers[parity]);
    std::tie(peers.factors[peer], peers.inputs[peer], peers.outputs[peer]) =
        std::tie(call.factor, call.input, call.output);
  }
  if (differences != 0) return compare_all_calls(segment, parity, read, peers);
  peers.note(own_bytes, read);
  return own_bytes;
}

}  // namespace tilework
