#include "python/tensors.h"

#include <nanobind/ndarray.h>

#include <atomic>

namespace tilework {
namespace {

using nanobind::dlpack::dltensor;

/// The table of DLPack 1.2 and later minor versions, as far as it is used here.
struct ExchangeTable {
  uint32_t major, minor;
  void* previous;
  void* allocate;
  void* export_owned;
  void* import_owned;
  int (*borrow)(PyObject* tensor, dltensor* out);
};
constexpr uint32_t kMajor = 1;

struct Torch {
  PyObject *tensor_type, *parameter_type, *increment_version, *is_neg;
  int (*borrow)(PyObject*, dltensor*) = nullptr;
} torch;

TensorLayout layout{};

template <class T>
T* at(uintptr_t object, size_t offset) {
  return reinterpret_cast<T*>(object + offset);
}

uintptr_t impl_of(PyObject* tensor) {
  return *at<uintptr_t>(reinterpret_cast<uintptr_t>(tensor), layout.impl);
}

bool is_plain_tensor(PyObject* object) {
  auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  return type == torch.tensor_type || type == torch.parameter_type;
}

/// The dtype of a DLPack type code and number of bits; kBytes if the contract has no such dtype.
DType dtype_of(nanobind::dlpack::dtype type) {
  if (type.lanes != 1) return DType::kBytes;
  switch (type.code << 8 | type.bits) {
    case 0x008: return DType::kInt8;
    case 0x010: return DType::kInt16;
    case 0x020: return DType::kInt32;
    case 0x040: return DType::kInt64;
    case 0x108: return DType::kUInt8;
    case 0x110: return DType::kUInt16;
    case 0x120: return DType::kUInt32;
    case 0x140: return DType::kUInt64;
    case 0x210: return DType::kFloat16;
    case 0x220: return DType::kFloat32;
    case 0x240: return DType::kFloat64;
    case 0x410: return DType::kBFloat16;
    case 0x608: return DType::kBool;
    default: return DType::kBytes;
  }
}

/// Fill in shape and memory; false unless the elements lie in order, without gaps or in rows of
/// equal length and stride.
bool read_layout(const dltensor& tensor, TensorView& view) {
  if (tensor.ndim > kMaxDims) return false;
  view.shape.dims = tensor.ndim;
  int64_t items = 1, run = 0, stride = 0;  // no rows yet
  bool in_order = true;
  for (int dim = tensor.ndim - 1; dim >= 0; --dim) {
    const int64_t size = tensor.shape[dim];
    view.shape.sizes[dim] = size;
    if (size != 1 && tensor.strides) {
      if (run == 0 && tensor.strides[dim] != items) {
        run = items;
        stride = tensor.strides[dim];
      }
      in_order &= tensor.strides[dim] == (run == 0 ? items : items / run * stride);
    }
    items *= size;
  }
  const size_t item = kItemBytes[static_cast<size_t>(view.dtype)];
  view.buffer = {static_cast<char*>(tensor.data) + tensor.byte_offset, items * item};
  if (items == 0 || run == 0) return true;
  view.buffer.row_bytes = run * item;
  view.buffer.stride_bytes = stride * item;
  return in_order && stride > run;
}

}  // namespace

bool set_tensor_types(PyObject* tensor_type, PyObject* parameter_type,
                      PyObject* increment_version) {
  PyObject* capsule = PyObject_GetAttrString(tensor_type, "__dlpack_c_exchange_api__");
  void* pointer = capsule ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : nullptr;
  Py_XDECREF(capsule);
  PyErr_Clear();
  auto* table = static_cast<const ExchangeTable*>(pointer);
  if (!table || table->major != kMajor || !table->borrow) return false;
  Py_INCREF(tensor_type);  // all of these live as long as the process
  Py_INCREF(parameter_type);
  Py_INCREF(increment_version);
  torch = {tensor_type, parameter_type, increment_version,
           PyObject_GetAttrString(tensor_type, "is_neg"), table->borrow};
  return true;
}

bool view_tensor(PyObject* object, TensorView& view, bool strided) {
  if (!torch.borrow || !is_plain_tensor(object)) return false;
  dltensor tensor;
  if (torch.borrow(object, &tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  view.dtype = dtype_of(tensor.dtype);
  if (tensor.device.device_type != nanobind::device::cpu::value || view.dtype == DType::kBytes ||
      !read_layout(tensor, view) || !(strided || view.buffer.dense()))
    return false;
  return !is_negative(object);
}

void set_tensor_layout(const TensorLayout& given) { layout = given; }

bool is_negative(PyObject* tensor) {
  if (layout.negative != 0 && is_plain_tensor(tensor))
    return (*at<uint64_t>(impl_of(tensor), layout.flags) & layout.negative) != 0;
  PyObject* const answer = torch.is_neg ? PyObject_CallOneArg(torch.is_neg, tensor) : nullptr;
  PyErr_Clear();
  Py_XDECREF(answer);
  return answer != Py_False;
}

bool bump_versions(PyObject* tensors) {
  if (layout.negative != 0 && is_plain_tensor(tensors))
    if (uintptr_t counter = *at<uintptr_t>(impl_of(tensors), layout.counter)) {
      at<std::atomic<uint32_t>>(counter, layout.number)->fetch_add(1);
      return true;
    }
  if (!torch.increment_version) {
    PyErr_SetString(PyExc_RuntimeError, "torch is not registered");
    return false;
  }
  const bool several = PyList_Check(tensors) || PyTuple_Check(tensors);
  PyObject* written = several ? Py_NewRef(tensors) : PyTuple_Pack(1, tensors);
  PyObject* none = written ? PyObject_CallOneArg(torch.increment_version, written) : nullptr;
  Py_XDECREF(written);
  Py_XDECREF(none);
  return none != nullptr;
}

}  // namespace tilework
