// The last operations of one rank in one group: what ran, called from where, when, and how it
// ended. The shm backend's flight record (src/tilework/comm/flight/ring.py tells what it is for).
// An entry is written in place and nothing is formatted before somebody asks.
//
// Only touched with the GIL held.
#pragma once

#include <nanobind/nanobind.h>

#include <deque>
#include <vector>

#include "tensors.h"

namespace tilework {

/// What an entry tells of an operation of the short way.
struct OpRecord {
  const char* name;
  DType dtype = DType::kBytes;
  ReduceOp reduce_op = ReduceOp::kNone;
  int root = -1;  // -1: it has none
  int in_count = 0, out_count = 0;
  Shape in = {}, out = {};  // of the first tensor
};

class FlightRing {
 public:
  explicit FlightRing(size_t capacity) : entries_(capacity) {}

  /// Note that a collective is entered; returns its slot.
  uint64_t begin(const OpRecord& op);
  /// The same of a message; `peer` is a group rank, or -1 for any.
  uint64_t begin(const OpRecord& op, int peer, int64_t tag);
  /// The same in Python's words: `what` holds no tensor, `peer` is None for a collective.
  uint64_t begin(nanobind::object what, nanobind::object peer, nanobind::object tag);
  /// It is over; a failure is not empty.
  void end(uint64_t slot, nanobind::object failure);
  void end(uint64_t slot);
  /// While nobody has said that it is over, `pending` knows.
  void follow(uint64_t slot, nanobind::object pending);

  /// Tuples, oldest first; see _core.pyi.
  nanobind::list records() const;

 private:
  struct Entry {
    uint64_t slot = 0;
    uint64_t number = 0;  // of a collective, from 1
    OpRecord op{};
    nanobind::object what, peer, tag;  // in Python's words; null where `op` tells
    nanobind::object code;             // where the program called from; null if unknown
    int position = 0;                  // in the code: an instruction's offset, in 3.10 a line
    int64_t entered = 0, ended = 0;    // nanoseconds since 1970; 0: not yet
    nanobind::object failure, pending;
  };

  Entry& add();
  Entry* find(uint64_t slot);
  nanobind::tuple record(const Entry& entry) const;

  std::vector<Entry> entries_;
  std::deque<Entry> late_;  // pushed out while they still ran
  uint64_t next_ = 0, collectives_ = 0;
};

/// Learn whose frames are not the program's: a mapping of file names to bools.
void set_library_filter(PyObject* in_library);

}  // namespace tilework
