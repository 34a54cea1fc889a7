#include "interpreter.h"

#include <nanobind/stl/vector.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

namespace tilework {
namespace {

bool finalising() {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsFinalizing();
#else
  return _Py_IsFinalizing();
#endif
}

/// All groups of this process. Only touched with the GIL held.
std::vector<std::weak_ptr<Group>>& registry() {
  static auto* groups = new std::vector<std::weak_ptr<Group>>();
  return *groups;
}

}  // namespace

bool signal_raised() {
  if (syscall(SYS_gettid) != getpid()) return false;
  nb::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

std::function<void()> callback_of(nb::object fn) {
  PyObject* callee = fn.release().ptr();
  return [callee] {
    if (finalising()) return;  // Python's threads are gone: leak rather than crash
    nb::gil_scoped_acquire gil;
    PyObject* result = PyObject_CallNoArgs(callee);
    if (result == nullptr) PyErr_WriteUnraisable(callee);
    Py_XDECREF(result);
    Py_DECREF(callee);
  };
}

nb::tuple ranks_of(const std::vector<int>& ranks) { return nb::tuple(nb::cast(ranks)); }

nb::object text_of(const std::string& bytes) {
  return nb::steal(
      PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "replace"));
}

nb::tuple fault_args(const Fault& fault) {
  return nb::make_tuple(text_of(fault.kind), ranks_of(fault.ranks), text_of(fault.text));
}

GroupRef::~GroupRef() {
  if (!group_) return;
  if (group_->in_forked_child()) {
    new std::shared_ptr<Group>(std::move(group_));
    return;
  }
  if (group_.use_count() > 1) return;
  nb::gil_scoped_release nogil;  // closing joins threads that may want the GIL
  group_.reset();
}

void close_at_exit(const std::shared_ptr<Group>& group) {
  auto& groups = registry();
  groups.erase(std::remove_if(groups.begin(), groups.end(), [](auto& g) { return g.expired(); }),
               groups.end());
  groups.push_back(group);
}

void close_all() {
  std::vector<GroupRef> open;
  for (auto& weak : registry())
    if (auto group = weak.lock()) open.emplace_back(std::move(group));
  nb::gil_scoped_release nogil;
  for (GroupRef& group : open) group->close();
}

}  // namespace tilework
