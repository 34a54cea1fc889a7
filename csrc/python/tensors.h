// Views of torch tensors' memory, through DLPack's C exchange table
// (https://dmlc.github.io/dlpack/latest), which torch publishes on its Tensor type. Reading a
// tensor takes tens of nanoseconds that way. Where there is no such table (older torch), and for
// every tensor that needs preparation (strided, conjugated, on a device, a subclass), view_tensor()
// returns false, and the caller takes the general path through Python.
#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>

#include "collectives/operation.h"

namespace tilework {

constexpr int kMaxDims = 8;

/// A shape by value, for labels and the flight ring.
struct Shape {
  int dims = 0;
  int64_t sizes[kMaxDims] = {};
};

/// A label is a 64-bit hash of a shape: start with kNoSizes, add one size after the other.
constexpr uint64_t kNoSizes = 0xcbf29ce484222325;  // FNV-1a
constexpr uint64_t add_size(uint64_t label, int64_t size) {
  return (label ^ static_cast<uint64_t>(size)) * 0x100000001b3;
}

/// The memory of a tensor that can be used as it is: on the CPU, of a dtype of the contract, dense or
/// in rows (see Buffer).
struct TensorView {
  Buffer buffer;
  DType dtype;
  Shape shape;
};

/// Set torch's types and its exchange table; once per process. False if this torch has no table.
bool set_tensor_types(PyObject* tensor_type, PyObject* parameter_type, PyObject* increment_version);

/// Places in torch's tensors, found out by comm/backends/shm/tensor_layout.py; offsets in bytes.
struct TensorLayout {
  size_t impl;        // in the Python object: the address of the object behind it
  size_t flags;       // there: the word with the bit
  uint64_t negative;  // that says that values are to be negated when read; 0: nothing is known
  size_t counter;     // there: the address of the version counter
  size_t number;      // in that: the number
};
/// Have the functions below look there; where nothing is known they ask torch.
void set_tensor_layout(const TensorLayout& layout);

/// True if the values of a tensor (of the exact types) are to be negated when they are read.
bool is_negative(PyObject* tensor);

/// True if `object` is such a tensor, dense unless `strided` is true. Never leaves an exception set.
/// False for complex tensors, which count as pairs of reals in some operations.
bool view_tensor(PyObject* object, TensorView& view, bool strided = false);

/// Bump the version counter of a tensor, or of each of a sequence, for autograd. False: exception
/// set.
bool bump_versions(PyObject* tensors);

}  // namespace tilework
