#include "python/flight_ring.h"

#include "python/py_group.h"

#include <algorithm>
#include <unordered_map>

#if PY_VERSION_HEX >= 0x030b0000
#define Py_BUILD_CORE
#include <internal/pycore_frame.h>
#undef Py_BUILD_CORE
#endif

namespace nb = nanobind;

namespace tilework {
namespace {

PyObject* in_library = nullptr;

/// True if a code object's file is a library's, not the program's own. Code objects of one file
/// share one string object, so the answer is cached by its address (and the string referenced).
bool in_library_file(PyCodeObject* code) {
  static auto* known = new std::unordered_map<PyObject*, bool>();
  PyObject* file = code->co_filename;
  const auto cached = known->find(file);
  if (cached != known->end()) return cached->second;
  PyObject* answer = in_library ? PyObject_GetItem(in_library, file) : nullptr;
  PyErr_Clear();
  Py_XDECREF(answer);          // True and False live on
  if (known->size() < 4096) {  // bounded, whatever a program generates
    Py_INCREF(file);
    known->emplace(file, answer == Py_True);
  }
  return answer == Py_True;
}

int line_at(PyCodeObject* code, int position) {
#if PY_VERSION_HEX >= 0x030b0000
  return PyCode_Addr2Line(code, position);
#else
  (void)code;
  return position;
#endif
}

#if PY_VERSION_HEX >= 0x030b0000
/// A frame of the interpreter's. To make an object of it costs as much as all else that is recorded.
using Frame = _PyInterpreterFrame*;

/// As PyEval_GetFrame() and PyFrame_GetBack() do, leave out frames that are being made.
Frame complete(Frame frame) {
  while (frame && _PyFrame_IsIncomplete(frame)) frame = frame->previous;
  return frame;
}
Frame outer(Frame frame) { return complete(frame->previous); }
#if PY_VERSION_HEX >= 0x030d0000
Frame innermost() { return complete(PyThreadState_Get()->current_frame); }
nb::object code_of(Frame frame) {
  return nb::borrow(reinterpret_cast<PyObject*>(_PyFrame_GetCode(frame)));
}
#else
Frame innermost() { return complete(PyThreadState_Get()->cframe->current_frame); }
nb::object code_of(Frame frame) { return nb::borrow(reinterpret_cast<PyObject*>(frame->f_code)); }
#endif
int position_in(Frame frame) {
  return _PyInterpreterFrame_LASTI(frame) * static_cast<int>(sizeof(_Py_CODEUNIT));
}
#else
using Frame = nb::object;

PyFrameObject* of(const Frame& frame) { return reinterpret_cast<PyFrameObject*>(frame.ptr()); }
Frame innermost() { return nb::borrow(reinterpret_cast<PyObject*>(PyEval_GetFrame())); }
Frame outer(const Frame& frame) {
  return nb::steal(reinterpret_cast<PyObject*>(PyFrame_GetBack(of(frame))));
}
nb::object code_of(const Frame& frame) {
  return nb::steal(reinterpret_cast<PyObject*>(PyFrame_GetCode(of(frame))));
}
int position_in(const Frame& frame) { return PyFrame_GetLineNumber(of(frame)); }
#endif

/// The program's innermost frame.
CallPlace call_place() {
  for (Frame frame = innermost(); frame; frame = outer(frame)) {
    nb::object code = code_of(frame);
    if (!in_library_file(reinterpret_cast<PyCodeObject*>(code.ptr())))
      return {std::move(code), position_in(frame)};
  }
  return {};
}

nb::object or_none(const nb::object& object) { return object.is_valid() ? object : nb::none(); }

nb::tuple sizes_of(const Shape& shape, int count) {
  nb::list sizes, shapes;
  for (int dim = 0; dim < shape.dims; ++dim) sizes.append(shape.sizes[dim]);
  for (int i = 0; i < count; ++i) shapes.append(nb::tuple(sizes));
  return nb::tuple(shapes);
}

}  // namespace

nb::object what_of(const OpRecord& op) {
  nb::object reduce_op = nb::none(), root = nb::none(), dtype = nb::none();
  if (op.in_count + op.out_count > 0) dtype = nb::str(dtype_name(static_cast<unsigned>(op.dtype)));
  if (op.reduce_op != ReduceOp::kNone)
    reduce_op = nb::str(reduce_op_name(static_cast<unsigned>(op.reduce_op)));
  if (op.root >= 0) root = nb::int_(op.root);
  return nb::make_tuple(op.name, dtype, sizes_of(op.in, op.in_count),
                        sizes_of(op.out, op.out_count), reduce_op, root);
}

nb::object site_of(const CallPlace& place) {
  if (!place.code.is_valid()) return nb::none();
  const int line = line_at(reinterpret_cast<PyCodeObject*>(place.code.ptr()), place.position);
  return nb::make_tuple(place.code, line);
}

void set_library_filter(PyObject* mapping) {
  Py_INCREF(mapping);
  in_library = mapping;
}

FlightRing::Entry& FlightRing::add() {
  Entry& entry = entries_[next_ % entries_.size()];
  if (next_ >= entries_.size() && entry.ended == 0) {
    if (unfinished_.size() == entries_.size()) unfinished_.pop_front();
    unfinished_.push_back(std::move(entry));
  }
  entry.slot = next_++;
  entry.ended = 0;
  entry.is_message = false;
  entry.entered = ticks();
  if (entry.what.is_valid()) entry.what = entry.peer = entry.tag = nb::object();
  if (entry.failure.is_valid()) entry.failure = nb::object();
  if (entry.pending.is_valid()) entry.pending = nb::object();
  entry.completion.reset();
  entry.place = call_place();
  return entry;
}

const FlightRing::Entry* FlightRing::find(uint64_t slot) const {
  const Entry& newest = entries_[slot % entries_.size()];
  if (newest.slot == slot) return &newest;
  for (const Entry& entry : unfinished_)
    if (entry.slot == slot) return &entry;
  return nullptr;  // evicted twice
}

uint64_t FlightRing::begin(const OpRecord& op) {
  Entry& entry = add();
  entry.number = ++collectives_;
  entry.op = op;
  entry.message_tag = 0;
  return entry.slot;
}

uint64_t FlightRing::begin(const OpRecord& op, int peer, int64_t tag) {
  Entry& entry = add();
  entry.number = 0;
  entry.op = op;
  entry.is_message = true;
  entry.message_peer = peer;
  entry.message_tag = tag;
  return entry.slot;
}

uint64_t FlightRing::begin(nb::object what, nb::object peer, nb::object tag) {
  Entry& entry = add();
  entry.number = peer.is_none() ? ++collectives_ : 0;
  entry.what = std::move(what);
  entry.peer = std::move(peer);
  entry.tag = std::move(tag);
  return entry.slot;
}

void FlightRing::end(uint64_t slot, nb::object failure) {
  Entry* entry = find(slot);
  if (!entry) return;
  entry->failure = std::move(failure);
  entry->ended = ticks();
}

void FlightRing::end(uint64_t slot) {
  Entry* entry = find(slot);
  if (entry) entry->ended = ticks();
}

void FlightRing::follow(uint64_t slot, nb::object pending) {
  Entry* entry = find(slot);
  if (entry) entry->pending = std::move(pending);
}

void FlightRing::follow(uint64_t slot, std::shared_ptr<Completion> pending) {
  Entry* entry = find(slot);
  if (entry) entry->completion = std::move(pending);
}

std::pair<CallPlace, OpRecord> FlightRing::call(uint64_t slot) {
  const Entry* entry = find(slot);
  if (!entry) return {};
  return {entry->place, entry->op};
}

nb::tuple FlightRing::record(const Entry& entry, const TickScale::Now& now) const {
  nb::object pending = or_none(entry.pending);
  if (entry.completion)
    pending = nb::cast(PyCompletion{entry.completion, GroupRef(nullptr), false});
  const bool is_native = !entry.what.is_valid();
  return nb::make_tuple(entry.number, is_native ? what_of(entry.op) : entry.what,
                        site_of(entry.place), now.wall_ns(entry.entered),
                        entry.ended == 0 ? 0 : now.wall_ns(entry.ended), or_none(entry.failure),
                        pending,
                        entry.is_message ? nb::int_(entry.message_peer) : or_none(entry.peer),
                        is_native ? nb::int_(entry.message_tag) : or_none(entry.tag));
}

nb::list FlightRing::records() const {
  nb::list result;
  const TickScale::Now now(scale_);
  for (const Entry& entry : unfinished_)
    if (entry.ended == 0) result.append(record(entry, now));
  const uint64_t size = entries_.size(), first = next_ > size ? next_ - size : 0;
  for (uint64_t slot = first; slot < next_; ++slot)
    if (entries_[slot % size].slot == slot) result.append(record(entries_[slot % size], now));
  return result;
}

nb::tuple FlightRing::since(uint64_t first, const std::vector<uint64_t>& also) const {
  nb::list result;
  const TickScale::Now now(scale_);
  const auto add = [&](uint64_t slot) {
    const Entry* entry = find(slot);
    if (!entry || slot >= next_) return;
    std::shared_ptr<Completion> completion = entry->completion;
    PyCompletion* pending = nullptr;
    if (!completion && entry->pending.is_valid() && nb::try_cast(entry->pending, pending) &&
        pending)
      completion = pending->completion;
    const uint64_t waited = completion ? completion->waited() : 0;
    const uint64_t finished = completion ? completion->finished() : 0;
    result.append(nb::make_tuple(slot, record(*entry, now), waited ? now.wall_ns(waited) : 0,
                                 finished ? now.wall_ns(finished) : 0));
  };
  for (const uint64_t slot : also) add(slot);
  const uint64_t size = entries_.size();
  const uint64_t end = next_;  // a record may run Python code
  for (uint64_t slot = std::max(first, end > size ? end - size : 0); slot < end; ++slot) add(slot);
  return nb::make_tuple(end, now.wall_ahead_ns(), result);
}

void FlightRing::grow(size_t capacity) {
  const size_t size = entries_.size();
  if (capacity <= size) return;
  std::vector<Entry> larger(capacity);
  for (Entry& blank : larger) blank.ended = 1;  // it does not run
  for (uint64_t slot = next_ > size ? next_ - size : 0; slot < next_; ++slot)
    if (entries_[slot % size].slot == slot)
      larger[slot % capacity] = std::move(entries_[slot % size]);
  entries_ = std::move(larger);
}

}  // namespace tilework
