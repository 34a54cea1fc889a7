// The last operations of one rank's end of a group, for flight records: what ran, from where in
// the program, when, and how it ended. Cheap enough to be always on: an entry is a few dozen
// bytes written in place, and nothing is formatted until somebody asks.
//
// Only touched with the GIL held.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <memory>

#include "tensors.h"
#include "ticket.h"

namespace tilework {

/// What an entry tells of an operation's tensors.
struct Told {
  const char* kind;
  const char* dtype = "";
  const char* reduce_op = "";
  int peer = -1;    // the root, the other side of a message
  int64_t tag = -1;  // of a message
  int in_count = 0, out_count = 0;
  Shape in = {}, out = {};
};

/// What is known of a collective without its tensors.
Told tell(const Operation& operation);

class Journal {
 public:
  static constexpr size_t kEntries = 256;

  Journal() = default;
  Journal(const Journal&) = delete;
  Journal& operator=(const Journal&) = delete;
  ~Journal();

  /// Note that the calling thread enters an operation; returns its number in the journal.
  uint64_t begin(const Told& told, uint64_t sequence);
  /// It ended here, well or not.
  void end(uint64_t index, bool well);
  /// It goes on without the caller, until the ticket is done.
  void hand_over(uint64_t index, std::shared_ptr<Ticket> ticket);

  /// Tuples, oldest first; see _core.pyi.
  nanobind::list records() const;

 private:
  struct Entry {
    Told told;
    uint64_t sequence = 0;
    int64_t entered = 0, ended = 0;  // nanoseconds of the wall clock; 0: not yet
    bool failed = false;
    PyCodeObject* code = nullptr;  // where the program called from; owned
    int position = 0;              // in the code: an instruction's offset, or for 3.10 a line
    std::shared_ptr<Ticket> ticket;
  };

  nanobind::tuple record(const Entry& entry) const;

  std::array<Entry, kEntries> entries_;
  uint64_t next_ = 0;
};

/// Learn whose frames are not the program's: a mapping of file names to bools.
void learn_libraries(PyObject* in_library);

}  // namespace tilework
