#include "collectives/operation.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>

namespace tilework {
namespace {

using std::to_string;

[[noreturn]] void reject(const Operation& operation, const std::string& why) {
  throw std::invalid_argument(std::string(kind_name(static_cast<unsigned>(operation.kind))) + ": " +
                              why);
}

void check_buffers(const Operation& operation, const Buffers& buffers, int expected,
                   const char* side) {
  if (buffers.count != expected)
    reject(operation, to_string(buffers.count) + " " + side + " given, " + to_string(expected) +
                          " expected on this rank");
  const size_t item = kItemBytes[static_cast<size_t>(operation.dtype)];
  for (int i = 0; i < buffers.count; ++i) {
    const char* const data = buffers[i].data;
    const size_t bytes = buffers[i].bytes;
    if (bytes % item != 0)
      reject(operation, to_string(bytes) + " bytes in " + side + "[" + to_string(i) +
                            "] are not a whole number of " +
                            kDTypeNames[static_cast<size_t>(operation.dtype)] + " elements");
    if (bytes > 0 && !data) reject(operation, std::string("null address in ") + side);
    if (reduces(operation.kind) && reinterpret_cast<uintptr_t>(data) % std::min<size_t>(item, 8))
      reject(operation, std::string("unaligned address in ") + side);
  }
}

/// True if an input and an output hold the same part: they may be one buffer (in place).
bool same_part(OpKind kind, int rank, int input, int output) {
  switch (kind) {
    case OpKind::kAllGather:
    case OpKind::kGather: return output == rank;
    case OpKind::kScatter:
    case OpKind::kReduceScatter: return input == rank;
    default: return input == output;
  }
}

void check_sizes(const Operation& operation, int rank) {
  const auto& [inputs, outputs] = std::tie(operation.inputs, operation.outputs);
  for (int i = 0; i < inputs.count; ++i)
    for (int o = 0; o < outputs.count; ++o) {
      if (operation.kind == OpKind::kAllToAll && i != rank) break;
      if (operation.kind == OpKind::kAllToAll && o != rank) continue;
      if (same_part(operation.kind, rank, i, o) && inputs[i].bytes != outputs[o].bytes)
        reject(operation, "this rank's own part has " + to_string(inputs[i].bytes) +
                              " bytes in the input and " + to_string(outputs[o].bytes) +
                              " in the output");
    }
}

Buffer span(const Buffers& buffers) {
  char *low = nullptr, *high = nullptr;
  for (int i = 0; i < buffers.count; ++i) {
    const Buffer& buffer = buffers[i];
    if (buffer.bytes == 0) continue;
    low = low ? std::min(low, buffer.data) : buffer.data;
    high = std::max(high, buffer.data + buffer.span());
  }
  return {low, static_cast<size_t>(high - low)};
}

/// Outputs are written while inputs are still read, so they must be the same or disjoint.
void check_overlap(const Operation& operation, int rank) {
  const auto& [inputs, outputs] = std::tie(operation.inputs, operation.outputs);
  if (!overlap(span(inputs), span(outputs))) return;
  for (int i = 0; i < inputs.count; ++i)
    for (int o = 0; o < outputs.count; ++o) {
      if (!overlap(inputs[i], outputs[o])) continue;
      if (same_part(operation.kind, rank, i, o) && inputs[i].data == outputs[o].data) continue;
      reject(operation, "inputs[" + to_string(i) + "] and outputs[" + to_string(o) +
                            "] overlap; only a rank's own part may be in place");
    }
}

}  // namespace

Arity arity(OpKind kind, bool root, int size) {
  switch (kind) {
    case OpKind::kBarrier: return {0, 0};
    case OpKind::kBroadcast: return {0, 1};
    case OpKind::kAllReduce:
    case OpKind::kScan:
    case OpKind::kExscan: return {1, 1};
    case OpKind::kReduce: return {1, root ? 1 : 0};
    case OpKind::kAllGather: return {1, size};
    case OpKind::kGather: return {1, root ? size : 0};
    case OpKind::kScatter: return {root ? size : 0, 1};
    case OpKind::kReduceScatter: return {size, 1};
    case OpKind::kAllToAll: return {size, size};
  }
  return {0, 0};
}

bool overwrites_inputs(const Operation& operation, int rank) {
  const auto& [inputs, outputs] = std::tie(operation.inputs, operation.outputs);
  for (int i = 0; operation.kind == OpKind::kAllToAll && i < inputs.count; ++i)
    if (i != rank && inputs[i].bytes > 0 && inputs[i].data == outputs[i].data) return true;
  return false;
}

void validate(Operation& operation, int rank, int size) {
  if (operation.root < 0 || operation.root >= size)
    reject(operation, "root " + to_string(operation.root) + " is not a rank of this group of " +
                          to_string(size));
  const Arity expected = arity(operation.kind, rank == operation.root, size);
  check_buffers(operation, operation.inputs, expected.inputs, "inputs");
  check_buffers(operation, operation.outputs, expected.outputs, "outputs");
  check_sizes(operation, rank);
  check_overlap(operation, rank);
  if (!reduces(operation.kind)) {
    if (operation.reduce_op != ReduceOp::kNone) reject(operation, "it takes no reduce operation");
    return;
  }
  operation.reduction = find_reduction(operation.dtype, operation.reduce_op);
  if (!operation.reduction)
    reject(operation, std::string("cannot reduce ") +
                          kDTypeNames[static_cast<size_t>(operation.dtype)] + " by " +
                          kReduceOpNames[static_cast<size_t>(operation.reduce_op)]);
}

}  // namespace tilework
