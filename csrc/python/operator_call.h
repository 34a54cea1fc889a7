// The fast path of operators on DTensors: from the arguments of a call to its key, the op sharding that
// the mesh has cached for it, the local operator and the result, with its provenance digest. What is
// not on the fast path is handed to Python, together with what was read.
#pragma once

#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace tilework {

/// The calls of one operator. dtensor/dispatch/call.py has the same in Python, for installs without
/// the core, and says what each part is for.
class OperatorCall {
 public:
  /// `python`: attributes of the operator and of the modules that it rests on, by the names of the
  /// fields below.
  OperatorCall(const nb::object& python, bool values_matter);

  /// The result of `func(*args, **kwargs)`.
  nb::object run(PyObject* func, PyObject* args, PyObject* kwargs);

 private:
  struct Reading;

  bool read(Reading& reading, PyObject* arg, bool by_itself);
  bool read_dtensor(Reading& reading, PyObject* tensor, bool by_itself);
  bool read_number(Reading& reading, PyObject* number);
  bool read_sequence(Reading& reading, PyObject* sequence);
  bool read_other(Reading& reading, PyObject* arg);
  /// True if the named arguments are read: none, or one that is no tensor, as mostly.
  bool read_named(Reading& reading, PyObject* kwargs);
  nb::object find_sharding(Reading& reading);
  nb::object digest_of_call(Reading& reading, nb::handle sharding);
  /// A local tensor's alias, whose gradient is partial along these axes, as in autograd/partial_grads.py;
  /// no object if it is to be made.
  nb::object known_alias(PyObject* tensor, nb::handle local, PyObject* axes);
  /// True if aliases have taken the place of all local tensors that need one; else of some.
  bool take_known(Reading& reading, PyObject* args, nb::handle sharding);

  // Python's objects. The types, and what a key and a digest have in the place of some values.
  nb::object dtensor, size, sequence_end, number_seed;
  // Functions: what is to be done with a tensor that is not as mostly, and with other arguments.
  nb::object refresh, local_of, digest_of, add_to_key;
  // Where a call goes on that leaves the fast path: as a whole; from its key, from its sharding or
  // from the local result. And what gives the local tensors, if their gradients are partial.
  nb::object call, from_key, from_sharding, from_result, take;
  nb::object causes;  // the module, whose watchers want to know of all calls
  bool values_matter_;
};

/// The DTensor (of class `kind`) with this local tensor, layout and digest, as in dtensor/base.py.
nb::object wrap_as(nb::handle kind, nb::handle local, nb::handle spec, nb::handle digest);

/// A `__torch_function__` that calls the function's handler, where there is one and no arguments are named;
/// else another one, `otherwise`.
nb::object torch_function(nb::handle handlers, nb::handle otherwise, PyObject* const* args,
                          Py_ssize_t count, PyObject* keywords);

}  // namespace tilework
