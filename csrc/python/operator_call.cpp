#include "python/operator_call.h"

#include <cstdint>
#include <cstring>
#include <limits>

namespace tilework {
namespace {

/// Larger whole numbers are hashed by their digits: see ``number_seed`` in Python.
constexpr long long kMostHashed = 1LL << 60;

/// Names of attributes, interned once: their look-up compares addresses.
struct Attributes {
#define TILEWORK_NAME(name) PyObject* name = PyUnicode_InternFromString(#name)
  TILEWORK_NAME(_view_of);
  TILEWORK_NAME(_local_tensor);
  TILEWORK_NAME(_made_without_grad);
  TILEWORK_NAME(_digest);
  TILEWORK_NAME(_spec);
  TILEWORK_NAME(requires_grad);
  TILEWORK_NAME(dtype);
  TILEWORK_NAME(mesh);
  TILEWORK_NAME(op_shardings);
  TILEWORK_NAME(digest);
  TILEWORK_NAME(as_is);
  TILEWORK_NAME(as_is_without_grad);
  TILEWORK_NAME(output);
  TILEWORK_NAME(detach);
  TILEWORK_NAME(out);
#undef TILEWORK_NAME
};

const Attributes& names() {
  static const auto* all = new Attributes();
  return *all;
}

nb::object taken(PyObject* made) {
  if (made == nullptr) throw nb::python_error();
  return nb::steal(made);
}

nb::object get(nb::handle object, PyObject* name) {
  return taken(PyObject_GetAttr(object.ptr(), name));
}

bool is_true(nb::handle object) {
  const int truth = PyObject_IsTrue(object.ptr());
  if (truth < 0) throw nb::python_error();
  return truth != 0;
}

template <class... Args>
nb::object call_with(nb::handle function, Args... args) {
  PyObject* const all[] = {args...};
  return taken(PyObject_Vectorcall(function.ptr(), all, sizeof...(args), nullptr));
}

void append(nb::handle list, nb::handle item) {
  if (PyList_Append(list.ptr(), item.ptr()) < 0) throw nb::python_error();
}

bool is_number(PyTypeObject* type) {
  return type == &PyLong_Type || type == &PyFloat_Type || type == &PyBool_Type ||
         type == &PyComplex_Type;
}

/// True for numbers whose hash is that of another one: Python hashes modulo 2**61 - 1.
bool hashes_oddly(PyObject* number) {
  if (PyLong_CheckExact(number)) {
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(number, &overflow);
    return overflow != 0 || value == -1 || value >= kMostHashed || value <= -kMostHashed;
  }
  return PyComplex_CheckExact(number);
}

/// A float as it goes into digests: its bits, which tell zeros and powers of two apart.
nb::object bits_of(double value) {
  if (value != value) value = std::numeric_limits<double>::quiet_NaN();
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return taken(PyLong_FromUnsignedLongLong(bits));
}

}  // namespace

/// What is known of a call's arguments so far.
struct OperatorCall::Reading {
  nb::object key = taken(PyList_New(0)), tensors = taken(PyList_New(0));
  nb::object locals = taken(PyList_New(0)), seeds = taken(PyList_New(0));
  nb::object mesh = nb::none();
  /// As is: each tensor is a DTensor, and an argument by itself.
  bool as_is = true, graded = false, requires_grad = false;
  /// False if its DTensors may be on several meshes.
  bool one_mesh = true;
};

OperatorCall::OperatorCall(const nb::object& python, bool values_matter)
    : values_matter_(values_matter) {
#define TILEWORK_FIELD(name) name = python.attr(#name)
  TILEWORK_FIELD(dtensor);
  TILEWORK_FIELD(tensor);
  TILEWORK_FIELD(size);
  TILEWORK_FIELD(sequence_end);
  TILEWORK_FIELD(number_seed);
  TILEWORK_FIELD(refresh);
  TILEWORK_FIELD(local_of);
  TILEWORK_FIELD(digest_of);
  TILEWORK_FIELD(add_to_key);
  TILEWORK_FIELD(grad_enabled);
  TILEWORK_FIELD(wrap_as);
  TILEWORK_FIELD(call);
  TILEWORK_FIELD(from_key);
  TILEWORK_FIELD(from_sharding);
  TILEWORK_FIELD(from_result);
#undef TILEWORK_FIELD
}

bool OperatorCall::read_dtensor(Reading& reading, PyObject* arg, bool by_itself) {
  const Attributes& name = names();
  if (!get(arg, name._view_of).is_none()) call_with(refresh, arg);
  nb::object local = get(arg, name._local_tensor);
  if (by_itself && reading.graded) {
    if (is_true(get(arg, name._made_without_grad))) local = call_with(local_of, arg);
    if (!reading.requires_grad) reading.requires_grad = is_true(get(local, name.requires_grad));
  }
  append(reading.tensors, arg);
  nb::object digest = get(arg, name._digest);
  if (digest.is_none()) digest = call_with(digest_of, arg);
  append(reading.seeds, digest);
  const nb::object spec = get(arg, name._spec);
  append(reading.key, taken(PyLong_FromVoidPtr(spec.ptr())));  // which the sharding keeps alive
  append(reading.key, get(local, name.dtype));
  if (by_itself) append(reading.locals, local);
  nb::object mesh = get(spec, name.mesh);
  if (reading.mesh.is_none())
    reading.mesh = std::move(mesh);
  else if (mesh.ptr() != reading.mesh.ptr())
    reading.one_mesh = false;
  return false;
}

bool OperatorCall::read_number(Reading& reading, PyObject* number) {
  append(reading.key, reinterpret_cast<PyObject*>(Py_TYPE(number)));
  if (values_matter_) {
    // 0.0 equals -0.0, and 0 False; complex numbers may have either zero within.
    if (is_true(number) && !PyComplex_CheckExact(number))
      append(reading.key, number);
    else
      append(reading.key, taken(PyObject_Repr(number)));
  } else if (PyFloat_CheckExact(number)) {
    append(reading.seeds, bits_of(PyFloat_AS_DOUBLE(number)));
  } else if (hashes_oddly(number)) {
    append(reading.seeds, call_with(number_seed, number));
  } else {
    append(reading.seeds, number);
  }
  return true;
}

bool OperatorCall::read_sequence(Reading& reading, PyObject* sequence) {
  append(reading.key, reinterpret_cast<PyObject*>(Py_TYPE(sequence)));
  bool has_none = true;
  // By index: what is called for an item may change a list.
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(sequence); ++i) {
    const nb::object item = nb::borrow(PySequence_Fast_GET_ITEM(sequence, i));
    has_none = read(reading, item.ptr(), false) && has_none;
  }
  append(reading.key, sequence_end);
  return has_none;
}

bool OperatorCall::read_other(Reading& reading, PyObject* arg) {
  const Py_ssize_t before = PyList_GET_SIZE(reading.tensors.ptr());
  const nb::object has_none = call_with(add_to_key, arg, reading.key.ptr(), reading.tensors.ptr(),
                                        reading.seeds.ptr(), values_matter_ ? Py_True : Py_False);
  for (Py_ssize_t i = before; i < PyList_GET_SIZE(reading.tensors.ptr()); ++i)
    if (reinterpret_cast<PyObject*>(Py_TYPE(PyList_GET_ITEM(reading.tensors.ptr(), i))) ==
        dtensor.ptr())
      reading.one_mesh = false;  // or not, as Python will tell
  return is_true(has_none);
}

bool OperatorCall::read(Reading& reading, PyObject* arg, bool by_itself) {
  PyTypeObject* const type = Py_TYPE(arg);
  if (reinterpret_cast<PyObject*>(type) == dtensor.ptr())
    return read_dtensor(reading, arg, by_itself);
  if (by_itself) append(reading.locals, arg);
  if (is_number(type)) return read_number(reading, arg);
  if (type == &PyTuple_Type || type == &PyList_Type ||
      reinterpret_cast<PyObject*>(type) == size.ptr())
    return read_sequence(reading, arg);
  if (arg != Py_None && type != &PyUnicode_Type) return read_other(reading, arg);
  append(reading.key, reinterpret_cast<PyObject*>(type));
  append(reading.key, arg);
  return true;
}

bool OperatorCall::read_named(Reading& reading, PyObject* kwargs) {
  if (PyDict_GET_SIZE(kwargs) == 0) return true;
  PyObject *key, *value;
  Py_ssize_t position = 0;
  PyDict_Next(kwargs, &position, &key, &value);
  PyTypeObject* const type = Py_TYPE(value);
  if (PyDict_GET_SIZE(kwargs) > 1 ||
      !(is_number(type) || value == Py_None || type == &PyUnicode_Type))
    return false;
  append(reading.key, key);
  return read(reading, value, false);
}

nb::object OperatorCall::find_sharding(Reading& reading) {
  const nb::object key = taken(PyList_AsTuple(reading.key.ptr()));
  const nb::object cache = get(reading.mesh, names().op_shardings);
  if (PyObject* found = PyDict_GetItemWithError(cache.ptr(), key.ptr())) return nb::borrow(found);
  if (PyErr_Occurred()) {
    // An argument without a hash: Python says so again, and does without the cache.
    if (!PyErr_ExceptionMatches(PyExc_TypeError)) throw nb::python_error();
    PyErr_Clear();
  }
  return nb::none();
}

nb::object OperatorCall::digest_of_call(Reading& reading, nb::handle sharding) {
  nb::object first = get(sharding, names().digest);
  if (PyList_SetItem(reading.seeds.ptr(), 0, first.release().ptr()) < 0) throw nb::python_error();
  const nb::object seeds = taken(PyList_AsTuple(reading.seeds.ptr()));
  const Py_hash_t hash = PyObject_Hash(seeds.ptr());
  if (hash == -1) throw nb::python_error();
  return taken(PyLong_FromSsize_t(hash));
}

PyObject* OperatorCall::run(PyObject* func, PyObject* args, PyObject* kwargs) {
  const Attributes& name = names();
  if (!PyTuple_CheckExact(args) || !PyDict_CheckExact(kwargs) ||
      (PyDict_GET_SIZE(kwargs) > 0 && PyDict_Contains(kwargs, name.out)))
    return call_with(call, func, args, kwargs).release().ptr();
  Reading reading;
  reading.graded = is_true(taken(PyObject_CallNoArgs(grad_enabled.ptr())));
  append(reading.key, func);
  append(reading.seeds, nb::none());  // the sharding's digest, once it is known
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i) {
    const bool has_none = read(reading, PyTuple_GET_ITEM(args, i), true);
    const bool is_dtensor =
        reinterpret_cast<PyObject*>(Py_TYPE(PyTuple_GET_ITEM(args, i))) == dtensor.ptr();
    reading.as_is = reading.as_is && (has_none || is_dtensor);
  }
  PyObject* const graded = reading.graded ? Py_True : Py_False;
  nb::object sharding = nb::none();
  const bool names_read = read_named(reading, kwargs);
  const bool one_mesh = reading.one_mesh && !reading.mesh.is_none();
  if (names_read && one_mesh) sharding = find_sharding(reading);
  if (sharding.is_none() && names_read && PyDict_GET_SIZE(kwargs) > 0)
    return call_with(call, func, args, kwargs).release().ptr();
  if (sharding.is_none())
    return call_with(from_key, func, args, kwargs, reading.key.ptr(), reading.tensors.ptr(),
                     reading.locals.ptr(), reading.seeds.ptr(), reading.as_is ? Py_True : Py_False,
                     graded, reading.requires_grad ? Py_True : Py_False)
        .release()
        .ptr();
  const nb::object digest = digest_of_call(reading, sharding);
  const bool with_gradients = reading.graded && reading.requires_grad;
  if (!reading.as_is || !(is_true(get(sharding, name.as_is)) ||
                          (!with_gradients && is_true(get(sharding, name.as_is_without_grad)))))
    return call_with(from_sharding, sharding.ptr(), func, args, kwargs, reading.tensors.ptr(),
                     reading.mesh.ptr(), digest.ptr())
        .release()
        .ptr();
  nb::object result = taken(
      PyObject_VectorcallDict(func, PySequence_Fast_ITEMS(reading.locals.ptr()),
                              static_cast<size_t>(PyList_GET_SIZE(reading.locals.ptr())), kwargs));
  const nb::object output = get(sharding, name.output);
  if (output.is_none() || reinterpret_cast<PyObject*>(Py_TYPE(result.ptr())) != tensor.ptr())
    return call_with(from_result, sharding.ptr(), result.ptr(), func, args, kwargs,
                     reading.tensors.ptr(), reading.mesh.ptr(), digest.ptr())
        .release()
        .ptr();
  if (!reading.graded && is_true(get(result, name.requires_grad)))  // torch's views still say so
    result = taken(PyObject_CallMethodNoArgs(result.ptr(), name.detach));
  return call_with(wrap_as, dtensor.ptr(), result.ptr(), output.ptr(), digest.ptr())
      .release()
      .ptr();
}

}  // namespace tilework
