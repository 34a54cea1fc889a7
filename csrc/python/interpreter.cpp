#include "python/interpreter.h"

#include <nanobind/stl/vector.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

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

struct {
  PyObject* fn = nullptr;  // only touched with the GIL held
  std::atomic<int64_t> after_ns{kNever};
} long_wait;

}  // namespace

bool signal_raised(int64_t waited) {
  const bool is_long = waited >= long_wait.after_ns.load(std::memory_order_relaxed);
  const bool runs_handlers = syscall(SYS_gettid) == getpid();
  if (!is_long && !runs_handlers) return false;
  nb::gil_scoped_acquire gil;
  if (runs_handlers && PyErr_CheckSignals() != 0) return true;
  if (!is_long || long_wait.fn == nullptr) return false;
  PyObject* result = PyObject_CallNoArgs(long_wait.fn);
  Py_XDECREF(result);
  return result == nullptr;
}

void set_long_wait(nb::object fn, double seconds) {
  Py_XDECREF(long_wait.fn);
  long_wait.fn = fn.is_none() ? nullptr : fn.release().ptr();
  long_wait.after_ns = long_wait.fn ? static_cast<int64_t>(seconds * 1e9) : kNever;
}

std::function<void()> with_gil(std::function<void()> fn) {
  return [fn = std::move(fn)] {
    if (finalising()) return;  // Python's threads are gone: leak rather than crash
    nb::gil_scoped_acquire gil;
    fn();
  };
}

std::function<void()> callback_of(nb::object fn) {
  return with_gil([callee = fn.release().ptr()] {
    PyObject* result = PyObject_CallNoArgs(callee);
    if (result == nullptr) PyErr_WriteUnraisable(callee);
    Py_XDECREF(result);
    Py_DECREF(callee);
  });
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
