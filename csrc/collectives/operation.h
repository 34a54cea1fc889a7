// A rank's call of a collective.
#pragma once

#include "kernels/op_types.h"
#include "kernels/reduce.h"

namespace tilework {

/// Memory of a tensor. If `row_bytes` is not zero, it lies in rows of that many bytes, which begin
/// `stride_bytes` apart: a block of columns, say. Only operations that move data take such.
struct Buffer {
  char* data;
  size_t bytes;  // without gaps
  size_t row_bytes = 0, stride_bytes = 0;

  bool dense() const { return row_bytes == 0; }
  /// From the first byte to the last, with gaps.
  size_t span() const {
    return dense() || bytes == 0 ? bytes : (bytes / row_bytes - 1) * stride_bytes + row_bytes;
  }
};

/// True if two buffers share a byte; may be true of strided ones that only interleave.
inline bool overlap(const Buffer& a, const Buffer& b) {
  if (a.bytes == 0 || b.bytes == 0) return false;
  if (a.data > b.data) return overlap(b, a);
  if (a.data + a.span() <= b.data) return false;
  if (a.dense() || !(b.dense() || a.stride_bytes == b.stride_bytes)) return true;
  const size_t distance =
      static_cast<size_t>(b.data - a.data) % a.stride_bytes;  // within a row of a
  return distance < a.row_bytes || distance + (b.dense() ? b.bytes : b.row_bytes) > a.stride_bytes;
}

/// A view of buffers that the caller owns.
struct Buffers {
  const Buffer* items;
  int count;
  const Buffer& operator[](int i) const { return items[i]; }
};

/// The bits of a label that tell dtype and number of dims of parts that ranks send each other; the
/// others tell their shape, and are 0 where parts have a shape each.
constexpr uint64_t kDimsLabel = 0xffffffff;

struct Operation {
  OpKind kind;
  DType dtype;
  ReduceOp reduce_op;
  int root;
  double factor;
  uint64_t label;       // of dtype and shape as given: equal on all ranks, or 0
  uint64_t provenance;  // likewise: a digest of how the tensors came about; 0: none is known
  Buffers inputs, outputs;
  uint64_t sequence = 0;
  Reduction reduction = nullptr;  // set by validate()
  bool validated = false;         // by the caller already
};

/// The number of buffers that each side of an operation takes on one rank.
struct Arity {
  int inputs, outputs;
};
Arity arity(OpKind kind, bool root, int size);

/// True if a rank receives where its data for other ranks lies, which then cannot be read in place. Only
/// an all_to_all may (see validate()).
bool overwrites_inputs(const Operation& operation, int rank);

/// Check everything that one rank alone can check (std::invalid_argument), and find the reduction.
void validate(Operation& operation, int rank, int size);

}  // namespace tilework
