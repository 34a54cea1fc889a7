// One collective as a rank calls it.
#pragma once

#include "reduce.h"
#include "vocabulary.h"

namespace tilework {

struct Buffer {
  char* data;
  size_t bytes;
};

/// A view of buffers that the caller owns.
struct Buffers {
  const Buffer* items;
  int count;
  const Buffer& operator[](int i) const { return items[i]; }
};

struct Operation {
  Kind kind;
  DType dtype;
  ReduceOp reduce_op;
  int root;
  double factor;
  uint64_t label;  // must be equal on all ranks
  Buffers inputs, outputs;
  uint64_t sequence = 0;
  Reduction reduction = nullptr;  // set by prepare()
  bool prepared = false;          // already, by the caller
};

/// How many buffers each side of an operation takes on one rank.
struct Arity {
  int inputs, outputs;
};
Arity arity(Kind kind, bool root, int size);

/// Check everything that one rank alone can know to be wrong; std::invalid_argument says what.
void prepare(Operation& operation, int rank, int size);

}  // namespace tilework
