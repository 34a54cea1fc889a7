// What the bindings share: the interpreter's signals, callbacks and end, and the core's values as
// Python's.
#pragma once

#include <nanobind/nanobind.h>

#include <functional>
#include <memory>

#include "group.h"

namespace tilework {

namespace nb = nanobind;

/// Run Python's signal handlers if this is the thread that runs them; true if one raised.
bool signal_raised();

/// A callback for a ticket. Owns a reference, which the one call gives back.
std::function<void()> callback_of(nb::object fn);

nb::tuple ranks_of(const std::vector<int>& ranks);
nb::object text_of(const std::string& bytes);
/// The args of the Python exception for a fault.
nb::tuple fault_args(const Fault& fault);

/// A reference to a group, which in a forked child is leaked (see Group::foreign).
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

/// Groups that exit closes while the interpreter still works.
void close_at_exit(const std::shared_ptr<Group>& group);
void close_all();

}  // namespace tilework
