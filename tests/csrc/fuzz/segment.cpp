// A libFuzzer target: rank 0 of a group whose other ranks are the fuzzer, which writes anything
// anywhere in the segment between this rank's operations. Whatever it writes, an operation ends in
// time, with a result or with a Fault, and touches no memory but its own.
//
// An input is a program of steps of one byte and its arguments; see run_step().
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "collectives/group.h"

namespace {

using namespace tilework;

constexpr int kRanks = 3;
constexpr size_t kSlotBytes = 4096;
constexpr double kTimeoutSeconds = 0.002;  // seconds that an operation may wait
constexpr int kSteps = 12;                 // at most, so that an input takes milliseconds

/// Takes values from an input; zeroes once it is used up.
class FuzzInput {
 public:
  FuzzInput(const uint8_t* data, size_t bytes) : data_(data), left_(bytes) {}

  bool empty() const { return left_ == 0; }
  template <class T>
  T take() {
    T value{};
    const size_t bytes = std::min(left_, sizeof value);
    memcpy(&value, data_, bytes);
    data_ += bytes;
    left_ -= bytes;
    return value;
  }
  /// An edge value, or any number.
  uint64_t number() {
    constexpr uint64_t kRoom = kLeastRingBytes, kHuge = uint64_t{1} << 62;
    constexpr uint64_t kEdgeValues[] = {0,     1,        2,          63,    64,        4096,
                                        kRoom, 1u << 31, UINT32_MAX, kHuge, INT64_MAX, UINT64_MAX};
    const uint8_t choice = take<uint8_t>();
    return choice < count_of(kEdgeValues) ? kEdgeValues[choice] : take<uint64_t>();
  }

 private:
  const uint8_t* data_;
  size_t left_;
};

struct FuzzedGroup {
  explicit FuzzedGroup(int fd)
      : map(fd, kRanks, "nonce"), group(Group::make(fd, 0, kRanks, "nonce")), memory(64 * 1024) {}
  ~FuzzedGroup() { group->close(); }

  Segment map;
  std::shared_ptr<Group> group;
  std::vector<char> memory;  // of the rank's buffers; the address sanitizer watches its bounds
};

/// Write a number to any control word that ranks read.
void write_control(FuzzedGroup& fuzzed, FuzzInput& source) {
  const int rank = source.take<uint8_t>() % kRanks, peer = source.take<uint8_t>() % kRanks;
  const uint8_t which = source.take<uint8_t>();
  RankControl& control = fuzzed.map.control(rank);
  OperationHeader& header = control.headers[which & 1];
  const uint64_t number = source.number();
  switch (which % 23) {
    case 0: header.step.store(number); break;
    case 1: control.entered.store(number); break;
    case 2: control.departed.store(number & 1); break;
    case 3: control.pid.store(static_cast<int32_t>(number)); break;
    case 4: control.start_time.store(number); break;
    case 5: control.round_event.word.store(static_cast<uint32_t>(number)); break;
    case 6: control.round_event.waiters.store(static_cast<uint32_t>(number)); break;
    case 7: control.message_event.waiters.store(static_cast<uint32_t>(number)); break;
    case 8: header.sequence.store(number); break;
    case 9: header.signature.store(number); break;
    case 10: header.bytes.store(number); break;
    case 11: header.label.store(number); break;
    case 12: header.factor.store(number); break;
    case 13:
    case 14: fuzzed.map.table(rank, which & 1)[peer].store(number); break;
    case 15: fuzzed.map.cursor(rank, peer).head.store(number); break;
    case 16: fuzzed.map.cursor(rank, peer).tail.store(number); break;
    case 17:
      control.report.bytes = static_cast<uint32_t>(number);
      control.report.state = 2;
      break;
    case 18: fuzzed.map.header().abort.bytes = static_cast<uint32_t>(number); break;
    case 19: fuzzed.map.header().abort.state.store(static_cast<uint32_t>(number)); break;
    case 20: header.input.store(number); break;
    case 21: header.output.store(number); break;
    case 22: header.provenance.store(number); break;
  }
}

/// Write a fragment's envelope where rank 0 will read the next one, and publish it.
void write_envelope(FuzzedGroup& fuzzed, FuzzInput& source) {
  const int from = 1 + source.take<uint8_t>() % (kRanks - 1);
  Cursor& cursor = fuzzed.map.cursor(from, 0);
  Envelope envelope{};
  envelope.bytes = static_cast<uint32_t>(source.number());
  envelope.first = source.take<uint8_t>();
  envelope.tag = source.take<uint8_t>() & 1;
  envelope.total = source.number();
  envelope.dtype = static_cast<uint32_t>(source.number());
  memcpy(fuzzed.map.ring(from, 0) + cursor.tail.load() % fuzzed.map.ring_bytes() / kLine * kLine,
         &envelope, sizeof envelope);
  cursor.head.store(cursor.tail.load() + kLine + source.number());
}

/// Publish the same call for the other ranks as complete; at random, with byte-count tables.
void publish_matching_calls(FuzzedGroup& fuzzed, Operation operation, FuzzInput& source) {
  constexpr uint64_t kRagged = uint64_t{1} << 24,
                     kHasDetails = uint64_t{1}
                                   << 29;  // see pack_signature() in operation_header.cpp
  operation.sequence = fuzzed.group->sequence() + 1;
  const bool uneven = source.take<uint8_t>() & 1;
  const uint64_t number = uneven ? source.number() : 0;
  const size_t bytes = operation.inputs.count ? operation.inputs[0].bytes : 0;
  for (int rank = 1; rank < kRanks; ++rank) {
    for (unsigned parity = 0; parity < 2; ++parity) {
      OperationHeader& header = fuzzed.map.control(rank).headers[parity];
      std::atomic<int64_t>* table = fuzzed.map.table(rank, parity);
      publish_call(operation, fuzzed.map, rank, parity, form_of(operation, kRanks, {}), {},
                   "a short message");
      header.signature.store(header.signature.load() | kHasDetails);
      if (source.take<uint8_t>() & 1) header.input.store(source.number());
      if (source.take<uint8_t>() & 1) header.output.store(source.number());
      if (!uneven) continue;
      header.signature.store(header.signature.load() | kRagged);
      for (int i = 0; i < 2 * kRanks; ++i) table[i].store(i % kRanks == 0 ? bytes : number);
    }
    for (OperationHeader& header : fuzzed.map.control(rank).headers)
      header.step.store(uint64_t{1} << 40);
  }
}

void run_collective(FuzzedGroup& fuzzed, FuzzInput& source) {
  Operation operation{};
  operation.kind = static_cast<OpKind>(source.take<uint8_t>() % kKinds);
  operation.dtype = static_cast<DType>(source.take<uint8_t>() % kDTypes);
  if (reduces(operation.kind))
    operation.reduce_op = static_cast<ReduceOp>(source.take<uint8_t>() % kReduceOps);
  operation.root = source.take<uint8_t>() % kRanks;
  const bool root = operation.root == 0, many = operation.kind >= OpKind::kAllGather;
  const bool spread = operation.kind >= OpKind::kScatter;
  const size_t bytes = source.take<uint8_t>() * 16;
  std::vector<Buffer> inputs, outputs;
  char* next = fuzzed.memory.data();
  auto add = [&](std::vector<Buffer>& side, int count) {
    for (int i = 0; i < count; ++i, next += bytes) side.push_back({next, bytes});
  };
  const bool rooted = operation.kind == OpKind::kGather || operation.kind == OpKind::kScatter;
  const bool gathers = operation.kind == OpKind::kAllGather || operation.kind == OpKind::kGather ||
                       operation.kind == OpKind::kAllToAll;
  if (operation.kind != OpKind::kBarrier && operation.kind != OpKind::kBroadcast)
    add(inputs, !spread ? 1 : rooted && !root ? 0 : kRanks);
  if (operation.kind != OpKind::kBarrier && (!rooted || root || spread) &&
      (operation.kind != OpKind::kReduce || root))
    add(outputs, many && gathers ? kRanks : 1);
  operation.inputs = {inputs.data(), static_cast<int>(inputs.size())};
  operation.outputs = {outputs.data(), static_cast<int>(outputs.size())};
  if (source.take<uint8_t>() & 1) publish_matching_calls(fuzzed, operation, source);
  fuzzed.group->run(operation, kTimeoutSeconds, nullptr);
}

void post_message(FuzzedGroup& fuzzed, FuzzInput& source, bool is_send) {
  auto request = std::make_shared<Request>();
  request->is_send = is_send;
  request->peer = 1 + source.take<uint8_t>() % (kRanks - 1);
  if (!is_send && source.take<uint8_t>() % 4 == 0) request->peer = kAnyRank;
  request->buffer = {fuzzed.memory.data(), static_cast<size_t>(source.take<uint16_t>())};
  request->dtype = static_cast<DType>(source.take<uint8_t>() % kDTypes);
  request->tag = source.take<uint8_t>() & 1;
  request->seconds = kTimeoutSeconds;
  request->deadline = deadline_after(kTimeoutSeconds);
  fuzzed.group->post(request, true);
  fuzzed.group->wait(*request->completion, true, kTimeoutSeconds, nullptr);
  fuzzed.group->cancel(request);
}

void query_group(FuzzedGroup& fuzzed) {
  fuzzed.group->calls();
  fuzzed.group->aborted();
  fuzzed.group->failure_reports(0, nullptr);
}

void run_step(FuzzedGroup& fuzzed, FuzzInput& source) {
  switch (source.take<uint8_t>() % 8) {
    case 0:
    case 1: return write_control(fuzzed, source);
    case 2: return write_envelope(fuzzed, source);
    case 3:
    case 4: return run_collective(fuzzed, source);
    case 5: return post_message(fuzzed, source, false);
    case 6: return post_message(fuzzed, source, true);
    case 7: return query_group(fuzzed);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  const int fd = create_segment(kRanks, kSlotBytes, "nonce");
  try {
    FuzzedGroup fuzzed(fd);
    FuzzInput source(data, bytes);
    for (int step = 0; step < kSteps && !source.empty(); ++step) {
      try {
        run_step(fuzzed, source);
      } catch (const Fault&) {
      } catch (const std::invalid_argument&) {  // misuse by this target
      }
    }
  } catch (const std::invalid_argument&) {
  }
  close(fd);
  return 0;
}
