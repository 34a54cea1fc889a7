#include "journal.h"

#include <unordered_map>

namespace nb = nanobind;

namespace tilework {
namespace {

PyObject* in_library = nullptr;

/// Whether a code object's file is a library's, not the program's own. Code objects of one file
/// share one string object, so the answer is kept by its address (and the string by a reference).
bool of_library(PyCodeObject* code) {
  static auto* known = new std::unordered_map<PyObject*, bool>();
  PyObject* file = code->co_filename;
  const auto found = known->find(file);
  if (found != known->end()) return found->second;
  PyObject* answer = in_library ? PyObject_GetItem(in_library, file) : nullptr;
  PyErr_Clear();
  Py_XDECREF(answer);  // True and False live on
  if (known->size() < 4096) {  // bounded, whatever a program generates
    Py_INCREF(file);
    known->emplace(file, answer == Py_True);
  }
  return answer == Py_True;
}

int position_in(PyFrameObject* frame) {
#if PY_VERSION_HEX >= 0x030b0000
  return PyFrame_GetLasti(frame);
#else
  return PyFrame_GetLineNumber(frame);
#endif
}

int line_at(PyCodeObject* code, int position) {
#if PY_VERSION_HEX >= 0x030b0000
  return PyCode_Addr2Line(code, position);
#else
  (void)code;
  return position;
#endif
}

/// The innermost frame of the program's own; a new reference to its code, or null.
PyCodeObject* caller(int& position) {
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  while (frame) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    if (!of_library(code)) {
      position = position_in(frame);
      Py_DECREF(frame);
      return code;
    }
    Py_DECREF(code);
    PyFrameObject* outer = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = outer;
  }
  return nullptr;
}

nb::object sizes_of(const Shape& shape) {
  nb::list sizes;
  for (int dim = 0; dim < shape.dims; ++dim) sizes.append(shape.sizes[dim]);
  return nb::tuple(sizes);
}

}  // namespace

void learn_libraries(PyObject* mapping) {
  Py_INCREF(mapping);
  in_library = mapping;
}

Told tell(const Operation& operation) {
  Told told{kind_name(static_cast<unsigned>(operation.kind))};
  if (operation.kind == Kind::kBarrier) return told;
  told.dtype = dtype_name(static_cast<unsigned>(operation.dtype));
  if (reduces(operation.kind))
    told.reduce_op = reduce_op_name(static_cast<unsigned>(operation.reduce_op));
  const bool rooted = operation.kind == Kind::kBroadcast || operation.kind == Kind::kReduce ||
                      operation.kind == Kind::kGather || operation.kind == Kind::kScatter;
  if (rooted) told.peer = operation.root;
  return told;
}

Journal::~Journal() {
  for (Entry& entry : entries_) Py_XDECREF(entry.code);
}

uint64_t Journal::begin(const Told& told, uint64_t sequence) {
  Entry& entry = entries_[next_ % kEntries];
  PyCodeObject* before = entry.code;
  entry.told = told;
  entry.sequence = sequence;
  entry.entered = wall_clock_ns();
  entry.ended = 0;
  entry.failed = false;
  entry.ticket.reset();
  entry.code = caller(entry.position);
  Py_XDECREF(before);
  return next_++;
}

void Journal::end(uint64_t index, bool well) {
  if (next_ - index > kEntries) return;  // overwritten by operations of other threads
  Entry& entry = entries_[index % kEntries];
  entry.ended = wall_clock_ns();
  entry.failed = !well;
}

void Journal::hand_over(uint64_t index, std::shared_ptr<Ticket> ticket) {
  if (next_ - index <= kEntries) entries_[index % kEntries].ticket = std::move(ticket);
}

nb::tuple Journal::record(const Entry& entry) const {
  int64_t ended = entry.ended;
  bool failed = entry.failed;
  if (ended == 0 && entry.ticket && entry.ticket->done()) {
    ended = entry.ticket->ended();
    failed = entry.ticket->fault().has_value();
  }
  const char* outcome = ended == 0 ? "running" : failed ? "failed" : "done";
  const Told& told = entry.told;
  nb::object code = nb::none();
  if (entry.code) code = nb::borrow(reinterpret_cast<PyObject*>(entry.code));
  const int line = entry.code ? line_at(entry.code, entry.position) : 0;
  return nb::make_tuple(entry.sequence, told.kind, told.dtype, told.reduce_op, told.peer, told.tag,
                        sizes_of(told.in), told.in_count, sizes_of(told.out), told.out_count, code,
                        line, entry.entered, ended, outcome);
}

nb::list Journal::records() const {
  nb::list result;
  const uint64_t first = next_ > kEntries ? next_ - kEntries : 0;
  for (uint64_t index = first; index < next_; ++index)
    result.append(record(entries_[index % kEntries]));
  return result;
}

}  // namespace tilework
