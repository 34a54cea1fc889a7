// The last operations of one rank in one group: name, tensors, call site, times, outcome. The shm
// backend's flight record (see src/tilework/comm/flight/ring.py). An entry is written in place, and
// nothing is formatted before records() is called.
//
// Only touched with the GIL held.
#pragma once

#include <nanobind/nanobind.h>

#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "python/tensors.h"
#include "transport/completion.h"
#include "transport/platform.h"

namespace tilework {

/// An operation of the fast path, as recorded.
struct OpRecord {
  const char* name = "";
  DType dtype = DType::kBytes;
  ReduceOp reduce_op = ReduceOp::kNone;
  int root = -1;  // -1: none
  int in_count = 0, out_count = 0;
  Shape in = {}, out = {};  // of the first tensor
};

/// (name, dtype, shapes of the inputs, of the outputs, reduction, root), like the Python ring's What.
nanobind::object what_of(const OpRecord& op);

/// A place in a program.
struct CallPlace {
  nanobind::object code;  // null if unknown
  int position = 0;       // an instruction's offset, in 3.10 a line
};
/// A code object and a line, or None.
nanobind::object site_of(const CallPlace& place);

class FlightRing {
 public:
  explicit FlightRing(size_t capacity) : entries_(capacity) {}

  /// Record the start of a collective; returns its slot.
  uint64_t begin(const OpRecord& op);
  /// The same for a message; `peer` is a group rank, or -1 for any.
  uint64_t begin(const OpRecord& op, int peer, int64_t tag);
  /// The same for an operation described in Python: `what` holds no tensor, `peer` is None for a collective.
  uint64_t begin(nanobind::object what, nanobind::object peer, nanobind::object tag);
  /// Record the end of an operation; `failure` is empty if it succeeded.
  void end(uint64_t slot, nanobind::object failure);
  void end(uint64_t slot);
  /// Set the object whose state describes the operation until it ends.
  void follow(uint64_t slot, nanobind::object pending);

  void follow(uint64_t slot, std::shared_ptr<Completion> pending);
  /// The program's call of an operation of the fast path, and what it is.
  std::pair<CallPlace, OpRecord> call(uint64_t slot);

  /// Tuples, oldest first; see _core.pyi.
  nanobind::list records() const;

  /// The operations from slot `first` on, and those of the slots in `also`, that are still here:
  /// (the next slot, nanoseconds between the wall clock and the monotonic clock, a list of
  /// (slot, record, when a thread first waited, when it was done)). Times are as in records().
  nanobind::tuple since(uint64_t first, const std::vector<uint64_t>& also) const;

  /// Keep at least `capacity` operations from now on.
  void grow(size_t capacity);

 private:
  struct Entry {
    uint64_t slot = 0;
    uint64_t number = 0;  // of a collective, from 1
    OpRecord op{};
    bool is_message = false;  // described by `op`, with this peer and tag
    int message_peer = 0;
    int64_t message_tag = 0;
    nanobind::object what, peer, tag;  // as described in Python; null where `op` describes it
    CallPlace place;                   // of the program's call
    uint64_t entered = 0, ended = 0;   // ticks; 0: not yet
    nanobind::object failure, pending;
    std::shared_ptr<Completion> completion;  // as `pending`, of an operation of the fast path
  };

  Entry& add();
  Entry* find(uint64_t slot) {
    return const_cast<Entry*>(static_cast<const FlightRing*>(this)->find(slot));
  }
  const Entry* find(uint64_t slot) const;
  nanobind::tuple record(const Entry& entry, const TickScale::Now& now) const;

  TickScale scale_;
  std::vector<Entry> entries_;
  std::deque<Entry> unfinished_;  // evicted while they still ran
  uint64_t next_ = 0, collectives_ = 0;
};

/// Set the mapping of file names to bools: true if the file's frames are not the program's own.
void set_library_filter(PyObject* in_library);

}  // namespace tilework
