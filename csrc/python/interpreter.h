// Helpers of the bindings: Python's signals, callbacks and shutdown, and conversions to Python.
#pragma once

#include <nanobind/nanobind.h>

#include <functional>
#include <memory>

#include "collectives/group.h"

namespace tilework {

namespace nb = nanobind;

/// Run Python's signal handlers if this is the thread that runs them, and the function for long waits
/// if this one has lasted for `waited` nanoseconds; true if one raised.
bool signal_raised(int64_t waited);
/// Set the function that threads call now and then which wait for other ranks longer than `seconds`.
void set_long_wait(nb::object fn, double seconds);

/// What takes the GIL and calls `fn`; does nothing once the interpreter ends.
std::function<void()> with_gil(std::function<void()> fn);
/// A callback for a completion. Owns a reference, which its one call releases.
std::function<void()> callback_of(nb::object fn);

nb::tuple ranks_of(const std::vector<int>& ranks);
nb::object text_of(const std::string& bytes);
/// The args of the Python exception for a fault.
nb::tuple fault_args(const Fault& fault);

/// A reference to a group, leaked in a forked child (see Group::in_forked_child).
class GroupRef {
 public:
  explicit GroupRef(std::shared_ptr<Group> group) : group_(std::move(group)) {}
  GroupRef(const GroupRef&) = default;
  GroupRef& operator=(const GroupRef&) = delete;
  ~GroupRef();
  Group* operator->() const { return group_.get(); }
  Group& operator*() const { return *group_; }

 private:
  std::shared_ptr<Group> group_;
};

/// Register a group to be closed at exit, while the interpreter still runs.
void close_at_exit(const std::shared_ptr<Group>& group);
void close_all();

}  // namespace tilework
