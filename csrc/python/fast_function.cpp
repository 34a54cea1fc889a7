#include "python/fast_function.h"

#include <nanobind/stl/string.h>
#include <structmember.h>

#include <string>

#include "python/fast_path.h"

namespace tilework {
namespace {

namespace nb = nanobind;

/// The place of a slot (PEP 412's other kind: an entry of __slots__) in the objects of a class.
Py_ssize_t slot_offset(const nb::object& type, const char* name) {
  const nb::object slot = type.attr(name);
  if (!Py_IS_TYPE(slot.ptr(), &PyMemberDescr_Type))
    throw nb::type_error((std::string(name) + " is no slot").c_str());
  return reinterpret_cast<PyMemberDescrObject*>(slot.ptr())->d_member->offset;
}

PyObject* at_offset(PyObject* object, Py_ssize_t offset) {
  return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset);
}

/// What Python registers once; lives as long as the process.
struct World {
  PyObject* variable = nullptr;
  PyTypeObject *type = nullptr, *group_type = nullptr, *fast_path_type = nullptr;
  Py_ssize_t default_group = 0, fast_path = 0, group_ranks = 0, global_ranks = 0;
} world;

/// A rank's default group, or null.
nb::object default_group() {
  PyObject* current = nullptr;
  if (!world.variable || PyContextVar_Get(world.variable, nullptr, &current) < 0 || !current) {
    PyErr_Clear();
    return nb::object();
  }
  const nb::object held = nb::steal(current);
  if (!Py_IS_TYPE(current, world.type)) return nb::object();
  PyObject* const group = at_offset(current, world.default_group);
  return group && group != Py_None ? nb::borrow(group) : nb::object();
}

constexpr int kMostParams = 8;

/// The index of each parameter by what it is for; -1: there is none.
struct Roles {
  int inputs = -1, outputs = -1, reduce_op = -1, root = -1, group_root = -1, tag = -1;
  int in_rows = -1, out_rows = -1, group = -1, async_op = -1;
};

enum class Act { kCollective, kSend, kReceive, kStartSend, kStartReceive };

struct FastFunction {
  PyObject_HEAD vectorcallfunc call;
  PyObject *function, *name;
  PyObject* weak_references;
  PyObject* params[kMostParams];  // interned
  PyObject* default_op;
  int param_count, required, form;
  Roles roles;
  Act act;
  bool root_is_optional, writes_at_root;
};

FastFunction& of(PyObject* self) { return *reinterpret_cast<FastFunction*>(self); }

using Given = PyObject* const*;

PyObject* given_or(Given given, int index, PyObject* otherwise) {
  return index >= 0 && given[index] ? given[index] : otherwise;
}

/// Sort a call's arguments by parameter; false if they do not fit, of which the function complains.
bool sort_arguments(const FastFunction& self, PyObject* const* args, Py_ssize_t count,
                    PyObject* keywords, PyObject** given) {
  if (count > self.param_count) return false;
  for (Py_ssize_t i = 0; i < count; ++i) given[i] = args[i];
  const Py_ssize_t named = keywords ? PyTuple_GET_SIZE(keywords) : 0;
  for (Py_ssize_t k = 0; k < named; ++k) {
    int i = static_cast<int>(count);  // those before are given by position
    while (i < self.param_count && self.params[i] != PyTuple_GET_ITEM(keywords, k)) ++i;
    if (i == self.param_count || given[i]) return false;
    given[i] = args[count + k];
  }
  for (int i = 0; i < self.required; ++i)
    if (!given[i]) return false;
  return true;
}

/// The group that a call means, and its fast path.
struct Target {
  nb::object group, fast_path;
  PyObject* slot(Py_ssize_t offset) const { return at_offset(group.ptr(), offset); }
};

bool find_target(const FastFunction& self, Given given, Target& target) {
  PyObject* const group = given_or(given, self.roles.group, Py_None);
  target.group = group == Py_None ? default_group() : nb::borrow(group);
  if (!target.group.is_valid() || !PyObject_TypeCheck(target.group.ptr(), world.group_type))
    return false;
  PyObject* const fast_path = target.slot(world.fast_path);
  if (!fast_path || !Py_IS_TYPE(fast_path, world.fast_path_type)) return false;
  target.fast_path = nb::borrow(fast_path);
  return true;
}

constexpr int kNoRoot = -2;

int int_of(PyObject* number) {
  const long value = PyLong_CheckExact(number) ? PyLong_AsLong(number) : kNoRoot;
  PyErr_Clear();
  return value < 0 || value > INT_MAX ? kNoRoot : static_cast<int>(value);
}

/// The group rank of the root, or of the other side of a message; kNoRoot if the function is to find it.
int find_root(const FastFunction& self, Given given, const Target& target) {
  PyObject* const root = given_or(given, self.roles.root, Py_None);
  PyObject* const group_root = given_or(given, self.roles.group_root, Py_None);
  if (group_root != Py_None) return root == Py_None ? int_of(group_root) : kNoRoot;
  if (root == Py_None) {
    if (self.act == Act::kReceive || self.act == Act::kStartReceive) return kAnyRank;
    return self.root_is_optional ? 0 : kNoRoot;
  }
  PyObject* const ranks = target.slot(world.group_ranks);
  if (!ranks || !PyDict_CheckExact(ranks)) return kNoRoot;
  PyObject* const rank = PyDict_GetItemWithError(ranks, root);
  PyErr_Clear();
  return rank ? int_of(rank) : kNoRoot;
}

/// The results of these are new references; null without an exception: refused.
PyObject* run_collective(const FastFunction& self, Given given, const Target& target) {
  const Roles& roles = self.roles;
  auto& fast_path = *nb::inst_ptr<FastPath>(target.fast_path);
  int root = 0;
  if (roles.root >= 0 && (root = find_root(self, given, target)) < 0) return nullptr;
  const bool writes = !self.writes_at_root || root == fast_path.rank();
  PyObject* const async_op = given_or(given, roles.async_op, Py_False);
  if (async_op != Py_False && async_op != Py_True) return nullptr;
  const auto act = [&](auto method) {
    return (fast_path.*method)(
        static_cast<unsigned>(self.form), self.name, given_or(given, roles.inputs, Py_None),
        writes ? given_or(given, roles.outputs, Py_None) : Py_None,
        given_or(given, roles.reduce_op, self.default_op), root,
        given_or(given, roles.in_rows, Py_None), given_or(given, roles.out_rows, Py_None));
  };
  if (async_op == Py_True) return act(&FastPath::post_form).release().ptr();
  return act(&FastPath::run_form) ? Py_NewRef(Py_None) : nullptr;
}

PyObject* run_message(const FastFunction& self, Given given, const Target& target) {
  auto& fast_path = *nb::inst_ptr<FastPath>(target.fast_path);
  const int peer = find_root(self, given, target);
  if (peer == kNoRoot || peer == fast_path.rank()) return nullptr;
  int64_t tag = 0;
  if (PyObject* const number = given_or(given, self.roles.tag, nullptr)) {
    tag = PyLong_CheckExact(number) ? PyLong_AsLongLong(number) : -1;
    if (tag == -1) return PyErr_Clear(), nullptr;
  }
  if (self.act == Act::kStartSend)
    return fast_path.isend(given[self.roles.inputs], peer, tag).release().ptr();
  if (self.act == Act::kStartReceive)
    return fast_path.irecv(given[self.roles.outputs], peer, tag).release().ptr();
  if (self.act == Act::kSend)
    return fast_path.send(given[self.roles.inputs], peer, tag) ? Py_NewRef(Py_None) : nullptr;
  const int source = fast_path.recv(given[self.roles.outputs], peer, tag);
  if (source < 0) return nullptr;
  PyObject* const ranks = target.slot(world.global_ranks);
  if (ranks && PyTuple_CheckExact(ranks) && source < PyTuple_GET_SIZE(ranks))
    return Py_NewRef(PyTuple_GET_ITEM(ranks, source));
  PyErr_SetString(PyExc_RuntimeError, "a group whose ranks are unknown received a message");
  return nullptr;
}

/// True while a profiler or debugger wants to see calls of Python functions.
bool is_watched() {
  const PyThreadState* const state = PyThreadState_Get();
  return state->c_profilefunc || state->c_tracefunc;
}

/// Run a call by the core; null without an exception: refused.
PyObject* run_fast(const FastFunction& self, PyObject* const* args, Py_ssize_t count,
                   PyObject* keywords) {
  PyObject* given[kMostParams] = {};
  if (!sort_arguments(self, args, count, keywords, given) || is_watched()) return nullptr;
  try {
    Target target;
    if (!find_target(self, given, target)) return nullptr;
    return self.act == Act::kCollective ? run_collective(self, given, target)
                                        : run_message(self, given, target);
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

PyObject* vectorcall(PyObject* self, PyObject* const* args, size_t flags, PyObject* keywords) {
  PyObject* const result = run_fast(of(self), args, PyVectorcall_NARGS(flags), keywords);
  if (result || PyErr_Occurred()) return result;
  return PyObject_Vectorcall(of(self).function, args, flags, keywords);
}

// ---- the function in other respects ----------------------------------------------------------

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(of(self).function);
  return 0;
}

int clear(PyObject* self) {
  Py_CLEAR(of(self).function);
  return 0;
}

void deallocate(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  if (of(self).weak_references) PyObject_ClearWeakRefs(self);
  clear(self);
  Py_CLEAR(of(self).name);
  Py_CLEAR(of(self).default_op);
  for (PyObject*& param : of(self).params) Py_CLEAR(param);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* get_attribute(PyObject* self, PyObject* name) {
  if (PyUnicode_CompareWithASCIIString(name, "__module__") == 0)  // each type has its own
    return PyObject_GetAttr(of(self).function, name);
  PyObject* const own = PyObject_GenericGetAttr(self, name);
  if (own || !PyErr_ExceptionMatches(PyExc_AttributeError)) return own;
  PyErr_Clear();
  return PyObject_GetAttr(of(self).function, name);
}

int set_attribute(PyObject* self, PyObject* name, PyObject* value) {
  return PyObject_SetAttr(of(self).function, name, value);
}

PyObject* represent(PyObject* self) { return PyObject_Repr(of(self).function); }

/// As functions do, it becomes a method in a class.
PyObject* bind(PyObject* self, PyObject* object, PyObject*) {
  return object && object != Py_None ? PyMethod_New(self, object) : Py_NewRef(self);
}

PyObject* attribute(PyObject* self, void* name) {
  return PyObject_GetAttrString(of(self).function, static_cast<const char*>(name));
}

PyObject* wrapped(PyObject* self, void*) { return Py_NewRef(of(self).function); }

/// Pickled by name, as functions are.
PyObject* reduce(PyObject* self, PyObject*) {
  return PyObject_GetAttrString(of(self).function, "__qualname__");
}

PyTypeObject* fast_function_type() {
  static char doc[] = "__doc__", dict[] = "__dict__", cls[] = "__class__";
  static PyGetSetDef attributes[] = {{"__doc__", attribute, nullptr, nullptr, doc},
                                     {"__dict__", attribute, nullptr, nullptr, dict},
                                     {"__class__", attribute, nullptr, nullptr, cls},
                                     {"__wrapped__", wrapped, nullptr, nullptr, nullptr},
                                     {nullptr, nullptr, nullptr, nullptr, nullptr}};
  static PyMethodDef methods[] = {{"__reduce__", reduce, METH_NOARGS, nullptr},
                                  {nullptr, nullptr, 0, nullptr}};
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(FastFunction, call), READONLY, nullptr},
      {"__weaklistoffset__", T_PYSSIZET, offsetof(FastFunction, weak_references), READONLY,
       nullptr},
      {nullptr, 0, 0, 0, nullptr}};
  const auto any = [](auto* function) { return reinterpret_cast<void*>(function); };
  static PyType_Slot slots[] = {{Py_tp_call, any(PyVectorcall_Call)},
                                {Py_tp_dealloc, any(deallocate)},
                                {Py_tp_traverse, any(traverse)},
                                {Py_tp_clear, any(clear)},
                                {Py_tp_getattro, any(get_attribute)},
                                {Py_tp_setattro, any(set_attribute)},
                                {Py_tp_repr, any(represent)},
                                {Py_tp_descr_get, any(bind)},
                                {Py_tp_getset, attributes},
                                {Py_tp_methods, methods},
                                {Py_tp_members, members},
                                {0, nullptr}};
  static PyType_Spec spec = {"tilework._core.FastFunction", sizeof(FastFunction), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
                                 Py_TPFLAGS_DISALLOW_INSTANTIATION,
                             slots};
  static PyObject* const type = PyType_FromSpec(&spec);
  if (!type) throw nb::python_error();
  return reinterpret_cast<PyTypeObject*>(type);
}

/// Find what a parameter of one of these names is for.
void note_role(FastFunction& self, const std::string& param, int index) {
  Roles& roles = self.roles;
  const std::pair<const char*, int*> table[] = {
      {"op", &roles.reduce_op},
      {"dst", &roles.root},
      {"src", &roles.root},
      {"group_dst", &roles.group_root},
      {"group_src", &roles.group_root},
      {"tag", &roles.tag},
      {"input_split_sizes", &roles.in_rows},
      {"output_split_sizes", &roles.out_rows},
      {"group", &roles.group},
      {"async_op", &roles.async_op},
  };
  for (const auto& [name, role] : table)
    if (param == name) *role = index;
}

}  // namespace

nb::object make_fast_function(nb::object function, const nb::str& inputs, const nb::str& outputs) {
  PyTypeObject* const type = fast_function_type();
  const nb::object made = nb::steal(type->tp_alloc(type, 0));  // zeroed
  if (!made.is_valid()) throw nb::python_error();
  FastFunction& self = of(made.ptr());
  const nb::object code = function.attr("__code__"), defaults = function.attr("__defaults__");
  const std::string name = nb::cast<std::string>(function.attr("__name__"));
  self.call = vectorcall;
  self.roles = Roles();
  self.param_count = nb::cast<int>(code.attr("co_argcount"));
  self.required = self.param_count - (defaults.is_none() ? 0 : static_cast<int>(nb::len(defaults)));
  self.act = name == "send"    ? Act::kSend
             : name == "recv"  ? Act::kReceive
             : name == "isend" ? Act::kStartSend
             : name == "irecv" ? Act::kStartReceive
                               : Act::kCollective;
  self.form = find_form(name);
  self.root_is_optional = name == "gather" || name == "scatter";
  self.writes_at_root = name == "reduce";
  self.default_op = Py_NewRef(Py_None);
  self.name = PyUnicode_InternFromString(name.c_str());
  if (self.param_count > kMostParams || (self.act == Act::kCollective && self.form < 0))
    throw nb::value_error((name + " is no operation of the fast path's").c_str());
  for (int i = 0; i < self.param_count; ++i) {
    const nb::object param = code.attr("co_varnames")[i];
    self.params[i] = nb::object(param).release().ptr();
    note_role(self, nb::cast<std::string>(param), i);
    if (param.equal(inputs)) self.roles.inputs = i;
    if (param.equal(outputs)) self.roles.outputs = i;
  }
  if (self.roles.reduce_op >= 0) {
    Py_DECREF(self.default_op);
    self.default_op = nb::object(defaults[self.roles.reduce_op - self.required]).release().ptr();
  }
  self.function = function.release().ptr();
  return made;
}

void set_world_types(nb::object variable, nb::object world_type, nb::object group_type) {
  world.default_group = slot_offset(world_type, "default_group");
  world.fast_path = slot_offset(group_type, "fast_path");
  world.group_ranks = slot_offset(group_type, "group_ranks");
  world.global_ranks = slot_offset(group_type, "global_ranks");
  world.fast_path_type = reinterpret_cast<PyTypeObject*>(nb::type<FastPath>().ptr());
  world.type = reinterpret_cast<PyTypeObject*>(world_type.release().ptr());
  world.group_type = reinterpret_cast<PyTypeObject*>(group_type.release().ptr());
  world.variable = variable.release().ptr();
}

}  // namespace tilework
