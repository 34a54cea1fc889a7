#include "python/operator_call.h"

#include <structmember.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <memory_resource>
#include <vector>

namespace tilework {
namespace {

/// Larger whole numbers are hashed by their digits: see ``number_seed`` in Python.
constexpr long long kMostHashed = 1LL << 60;

nb::object taken(PyObject* made) {
  if (made == nullptr) throw nb::python_error();
  return nb::steal(made);
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

nb::handle type_of(PyObject* object) { return reinterpret_cast<PyObject*>(Py_TYPE(object)); }

/// An attribute by name. Where the objects of the class that had it last keep it in a slot or in their
/// dict, or compute it in C, it is read there; else as Python reads it.
class Attribute {
 public:
  explicit Attribute(const char* name) : name_(PyUnicode_InternFromString(name)) {}

  nb::object of(nb::handle object) {
    if (Py_TYPE(object.ptr()) != type_) look_at(Py_TYPE(object.ptr()));
    if (PyObject** const fields = is_field_ ? _PyObject_GetDictPtr(object.ptr()) : nullptr) {
      PyObject* const value = *fields ? PyDict_GetItemWithError(*fields, name_) : nullptr;
      if (value != nullptr || default_ != nullptr) return nb::borrow(value ? value : default_);
    } else if (offset_ != 0) {
      char* const at = reinterpret_cast<char*>(object.ptr()) + offset_;
      if (PyObject* const value = *reinterpret_cast<PyObject**>(at)) return nb::borrow(value);
    } else if (getter_ != nullptr) {
      return taken(getter_->get(object.ptr(), getter_->closure));
    }
    return taken(PyObject_GetAttr(object.ptr(), name_));
  }

  /// Sets it in an object's dict.
  void set(nb::handle fields, nb::handle value) {
    if (PyDict_SetItem(fields.ptr(), name_, value.ptr()) < 0) throw nb::python_error();
  }

 private:
  void look_at(PyTypeObject* type) {
    PyObject* const found = PyObject_GetAttr(reinterpret_cast<PyObject*>(type), name_);
    PyErr_Clear();
    PyMemberDef* const member = found && Py_IS_TYPE(found, &PyMemberDescr_Type)
                                    ? reinterpret_cast<PyMemberDescrObject*>(found)->d_member
                                    : nullptr;
    const bool has_getter = found && Py_IS_TYPE(found, &PyGetSetDescr_Type);
    offset_ = member && member->type == T_OBJECT_EX ? member->offset : 0;
    getter_ = has_getter ? reinterpret_cast<PyGetSetDescrObject*>(found)->d_getset : nullptr;
    is_field_ = !found || (!Py_TYPE(found)->tp_descr_get && !Py_TYPE(found)->tp_descr_set);
    Py_XSETREF(default_, is_field_ ? Py_XNewRef(found) : nullptr);
    Py_XDECREF(found);
    Py_XSETREF(type_, reinterpret_cast<PyTypeObject*>(Py_NewRef(type)));  // keeps the address
  }

  PyObject* const name_;
  PyTypeObject* type_ = nullptr;
  Py_ssize_t offset_ = 0;
  const PyGetSetDef* getter_ = nullptr;
  /// Is it in the object's dict, or else the class's?
  bool is_field_ = false;
  PyObject* default_ = nullptr;
};

/// Attributes, and torch's functions as they were at the first use; lives as long as the process.
struct Known {
#define TILEWORK_NAME(name) \
  name { #name }
  Attribute TILEWORK_NAME(_view_of), TILEWORK_NAME(_local_tensor),
      TILEWORK_NAME(_made_without_grad), TILEWORK_NAME(_digest), TILEWORK_NAME(_spec),
      TILEWORK_NAME(requires_grad), TILEWORK_NAME(device), TILEWORK_NAME(dtype),
      TILEWORK_NAME(size), TILEWORK_NAME(mesh), TILEWORK_NAME(op_shardings), TILEWORK_NAME(digest),
      TILEWORK_NAME(as_is), TILEWORK_NAME(as_is_without_grad), TILEWORK_NAME(output),
      TILEWORK_NAME(inputs), TILEWORK_NAME(watchers), TILEWORK_NAME(_grads), TILEWORK_NAME(aliases),
      TILEWORK_NAME(grad_fn);
#undef TILEWORK_NAME
  nb::object torch = nb::module_::import_("torch"), tensor = torch.attr("Tensor");
  nb::object make = tensor.attr("_make_wrapper_subclass"), detach = tensor.attr("detach");
  nb::object data_ptr = tensor.attr("data_ptr");
  nb::object grad_enabled = torch.attr("is_grad_enabled"), strided = torch.attr("strided");
};

Known& known() {
  // Not guarded as C++ does it: a thread that waited for the guard would hold the GIL.
  static Known* all = nullptr;
  if (all == nullptr) all = new Known();
  return *all;
}

bool records_gradients() { return is_true(taken(PyObject_CallNoArgs(known().grad_enabled.ptr()))); }

/// As wrap_as; `graded`: gradients are recorded.
nb::object wrap(nb::handle kind, nb::handle local, nb::handle spec, nb::handle digest,
                bool graded) {
  Known& name = known();
  // By place, which is parsed faster than names: no strides, no offset, no memory format; not pinned.
  const nb::object args = nb::make_tuple(
      kind, name.size.of(spec), nb::none(), nb::none(), nb::none(), name.dtype.of(local),
      name.strided, name.device.of(local), false, name.requires_grad.of(local));
  nb::object tensor = taken(PyObject_Call(name.make.ptr(), args.ptr(), nullptr));
  const nb::object fields = taken(PyObject_GenericGetDict(tensor.ptr(), nullptr));
  name._local_tensor.set(fields, local);
  name._spec.set(fields, spec);
  name._digest.set(fields, digest);
  if (!graded) name._made_without_grad.set(fields, Py_True);
  return tensor;
}

using Items = std::pmr::vector<nb::object>;

nb::object tuple_of(const Items& items) {
  nb::object made = taken(PyTuple_New(static_cast<Py_ssize_t>(items.size())));
  Py_ssize_t i = 0;
  for (const nb::object& item : items) PyTuple_SET_ITEM(made.ptr(), i++, Py_NewRef(item.ptr()));
  return made;
}

nb::object list_of(const Items& items) { return taken(PySequence_List(tuple_of(items).ptr())); }

void append(Items& items, PyObject* item) { items.push_back(nb::borrow(item)); }
void append(Items& items, nb::object item) { items.push_back(std::move(item)); }
void append_all(Items& items, const nb::list& more) {
  for (nb::handle item : more) items.push_back(nb::borrow(item));
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
  Reading() {
    for (Items* items : {&key, &tensors, &locals, &seeds}) items->reserve(kFew);
  }

  static constexpr size_t kFew = 12;
  char memory[4 * kFew * sizeof(PyObject*)];
  std::pmr::monotonic_buffer_resource on_stack{memory, sizeof memory};
  Items key{&on_stack}, tensors{&on_stack}, locals{&on_stack}, seeds{&on_stack};
  /// The first DTensor's layout, and the shardings of calls that its mesh has cached.
  nb::object spec, shardings;
  /// As is: each tensor is a DTensor, and an argument by itself.
  bool as_is = true, graded = false;
  /// False if its DTensors may be on several meshes.
  bool one_mesh = true;
};

OperatorCall::OperatorCall(const nb::object& python, bool values_matter)
    : values_matter_(values_matter) {
#define TILEWORK_FIELD(name) name = python.attr(#name)
  TILEWORK_FIELD(dtensor), TILEWORK_FIELD(size), TILEWORK_FIELD(sequence_end),
      TILEWORK_FIELD(number_seed), TILEWORK_FIELD(refresh), TILEWORK_FIELD(local_of),
      TILEWORK_FIELD(digest_of), TILEWORK_FIELD(add_to_key), TILEWORK_FIELD(call),
      TILEWORK_FIELD(from_key), TILEWORK_FIELD(from_sharding), TILEWORK_FIELD(from_result),
      TILEWORK_FIELD(take), TILEWORK_FIELD(causes);
#undef TILEWORK_FIELD
}

bool OperatorCall::read_dtensor(Reading& reading, PyObject* arg, bool by_itself) {
  Known& name = known();
  if (!name._view_of.of(arg).is_none()) call_with(refresh, arg);
  nb::object local = name._local_tensor.of(arg);
  if (by_itself && reading.graded && is_true(name._made_without_grad.of(arg)))
    local = call_with(local_of, arg);
  append(reading.tensors, arg);
  nb::object digest = name._digest.of(arg);
  append(reading.seeds, digest.is_none() ? call_with(digest_of, arg) : digest);
  const nb::object spec = name._spec.of(arg);
  append(reading.key, taken(PyLong_FromVoidPtr(spec.ptr())));  // which the sharding keeps alive
  append(reading.key, name.dtype.of(local));
  if (by_itself) append(reading.locals, std::move(local));
  nb::object shardings = name.op_shardings.of(spec);
  if (!reading.shardings.is_valid()) {
    reading.shardings = std::move(shardings);
    reading.spec = spec;
  } else if (!shardings.is(reading.shardings)) {
    reading.one_mesh = false;
  }
  return false;
}

bool OperatorCall::read_number(Reading& reading, PyObject* number) {
  append(reading.key, type_of(number).ptr());
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
  append(reading.key, type_of(sequence).ptr());
  bool has_none = true;
  // By index: what is called for an item may change a list.
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(sequence); ++i) {
    const nb::object item = nb::borrow(PySequence_Fast_GET_ITEM(sequence, i));
    has_none = read(reading, item.ptr(), false) && has_none;
  }
  append(reading.key, sequence_end.ptr());
  return has_none;
}

bool OperatorCall::read_other(Reading& reading, PyObject* arg) {
  const nb::list key, tensors, seeds;
  const nb::object has_none = call_with(add_to_key, arg, key.ptr(), tensors.ptr(), seeds.ptr(),
                                        values_matter_ ? Py_True : Py_False);
  for (nb::handle each : tensors)
    if (type_of(each.ptr()).is(dtensor)) reading.one_mesh = false;  // or not, as Python will tell
  append_all(reading.key, key);
  append_all(reading.tensors, tensors);
  append_all(reading.seeds, seeds);
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
  append(reading.key, type_of(arg).ptr());
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
  PyObject* const cache = reading.shardings.ptr();
  if (PyObject* found = PyDict_GetItemWithError(cache, tuple_of(reading.key).ptr()))
    return nb::borrow(found);
  if (PyErr_Occurred()) {
    // An argument without a hash: Python says so again, and does without the cache.
    if (!PyErr_ExceptionMatches(PyExc_TypeError)) throw nb::python_error();
    PyErr_Clear();
  }
  return nb::none();
}

nb::object OperatorCall::digest_of_call(Reading& reading, nb::handle sharding) {
  reading.seeds[0] = known().digest.of(sharding);
  const Py_hash_t hash = PyObject_Hash(tuple_of(reading.seeds).ptr());
  if (hash == -1) throw nb::python_error();
  return taken(PyLong_FromSsize_t(hash));
}

nb::object OperatorCall::known_alias(PyObject* tensor, nb::handle local, PyObject* axes) {
  Known& name = known();
  const nb::object record = name._grads.of(tensor);
  if (record.is_none()) return nb::object();
  const nb::object aliases = name.aliases.of(record);
  const nb::object alias = nb::borrow(PyDict_GetItemWithError(aliases.ptr(), axes));
  if (!alias.is_valid() || PyTuple_GET_ITEM(alias.ptr(), 1) != local.ptr() ||
      PyTuple_GET_ITEM(alias.ptr(), 2) != name.grad_fn.of(local).ptr())
    return nb::object();
  const nb::object found = nb::borrow(PyTuple_GET_ITEM(alias.ptr(), 0));
  const nb::object address = call_with(name.data_ptr, local.ptr());
  const bool is_same = is_true(address) && address.equal(call_with(name.data_ptr, found.ptr()));
  return is_same ? found : nb::object();
}

bool OperatorCall::take_known(Reading& reading, PyObject* args, nb::handle sharding) {
  Known& name = known();
  if (is_true(name.watchers.of(causes))) return false;
  const nb::object inputs = name.inputs.of(sharding);
  Py_ssize_t next = 0;
  for (size_t i = 0; i < reading.locals.size(); ++i) {
    nb::object& local = reading.locals[i];
    PyObject* const arg = PyTuple_GET_ITEM(args, i);
    if (!type_of(arg).is(dtensor)) continue;
    PyObject* const layout = PySequence_Fast_GET_ITEM(inputs.ptr(), next++);
    if (layout == Py_None || !is_true(name.requires_grad.of(local))) continue;
    local = known_alias(arg, local, PyTuple_GET_ITEM(layout, 1));
    if (!local.is_valid()) return false;
  }
  return true;
}

nb::object OperatorCall::run(PyObject* func, PyObject* args, PyObject* kwargs) {
  static PyObject* const out = PyUnicode_InternFromString("out");
  Known& name = known();
  if (!PyTuple_CheckExact(args) || !PyDict_CheckExact(kwargs) ||
      (PyDict_GET_SIZE(kwargs) > 0 && PyDict_Contains(kwargs, out)))
    return call_with(call, func, args, kwargs);
  Reading reading;
  reading.graded = records_gradients();
  append(reading.key, func);
  append(reading.seeds, Py_None);  // the sharding's digest, once it is known
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i) {
    PyObject* const arg = PyTuple_GET_ITEM(args, i);
    const bool has_none = read(reading, arg, true);
    reading.as_is = reading.as_is && (has_none || type_of(arg).is(dtensor));
  }
  nb::object sharding = nb::none();
  const bool names_read = read_named(reading, kwargs);
  if (names_read && reading.one_mesh && reading.shardings.is_valid())
    sharding = find_sharding(reading);
  if (sharding.is_none() && names_read && PyDict_GET_SIZE(kwargs) > 0)
    return call_with(call, func, args, kwargs);
  const auto truth = [](bool value) { return value ? Py_True : Py_False; };
  const auto records = [&] {  // a gradient of a DTensor
    if (!reading.graded) return false;
    for (size_t i = 0; i < reading.locals.size(); ++i)
      if (type_of(PyTuple_GET_ITEM(args, i)).is(dtensor) &&
          is_true(name.requires_grad.of(reading.locals[i])))
        return true;
    return false;
  };
  if (sharding.is_none())
    return call_with(from_key, func, args, kwargs, list_of(reading.key).ptr(),
                     list_of(reading.tensors).ptr(), list_of(reading.locals).ptr(),
                     list_of(reading.seeds).ptr(), truth(reading.as_is), truth(reading.graded),
                     truth(records()));
  const nb::object digest = digest_of_call(reading, sharding), output = name.output.of(sharding);
  const bool is_as_is = is_true(name.as_is.of(sharding));
  const bool fits = is_as_is || is_true(name.as_is_without_grad.of(sharding));
  const bool with_aliases = !is_as_is && fits && records();
  if (!reading.as_is || !fits || (with_aliases && output.is_none()))
    return call_with(from_sharding, sharding.ptr(), func, args, kwargs,
                     list_of(reading.tensors).ptr(), name.mesh.of(reading.spec).ptr(),
                     digest.ptr());
  if (with_aliases && !take_known(reading, args, sharding)) {
    const nb::list inputs(call_with(take, sharding.ptr(), list_of(reading.tensors).ptr(),
                                    name.mesh.of(reading.spec).ptr()));
    size_t next = 0;
    for (size_t i = 0; i < reading.locals.size(); ++i)
      if (type_of(PyTuple_GET_ITEM(args, i)).is(dtensor)) reading.locals[i] = inputs[next++];
  }
  static_assert(sizeof(nb::object) == sizeof(PyObject*));
  auto* const locals = reinterpret_cast<PyObject* const*>(reading.locals.data());
  nb::object result = taken(PyObject_VectorcallDict(func, locals, reading.locals.size(), kwargs));
  if (output.is_none() || !type_of(result.ptr()).is(name.tensor))
    return call_with(from_result, sharding.ptr(), result.ptr(), func, args, kwargs,
                     list_of(reading.tensors).ptr(), name.mesh.of(reading.spec).ptr(),
                     digest.ptr());
  if (!reading.graded && is_true(name.requires_grad.of(result)))  // torch's views still say so
    result = call_with(name.detach, result.ptr());
  return wrap(dtensor, result, output, digest, reading.graded);
}

nb::object wrap_as(nb::handle kind, nb::handle local, nb::handle spec, nb::handle digest) {
  return wrap(kind, local, spec, digest, records_gradients());
}

nb::object torch_function(nb::handle handlers, nb::handle otherwise, PyObject* const* args,
                          Py_ssize_t count, PyObject* keywords) {
  // The function, the classes of the arguments, the arguments and the named arguments.
  const bool has_names = count > 3 && args[3] != Py_None &&
                         !(PyDict_CheckExact(args[3]) && PyDict_GET_SIZE(args[3]) == 0);
  if (count >= 3 && keywords == nullptr && !has_names) {
    const nb::object handler = nb::borrow(PyDict_GetItemWithError(handlers.ptr(), args[0]));
    if (handler.is_valid()) return call_with(handler, args[0], args[2], nb::dict().ptr());
    if (PyErr_Occurred()) throw nb::python_error();
  }
  return taken(PyObject_Vectorcall(otherwise.ptr(), args, static_cast<size_t>(count), keywords));
}

}  // namespace tilework
