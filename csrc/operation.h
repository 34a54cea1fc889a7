// One collective as a rank calls it.
#pragma once

#include "reduce.h"
#include "op_types.h"

namespace tilework {

/// Memory of a tensor. Where `run` is not zero, it lies in rows of that many bytes, which begin
/// `stride` bytes apart: a block of columns, say. Only operations that move data take such.
struct Buffer {
  char* data;
  size_t bytes;  // without gaps
  size_t run = 0, stride = 0;

  bool dense() const { return run == 0; }
  /// From the first byte to the last, with gaps.
  size_t span() const { return dense() || bytes == 0 ? bytes : (bytes / run - 1) * stride + run; }
};

/// Whether two buffers share a byte. May say so of strided ones that only lie within each other.
inline bool overlap(const Buffer& a, const Buffer& b) {
  if (a.bytes == 0 || b.bytes == 0) return false;
  if (a.data > b.data) return overlap(b, a);
  if (a.data + a.span() <= b.data) return false;
  if (a.dense() || !(b.dense() || a.stride == b.stride)) return true;
  const size_t apart = static_cast<size_t>(b.data - a.data) % a.stride;  // within a row of a
  return apart < a.run || apart + (b.dense() ? b.bytes : b.run) > a.stride;
}

/// A view of buffers that the caller owns.
struct Buffers {
  const Buffer* items;
  int count;
  const Buffer& operator[](int i) const { return items[i]; }
};

struct Operation {
  OpKind kind;
  DType dtype;
  ReduceOp reduce_op;
  int root;
  double factor;
  uint64_t label;  // must be equal on all ranks
  Buffers inputs, outputs;
  uint64_t sequence = 0;
  Reduction reduction = nullptr;  // set by prepare()
  bool validated = false;          // already, by the caller
};

/// How many buffers each side of an operation takes on one rank.
struct Arity {
  int inputs, outputs;
};
Arity arity(OpKind kind, bool root, int size);

/// Check everything that one rank alone can know to be wrong; std::invalid_argument says what.
void validate(Operation& operation, int rank, int size);

}  // namespace tilework
